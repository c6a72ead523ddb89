"""HybridNorm*: HybridNorm with a first block that is Pre-LN (arXiv 2503.04598, eq. 7). Layout only:
put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/hybrid_norm_star.py --out_dir=out/hybrid_norm_star
    python train.py config/quickstart.py config/layouts/hybrid_norm_star.py \
        --out_dir=out/quick_hybrid_norm_star

The first block keeps the norms on q, k and v. In the authors' code it is a switch on the command
line, for block 0, and no config. In the paper it is the better form, at 550M and at 1.2B.
"""

base = "hybrid_norm.py"
pre_norm_sublayers = 2
