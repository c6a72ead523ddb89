"""SkipInit as in the LNS paper (arXiv 2502.05795): a learned scalar on every branch, 1/√L at first;
norms stay [I].

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/skipinit.py \
        --out_dir=out/lns_130m_skipinit
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/skipinit.py \
        --out_dir=out/lns_250m_skipinit
    python train.py config/quickstart.py config/dnt/s1.py config/lns/skipinit.py \
        --out_dir=out/quick_skipinit

Put it after any Pre-LN config. Perplexity in the images of the LNS repository (130M, 250M): 27.41,
22.29. The paper says 1/√L, its code starts at 0.001: --branch_scale_init=0.001. The original
SkipInit, without norms, is config/dyt/skipinit.py.
"""

base = "pre_ln.py"
branch_scale = "skipinit"  # starts at 1/√L
