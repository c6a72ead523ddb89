"""The GPT-2 of 124M of the blockwise learning rate paper (arXiv 2502.19002).

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/gpt2_124m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/gpt2_124m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_gpt2_124m_lr
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/gpt2_124m.py \
        config/blockwise/minipile.py --out_dir=out/blockwise_gpt2_124m_minipile

Prepare the data once: python data/openwebtext/prepare.py, and python data/minipile/prepare.py
This is the paper's AdamW baseline, with one LR: betas 0.9 and 0.95, decay 0.1, clip 1.0, LR falling
to a twentieth. For the paper's method, an LR for each block type, put
config/blockwise/blockwise.py, or a variant, after it. Loss gap and speed-up in steps of blockwise
LR, read off plots in the authors' repository: OpenWebText 0.049 and 1.99×. LayerNorm without bias,
tied head and 1/√(2L) as in the authors' code. There the GELU is exact (--mlp=gelu_erf); ours is
GPT-2's tanh form [I]. The peak LR for MiniPile is the same.
"""

out_dir = "out/blockwise_gpt2_124m"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

norm = "layernorm"
norm_eps = 1e-5

learning_rate = 6e-4
min_lr = learning_rate / 20
# As in the authors' code. The paper aligns its settings with nanoGPT, which decays no norms.
decay_gains = "all"
batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 30
max_iters = 50_000  # 100_000 in its longer baseline
warmup_iters = 1000
eval_tokens = 0  # all of val.bin
