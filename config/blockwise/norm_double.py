"""Twice the LR for norms, from Table 1 (arXiv 2502.19002). Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/norm_double.py --out_dir=out/blockwise_llama_237m_norm_double
    python train.py config/quickstart.py config/blockwise/norm_double.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_blockwise_norm_double

Loss of 237M on OpenWebText after 50K steps: 2.837, and 2.834 at one LR. The other blocks stay at
the baseline's LR (sec. 6.2). Here all gains and scalars have twice the LR. This holds from the
first step on, as in the authors' code [I]; the paper says that its runs switch at the end of
warm-up (A.2): --blockwise_start=warmup_end. Which of the two made its numbers is not known [U].
"""

base = "blockwise.py"
lr_ratio_emb = 1.0
lr_ratio_qk = 1.0
lr_ratio_ffn = 1.0
lr_ratio_vo = 1.0
lr_ratio_norm = 2.0  # all gains and scalars [I]
