"""DeepNorm, as published by its authors (decoder-only); a rival of LNS (arXiv 2502.05795). After
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/deepnorm.py \
        --out_dir=out/lns_130m_deepnorm
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/deepnorm.py \
        --out_dir=out/lns_250m_deepnorm
    python train.py config/quickstart.py config/dnt/s1.py config/lns/deepnorm.py \
        --out_dir=out/quick_deepnorm

Perplexity in the images of the LNS repository (130M, 250M, 350M, 1B): 27.17, 22.77, 1362.59,
1409.08. They are no evidence against DeepNorm, because the code there has two errors. It multiplies
the stream by 2.828 at every depth, which is right for 32 layers only (2.21 at 12, 2.63 at 24). And
it multiplies the initial matrices by (8L)^¼, where it should divide them by that. That code also
has a final norm after the last post norm; here there is none [I].
"""

base = "post_ln.py"
deepnorm = True  # stream × (2L)^¼; v, o and FFN start × (8L)^-¼
init = "xavier"
