"""A small DNT (setting S5) on the Python standard library's source, byte by byte: minutes on 2 CPU
cores.

    python data/pystdlib/prepare.py && python train.py config/quickstart.py
"""

out_dir = "out/quickstart"
dataset = "pystdlib"

n_layer = 4
n_head = 6
n_embd = 192
block_size = 128
pos = "rope"
init_std = 0.02 * (768 / n_embd) ** 0.5  # 0.02 belongs to width 768: docs/results/init.md

# DNT, setting S5
pre_norm = "attn"
mid_norm = "both"
input_norm = True
qk_norm = True

batch_size = 16
max_iters = 1200
warmup_iters = 100
learning_rate = 3e-3
min_lr = 3e-4

eval_interval = 200
eval_tokens = 100_000
log_interval = 10
