"""The LLaMA of 237M of the blockwise learning rate paper (arXiv 2502.19002).

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_237m_lr
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_237m.py \
        config/blockwise/minipile.py --learning_rate=7.5e-4 --min_lr=3.75e-5 \
        --out_dir=out/blockwise_llama_237m_minipile

Prepare the data once: python data/openwebtext/prepare.py, and python data/minipile/prepare.py
This is the paper's AdamW baseline, with one LR: betas 0.9 and 0.95, decay 0.1, clip 1.0, LR falling
to a twentieth. For the paper's method, an LR for each block type, put
config/blockwise/blockwise.py, or a variant, after it. Loss on OpenWebText after 50K steps (Table
1): 2.834, with blockwise LR 2.784. Loss gap and speed-up in steps of blockwise LR, read off plots
in the authors' repository: OpenWebText 0.058 (0.050 in the table) and 1.91×; MiniPile 0.051 and
1.92×. Architecture as in Table 2 and App. A; untied head and N(0, 0.02) without 1/√(2L) as in the
authors' code.
"""

out_dir = "out/blockwise_llama_237m"
dataset = "openwebtext"

n_layer = 8
n_head = 16
n_embd = 1024
n_ff = 4096
block_size = 1024
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 8e-4
min_lr = learning_rate / 20
# As in the authors' code. The paper aligns its settings with nanoGPT, which decays no norms.
decay_gains = "all"
batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 20
max_iters = 50_000  # 100_000 in its longer baseline
warmup_iters = 1000
eval_tokens = 0  # all of val.bin
