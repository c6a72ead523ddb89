"""Blockwise LR on the embedding alone, from Table 1 (arXiv 2502.19002). Put it after a config of
any size.

    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/emb.py --out_dir=out/blockwise_llama_237m_emb
    python train.py config/quickstart.py config/blockwise/emb.py --learning_rate=1e-3 \
        --min_lr=5e-5 --out_dir=out/quick_blockwise_emb

Loss of 237M on OpenWebText after 50K steps: 2.818. At one LR it is 2.834, with embedding and FFN
2.791, with all four block types 2.784. The ratio is that of Eq. 5 (sec. 6.2, A.2), all else stays
at 1. The ratio holds from the first step on, as in the authors' code [I]; the paper says that its
runs switch at the end of warm-up (A.2): --blockwise_start=warmup_end. Which of the two made its
numbers is not known [U].
"""

base = "blockwise.py"
lr_ratio_qk = 1.0
lr_ratio_ffn = 1.0
lr_ratio_vo = 1.0
