"""Another tuned set of blockwise ratios: 6, 4, 3, 2. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/tuned_6432.py --out_dir=out/blockwise_llama_237m_tuned_6432
    python train.py config/quickstart.py config/blockwise/tuned_6432.py --learning_rate=1e-3 --min_lr=5e-5 \
        --out_dir=out/quick_tuned_6432

Embedding 6, query and key 4, FFN 3, value and output 2: one of the two tuned sets that the paper has beside 10, 8, 6,
4 (config/blockwise/blockwise.py). We have no number for it [U].
"""

blockwise_lr = True
lr_ratio_emb = 6.0
lr_ratio_qk = 4.0
lr_ratio_ffn = 3.0
lr_ratio_vo = 2.0
lr_ratio_norm = 1.0  # all gains and scalars
lr_ratio_head = 1.0  # where it is untied; a tied one is the embedding
lr_ratio_pos = 1.0  # where they are learned
blockwise_start = "start"
blockwise_min_lr = "shared"
blockwise_decay = "scaled"
