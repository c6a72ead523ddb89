"""Blockwise LR from the end of warm-up on, as the paper's text says. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/warmup_end.py --out_dir=out/blockwise_llama_237m_warmup_end
    python train.py config/quickstart.py config/blockwise/warmup_end.py --learning_rate=1e-3 --min_lr=5e-5 \
        --out_dir=out/quick_blockwise_warmup_end

App. A.2 (arXiv 2502.19002): plain AdamW during warm-up, then the ratios. So the LR jumps there. The authors' code warms
up to the multiplied peak instead (config/blockwise/blockwise.py); its option for the switch only prints a warning.
"""

blockwise_lr = True
lr_ratio_emb = 10.0
lr_ratio_qk = 8.0
lr_ratio_ffn = 6.0
lr_ratio_vo = 4.0
lr_ratio_norm = 1.0  # all gains and scalars [I]
lr_ratio_head = 1.0  # where it is untied; a tied one is the embedding
lr_ratio_pos = 1.0  # where they are learned
blockwise_start = "warmup_end"
blockwise_min_lr = "shared"
blockwise_decay = "scaled"
