"""The miniature of the layout track (docs/track.md): 2.2M parameters, minutes on a CPU.

    python data/pystdlib/prepare.py --tokenizer=gpt2_4096
    python train.py config/track/mini.py config/optimizers/muon.py --learning_rate=8e-3 \
        --out_dir=out/track_mini

The Python standard library's source in 4,096 different tokens; 80 steps of 1,024 tokens. The
learning rate falls linearly to exactly 0. Initial weights: GPT-2's at this width, as in
config/init/width_128.py. In fp32, which every CPU has: a run takes about 30 seconds of one core of
an AMD EPYC with AVX2.
"""

out_dir = "out/track_mini"
dataset = "pystdlib_gpt2_4096"

n_layer = 6
n_head = 4
n_embd = 128
block_size = 128
pos = "rope"
tie_weights = False
init_std = 0.02 * (768 / n_embd) ** 0.5

batch_size = 8  # sequences a step
max_iters = 80
warmup_iters = 8
schedule = "linear"
learning_rate = 8e-3
min_lr = 0.0

eval_interval = 80
eval_rows = "first"
eval_tokens = 16_384
log_interval = 20
track_interval = 0
dtype = "float32"
compile = False
