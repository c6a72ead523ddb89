"""Blockwise learning rates (arXiv 2502.19002), the ratios for AdamW (Eq. 5). Put it after a config
of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_llama_237m_lr
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/gpt2_124m.py \
        config/blockwise/blockwise.py --out_dir=out/blockwise_gpt2_124m_lr
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/blockwise.py --blockwise_min_lr=proportional \
        --out_dir=out/blockwise_llama_237m_lr_min
    python train.py config/quickstart.py config/blockwise/blockwise.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_blockwise

The LR of a block type is its ratio times learning_rate, the one tuned for plain AdamW. Ratios from
the first step on, as in the authors' code [I]; the paper says that its runs switch at the end of
warm-up (A.2): config/blockwise/warmup_end.py. Which of the two made its numbers is not known [U].
All LRs fall to the same min LR, as in the code. A step decays weights by LR times decay, which
grows with the ratio: config/blockwise/decay_unscaled.py undoes that. Loss of 237M on OpenWebText
after 50K steps (Table 1): 2.784, at one LR 2.834. The paper's ratios for Adam-mini:
config/blockwise/adam_mini_blockwise.py. Under mSGDW and Muon these are untested [I].
"""

blockwise_lr = True
lr_ratio_emb = 10.0
lr_ratio_qk = 8.0
lr_ratio_ffn = 6.0
lr_ratio_vo = 4.0
lr_ratio_norm = 1.0  # all gains and scalars [I]
lr_ratio_head = 1.0  # an untied head; a tied one is the embedding
lr_ratio_pos = 1.0  # learned positions
blockwise_start = "start"
blockwise_min_lr = "shared"
blockwise_decay = "scaled"
