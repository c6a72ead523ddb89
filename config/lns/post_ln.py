"""Post-LN, a rival of LNS (arXiv 2502.05795). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/post_ln.py \
        --out_dir=out/lns_130m_post_ln
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/post_ln.py \
        --out_dir=out/lns_250m_post_ln
    python train.py config/quickstart.py config/dnt/s1.py config/lns/post_ln.py \
        --out_dir=out/quick_post_ln

The last post norm is the final norm [I]; the code of LNS has one more after it. Perplexity in the
images of the LNS repository (130M, 250M, 350M, 1B): 26.95, 1409.79, 1368.33, 1390.75.
"""

base = "pre_ln.py"
pre_norm = "none"
post_norm = "both"
