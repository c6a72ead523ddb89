"""MiniPile in place of OpenWebText, as in the blockwise LR paper (arXiv 2502.19002, App. A.1). Put
it after a size.

    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_237m.py \
        config/blockwise/minipile.py --learning_rate=7.5e-4 --min_lr=3.75e-5 \
        --out_dir=out/blockwise_llama_237m_minipile
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_237m.py \
        config/blockwise/minipile.py config/blockwise/blockwise.py --learning_rate=7.5e-4 \
        --min_lr=3.75e-5 --out_dir=out/blockwise_llama_237m_minipile_lr

Prepare the data once: python data/minipile/prepare.py
The paper: sequences of 512 tokens, 300 a step, 30,000 or 60,000 steps, 600 of them warm-up, and an
LR that falls to a twentieth. Peak LR by size (Table 2): GPT-2 6e-4; LLaMA 134M 1.2e-3, 237M 7.5e-4,
522M 4.5e-4. It depends on the size, so it is not in this file. Four GPUs, as in the paper (App. A):
a batch of 300 does not split over eight.
"""

dataset = "minipile"
block_size = 512
batch_size = 300  # sequences a step, over all GPUs
micro_batch_size = 15  # on one GPU at a time
max_iters = 30_000  # 60_000 in its longer baseline
warmup_iters = 600
