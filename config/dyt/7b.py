"""LLaMA 7B without norms: DyT (arXiv 2503.10622). The shape is that of LLaMA-7B [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py config/dyt/rmsnorm.py --out_dir=out/rmsnorm_7b

Prepare the data once: python data/c4/prepare.py --shards=1024     # 0.17 trillion tokens; it checks the disk first
The paper: The Pile, 200B tokens, 4M a step, 4096 a sequence; LR 3e-4, AdamW with betas 0.9 and 0.95, decay 0.1, clip
1.0.
Score and loss there: RMSNorm 0.513 and 1.59, DyT 0.513 and 1.60.
Different here: C4 in GPT-2's vocabulary (with the 32000 entries of LLaMA's it is a model of 6.74B). Decay on matrices
only; the authors' code decays all parameters, and --decay_gains=all comes closest: α and the embedding scalar never
decay here. Their LR is min(1 - (1 - t/w)², 0.1 + 0.45 (1 + cos(πt/T))) of the peak, w = min(2000, T/20): linear
warm-up and cosine to 10% are nearly the same [I]; T, which their README leaves open, is the number of steps [I].
Matrices start at N(0, 0.02) without 1/√(2L) [I].
Weights, gradients and AdamW's state are 16 bytes a parameter, 110 GB on each GPU unless they are sharded.
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
residual_init = "plain"
norm = "dyt"
dyt_alpha_attn = 0.8  # α₀ by width, from the paper
dyt_alpha_other = 0.2
embed_scale = True

learning_rate = 3e-4
batch_size = 1024  # sequences a step, over all GPUs: 4.2M tokens
micro_batch_size = 2  # on one GPU at a time
max_iters = 47_684  # 200B tokens
warmup_iters = 2000
