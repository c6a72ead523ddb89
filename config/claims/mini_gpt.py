"""The base model for claims about GPTs, run on two CPU cores (`python reproduce.py`): 2.1M
parameters.

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python train.py config/claims/mini_gpt.py config/init/xavier.py config/dnt/s5.py \
        --out_dir=out/mini_dnt

The Python standard library's source in 4,096 different tokens; 300 steps of 2,048 tokens. A run
takes about two minutes of one core, and is not compiled, since that takes as long as it saves.
"""

out_dir = "out/mini_gpt"
dataset = "pystdlib_gpt2_4096"

n_layer = 8
n_head = 4
n_embd = 128
block_size = 128
init_std = 0.02 * (768 / n_embd) ** 0.5

batch_size = 16  # sequences a step
max_iters = 300
warmup_iters = 30
learning_rate = 4e-3
min_lr = 4e-4

eval_interval = 300
eval_tokens = 200_000
log_interval = 20
track_interval = 0
compile = False
dtype = "bfloat16"
