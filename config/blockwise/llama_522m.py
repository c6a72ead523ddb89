"""The LLaMA of 522M of the blockwise learning rate paper (arXiv 2502.19002). See llama_237m.py for
the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_522m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_522m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_522m_lr
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_522m.py \
        config/blockwise/minipile.py --learning_rate=4.5e-4 --min_lr=2.25e-5 \
        --out_dir=out/blockwise_llama_522m_minipile

Loss gap and speed-up in steps of blockwise LR, read off plots in the authors' repository:
OpenWebText 0.052 and 1.91×; MiniPile 0.056 and 2.25×.
"""

base = "llama_237m.py"
out_dir = "out/blockwise_llama_522m"

n_layer = 15
n_head = 20
n_embd = 1280
n_ff = 5120
micro_batch_size = 12
