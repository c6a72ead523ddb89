"""The LLaMA of 134M of the blockwise learning rate paper (arXiv 2502.19002).

    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py config/blockwise/blockwise.py \
        --out_dir=out/blockwise_llama_134m_lr
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py --max_iters=60000 \
        --out_dir=out/blockwise_llama_134m_60k

Prepare the data once: python data/minipile/prepare.py
This is the paper's AdamW baseline, with one LR: betas 0.9 and 0.95, decay 0.1, clip 1.0, LR falling to a twentieth.
For the paper's method, an LR for each block type, put config/blockwise/blockwise.py, or a variant, after it.
Loss gap and speed-up in steps of blockwise LR, read off plots in the authors' repository: MiniPile 0.041 and 1.90×.
The paper gives no peak LR for OpenWebText at this size, so this file trains on MiniPile.
Architecture as in Table 2 and App. A; untied head and N(0, 0.02) without 1/√(2L) as in the authors' code.
Four GPUs, as in the paper (App. A): a batch of 300 does not split over eight.
"""

out_dir = "out/blockwise_llama_134m"
dataset = "minipile"

n_layer = 6
n_head = 12
n_embd = 768
n_ff = 3072
block_size = 512
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 1.2e-3
min_lr = learning_rate / 20
decay_gains = "all"  # as in the authors' code; nanoGPT, with which the paper aligns its settings, decays no norms
batch_size = 300  # sequences a step, over all GPUs
micro_batch_size = 25  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 30_000  # 60_000 in its longer baseline
warmup_iters = 600
eval_tokens = 0  # all of val.bin
