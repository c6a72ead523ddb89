"""Weight decay as in the blockwise LR code (arXiv 2502.19002): on all gains too. Put it after a
config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/decay/blockwise.py --out_dir=out/dnt_small_decay_blockwise
    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/decay/blockwise.py \
        --out_dir=out/lns_130m_decay_blockwise
    python train.py config/quickstart.py config/decay/blockwise.py \
        --out_dir=out/quick_decay_blockwise

AdamW in the paper's code decays every group by 0.1, norms included. Its Adam-mini does not decay
norms: for that, use config/decay/nanogpt.py. The paper's text says that its decay of 0.1 aligns
with nanoGPT and LLaMA (sec. 6, A.1); in nanoGPT gains do not decay. The models in config/blockwise/
have this setting already. A model without gains (norm=none) is refused: use
config/decay/nanogpt.py.
"""

base = "nanogpt.py"
decay_gains = "all"
