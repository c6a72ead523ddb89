"""The LLaMA of 1175M of the blockwise learning rate paper (arXiv 2502.19002).

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py config/blockwise/blockwise.py \
        --out_dir=out/blockwise_llama_1175m_lr
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py --max_iters=100000 \
        --out_dir=out/blockwise_llama_1175m_100k

Prepare the data once: python data/openwebtext/prepare.py
This is the paper's AdamW baseline, with one LR: betas 0.9 and 0.95, decay 0.1, clip 1.0, LR falling to a twentieth.
For the paper's method, an LR for each block type, put config/blockwise/blockwise.py, or a variant, after it.
Speed-up in steps of blockwise LR: 1.92× (Fig. 1); the authors' repository also has plots of a "2B", with a loss gap of
0.091 and 2.31×. The paper gives no peak LR for MiniPile at this size.
Architecture as in Table 2 and App. A, with TinyLlama's grouped queries, which share 4 heads of k and v; untied head and
N(0, 0.02) without 1/√(2L) as in the authors' code.
"""

out_dir = "out/blockwise_llama_1175m"
dataset = "openwebtext"

n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
n_ff = 5632
block_size = 1024
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 4e-4
min_lr = learning_rate / 20
decay_gains = "all"  # as in the authors' code; nanoGPT, with which the paper aligns its settings, decays no norms
batch_size = 480  # sequences a step, over all GPUs
micro_batch_size = 6  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 50_000  # 100_000 in its longer baseline
warmup_iters = 1000
eval_tokens = 0  # all of val.bin
