"""Adam-mini with one LR, the baseline of adam_mini_blockwise.py (arXiv 2502.19002). Put it after a
config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/adam_mini.py --out_dir=out/blockwise_llama_237m_adam_mini
    torchrun --standalone --nproc_per_node=4 train.py config/blockwise/llama_522m.py \
        config/blockwise/minipile.py config/blockwise/adam_mini.py --learning_rate=4.5e-4 \
        --min_lr=2.25e-5 --out_dir=out/blockwise_llama_522m_minipile_mini
    python train.py config/quickstart.py config/blockwise/adam_mini.py \
        --out_dir=out/quick_blockwise_adam_mini

Version 1.1.0, the one in the authors' repository. The LR stays that of the config before it, tuned
for AdamW, as in the paper (sec. 6.3, A.3); so do betas and the decay of matrices [I]. The authors'
code does not decay norms under Adam-mini, though it does under AdamW.
"""

optimizer = "adam_mini"
decay_gains = "none"
