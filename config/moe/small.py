"""A small mixture of experts on the Python standard library's source, byte by byte: minutes on 2
CPU cores.

    python data/pystdlib/prepare.py && python train.py config/moe/small.py
    python train.py config/moe/small.py --balance=bias --out_dir=out/moe_small_bias
    python train.py config/moe/small.py --balance=none --out_dir=out/moe_small_none
    python train.py config/moe/small.py --n_expert=0 --n_ff=256 --learning_rate=4e-3 --min_lr=4e-4 \
        --out_dir=out/dense

Each token goes to 2 of 8 experts. The last command is the dense model with as many parameters as a
token meets here, but for the router. Shape, LR and length are ours [I]. Measured:
docs/results/moe.md. It is not compiled, since that takes as long as it saves.
"""

out_dir = "out/moe_small"
dataset = "pystdlib"

n_layer = 4
n_head = 3
n_embd = 96
block_size = 128
pos = "rope"
mlp = "swiglu"
qk_norm = True
init_std = 0.02 * (768 / n_embd) ** 0.5  # 0.02 belongs to width 768: docs/results/init.md

n_expert = 8
n_expert_active = 2
n_ff = 128  # width of one expert

batch_size = 8
max_iters = 400
warmup_iters = 40
learning_rate = 2e-3
min_lr = 2e-4

eval_interval = 400
eval_tokens = 100_000
log_interval = 10
track_interval = 20
compile = False
dtype = "float32"  # on a CPU the groups of an expert are too small for bf16 to be faster
