"""The base of the study of learning rates and sizes (docs/results/transfer.md): 4 blocks of width
64, on bytes.

    python data/pystdlib/prepare.py
    python train.py config/transfer.py config/dnt/s5.py --out_dir=out/transfer
    python sweep.py config/transfer.py --n_embd=64,128,256 --parametrization=standard,mup \
        --learning_rate=2e-3,4e-3,8e-3

Xavier for matrices, the DNT paper's word, so `standard` has the variance 1/width. 150 steps of
1,024 bytes take a CPU core 10 seconds at this width, and 50 at 256.
"""

out_dir = "out/transfer"
dataset = "pystdlib"

n_layer = 4
n_head = 2
n_embd = 64
base_n_embd = 64  # the base of --parametrization=mup, for other values of n_embd
base_n_layer = 4
block_size = 128
init = "xavier"
init_std = 0.02
residual_init = "plain"

batch_size = 8  # sequences a step
max_iters = 150
warmup_iters = 15
learning_rate = 4e-3
min_lr = 4e-4

eval_interval = 150
eval_tokens = 40_960
log_interval = 25
track_interval = 0
compile = False
dtype = "bfloat16"
