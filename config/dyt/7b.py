"""LLaMA 7B without norms: DyT (arXiv 2503.10622). Heads and FFN are LLaMA-7B's [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py config/dyt/rmsnorm.py \
        --out_dir=out/rmsnorm_7b

Prepare the data once: python data/c4/prepare.py --shards=1024
(0.17 trillion tokens; it checks the disk first)
The paper: width, depth, α₀ (Table 11); the embedding's scalar, The Pile, 200B tokens, 4M a step, LR
3e-4 (App. A). Its code (FMS-FSDP): no β; 4096 a sequence; AdamW, betas 0.9 and 0.95, clip 1.0,
decay 0.1 on all parameters; the LR is the peak times min(1 - (1 - t/w)², 0.1 + 0.45 (1 +
cos(πt/T))), w = min(2000, T/20). Mean score on 15 tasks and training loss (Table 4): RMSNorm 0.513
and 1.59, DyT 0.513 and 1.60. Different here: C4, some of it twice, in GPT-2's vocabulary (LLaMA's
32000 tokens make 6.74B parameters). Unsharded, weights, gradients and AdamW's state take 16 bytes a
parameter: 110 GB on a GPU.
"""

out_dir = "out/dyt_7b"
dataset = "c4"

n_layer = 32
n_head = 32
n_embd = 4096
n_ff = 11008
block_size = 4096
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"  # blocks N(0, 0.02) [I]; embedding and head too, in the code cut off
norm = "dyt"
dyt_alpha_attn = 0.8  # α₀, Table 11
dyt_alpha_other = 0.2
embed_scale = True

learning_rate = 3e-4
decay_gains = "all"
decay_scalars = True  # α and the scalar on the embedding too
batch_size = 1024  # sequences a step, over all GPUs: 4.2M tokens
micro_batch_size = 2  # on one GPU at a time
max_iters = 47_684  # 200B tokens; T too [I], which the README of DyT's code does not set [U]
schedule = "dyt"
warmup_iters = 2000  # w
