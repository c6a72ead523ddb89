"""The LLaMA of 1175M of the blockwise learning rate paper (arXiv 2502.19002). See llama_237m.py for
the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_1175m_lr
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_1175m.py \
        --max_iters=100000 --out_dir=out/blockwise_llama_1175m_100k

Speed-up in steps of blockwise LR: 1.92× (Fig. 1); the authors' repository also has plots of a "2B",
with a loss gap of 0.091 and 2.31×. The paper gives no peak LR for MiniPile at this size.
TinyLlama's grouped queries share 4 heads of k and v (App. A).
"""

base = "llama_237m.py"
out_dir = "out/blockwise_llama_1175m"

n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
n_ff = 5632
learning_rate = 4e-4
min_lr = learning_rate / 20
micro_batch_size = 6
