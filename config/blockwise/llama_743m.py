"""The LLaMA of 743M of the blockwise learning rate paper (arXiv 2502.19002). See llama_237m.py for
the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_743m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_743m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_743m_lr
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_743m.py \
        --max_iters=100000 --out_dir=out/blockwise_llama_743m_100k

Loss gap and speed-up in steps of blockwise LR, read off plots in the authors' repository:
OpenWebText 0.052 and 1.88×. The paper gives no peak LR for MiniPile at this size.
"""

base = "llama_237m.py"
out_dir = "out/blockwise_llama_743m"

n_layer = 13
n_head = 26
n_embd = 1664
n_ff = 6656
learning_rate = 6e-4
min_lr = learning_rate / 20
micro_batch_size = 10
