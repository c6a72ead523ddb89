"""The base model for claims about LLaMAs on two CPU cores (`python reproduce.py`): 2.6M parameters.

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python train.py config/claims/mini_llama.py --out_dir=out/mini_llama
    python train.py config/claims/mini_llama.py config/lns/lns.py --n_layer=16 \
        --out_dir=out/mini_lns

Like config/claims/mini_gpt.py, but with RoPE, SwiGLU, an untied head, and without 1/√(2L) on the
initial weights.
"""

out_dir = "out/mini_llama"
dataset = "pystdlib_gpt2_4096"

n_layer = 8
n_head = 4
n_embd = 128
n_ff = 344
block_size = 128
pos = "rope"
mlp = "swiglu"
tie_weights = False
init_std = 0.02 * (768 / n_embd) ** 0.5
residual_init = "plain"

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
