"""Keel: Post-LN with pre norms, and a stream times the number of sub-layers beside every branch
(arXiv 2601.19895, eq. 8). Layout only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/keel.py --out_dir=out/keel
    python train.py config/quickstart.py config/layouts/keel.py --out_dir=out/quick_keel

skip_scale=0 is the constant α = 2·n_layer, 24 for 12 blocks. The paper's layers may be blocks or
sub-layers; we read α as the number of sub-layers (sec. 3.1), and small models may tune it (footnote
2): --skip_scale=8. The first attention is Pre-LN, without α; the first FFN has both norms, without
α. The last post norm is the final norm [I]. Eq. 9 writes the norm as x/‖x‖₂ ⊙ γ; we take RMSNorm
[I]. No code is published; eps and what decays are not stated [U]. Its rates fall with depth, 9e-3
(64 layers) to 4.5e-3 (1024). Gains are for deep models: benchmark mean of Pre-LN and Keel 37.9 and
39.6 at 64 layers, 57.9 and 60.9 at 1024 (Table 3, single runs, each at its own rate); the loss is
above Pre-LN's at first.
"""

base = "../dnt/s1.py"
post_norm = "both"
pre_norm_sublayers = 1
skip_scale = 0
