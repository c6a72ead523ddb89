"""DNT's setting S1: standard Pre-LN (arXiv 2507.17501, sec. 4.4, Fig. 7). Layout only: put it after
any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s1.py \
        --out_dir=out/s1
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s1.py \
        --optimizer=msgdw --learning_rate=1.0 --out_dir=out/s1_msgdw
    python train.py config/quickstart.py config/dnt/s1.py --out_dir=out/s1

RMSNorm, the paper's default norm (sec. 2), like the other settings [I]. In its Fig. 6 (mSGDW) S1 is
the worst: S2 is similar at 124M, all others are far better on ImageNet.
"""

norm = "rmsnorm"
norm_eps = 1e-6
pre_norm = "both"
mid_norm = "none"
post_norm = "none"
post_norm_blocks = 0
pre_norm_sublayers = 0
input_norm = False
embed_scale = False
qk_norm = False
qk_norm_over = "head"
v_norm = False
skip_scale = 1.0
gpas = False
tied_skip = False
unit_rows = False
