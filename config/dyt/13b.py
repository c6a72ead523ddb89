"""LLaMA 13B without norms: DyT (arXiv 2503.10622). Heads and FFN are LLaMA-13B's [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/13b.py config/dyt/rmsnorm.py --out_dir=out/rmsnorm_13b

Prepare the data once: python data/c4/prepare.py --shards=1024     # 0.17 trillion tokens; it checks the disk first
The paper: width, depth, α₀ (Table 11); the embedding's scalar, The Pile, 200B tokens, 4M a step, LR 3e-4 (App. A).
Its code (FMS-FSDP): no β; 4096 a sequence; AdamW, betas 0.9 and 0.95, clip 1.0, decay 0.1 on all parameters; the LR is
the peak times min(1 - (1 - t/w)², 0.1 + 0.45 (1 + cos(πt/T))), w = min(2000, T/20).
Mean score on 15 tasks and training loss (Table 4): RMSNorm 0.529 and 1.53, DyT 0.529 and 1.54.
Different here: C4, some of it twice, in GPT-2's vocabulary (LLaMA's 32000 tokens make 13.02B parameters). By --plan's
count 41 GB on each of 8 GPUs, without activation checkpointing 108.
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
residual_init = "plain"  # blocks N(0, 0.02) [I]; embedding and head too, in the code cut off
norm = "dyt"
dyt_alpha_attn = 0.6  # α₀, Table 11
dyt_alpha_other = 0.15
embed_scale = True

learning_rate = 3e-4
decay_gains = "all"
decay_scalars = True  # α and the scalar on the embedding too
batch_size = 1024  # sequences a step, over all GPUs: 4.2M tokens
micro_batch_size = 1  # on one GPU at a time
activation_checkpointing = True
max_iters = 47_684  # 200B tokens; T too [I], which the README of DyT's code does not set [U]
schedule = "dyt"
warmup_iters = 2000  # w
