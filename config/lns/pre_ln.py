"""Pre-LN, the baseline of the LNS paper (arXiv 2502.05795). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/pre_ln.py \
        --out_dir=out/lns_130m_pre_ln
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/pre_ln.py \
        --out_dir=out/lns_250m_pre_ln
    python train.py config/quickstart.py config/dnt/s1.py config/lns/pre_ln.py \
        --out_dir=out/quick_pre_ln

The initial weights have neither 1/√(2L) nor 1/√(2ℓ), as in the code of LNS. Perplexity in the
images of the LNS repository (130M, 250M, 350M, 1B): 26.73, 21.92, 19.58, 17.02. With 1/√(2L), the
fairer baseline [I] (config/lns/scaled_init.py), it is 26.04 and 20.98 at 130M and 250M.
"""

pre_norm = "both"
mid_norm = "none"
post_norm = "none"
post_norm_blocks = 0
norm_groups = 1
input_norm = False
lns = "off"
deepnorm = False
admin = False
branch_scale = "none"
init = "normal"
residual_init = "plain"
