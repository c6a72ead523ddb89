"""The LLaMA of 134M of the blockwise learning rate paper (arXiv 2502.19002). See llama_237m.py for
the rest.

    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_134m_lr
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_134m.py \
        --max_iters=60000 --out_dir=out/blockwise_llama_134m_60k

Prepare the data once: python data/minipile/prepare.py
Loss gap and speed-up in steps of blockwise LR, read off plots in the authors' repository: MiniPile
0.041 and 1.90×. The paper gives no peak LR for OpenWebText at this size, so this file trains on
MiniPile, on four GPUs as in the paper (App. A): a batch of 300 does not split over eight.
"""

base = "llama_237m.py"
out_dir = "out/blockwise_llama_134m"
dataset = "minipile"

n_layer = 6
n_head = 12
n_embd = 768
n_ff = 3072
block_size = 512
learning_rate = 1.2e-3
min_lr = learning_rate / 20
batch_size = 300
micro_batch_size = 25
max_iters = 30_000  # 60_000 in its longer baseline
warmup_iters = 600
