"""LLaMA 13B without norms: DyT (arXiv 2503.10622). The shape is that of LLaMA-13B [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py config/dyt/rmsnorm.py --out_dir=out/rmsnorm_13b

Prepare the data once: python data/c4/prepare.py --shards=1024     # 0.17 trillion tokens; it checks the disk first
The paper: The Pile, 200B tokens, 4M a step, 4096 a sequence; peak LR 3e-4, AdamW, betas 0.9 and 0.95, clip 1.0. In
its code, and here: decay 0.1 on all parameters; LR min(1 - (1 - t/w)², 0.1 + 0.45 (1 + cos(πt/T))) of the peak, w =
min(2000, T/20). T, which its README leaves open [U], is the number of steps [I]. Score and loss there:
RMSNorm 0.529 and 1.53, DyT 0.529 and 1.54.
Different here: C4 in GPT-2's vocabulary (of 32000 entries, as LLaMA's, it is a model of 13.02B). Matrices start at
N(0, 0.02) without 1/√(2L) [I]. Weights, gradients, AdamW's state, unsharded: 16 bytes a parameter, 211 GB a GPU.
"""

out_dir = "out/dyt_13b"
dataset = "c4"

n_layer = 40
n_head = 40
n_embd = 5120
n_ff = 13824
block_size = 4096
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"
norm = "dyt"
dyt_alpha_attn = 0.6  # α₀ by width, from the paper
dyt_alpha_other = 0.15
embed_scale = True

learning_rate = 3e-4
decay_gains = "all"
decay_scalars = True  # α and the scalar on the embedding too
batch_size = 1024  # sequences a step, over all GPUs: 4.2M tokens
micro_batch_size = 1  # on one GPU at a time
max_iters = 47_684  # 200B tokens
schedule = "dyt"
warmup_iters = 2000  # w
