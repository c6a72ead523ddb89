"""Admin: Post-LN with a learned vector ω on the stream. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/admin.py \
        --out_dir=out/lns_130m_admin
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/admin.py \
        --out_dir=out/lns_250m_admin
    python train.py config/quickstart.py config/dnt/s1.py config/lns/admin.py --out_dir=out/quick_admin

ω starts so that each branch adds what its depth can bear: ω₁ = 1, ωᵢ₊₁² = Var(ωᵢx) + Var(fᵢ). The LNS paper: worse
than Pre-LN; its number is not published where we could read it [U].
Admin supposes a stream of variance 1 at first. With embeddings of std 0.02 ω₂ comes out as 0.03, and the first FFN
outweighs the stream; --input_norm=True gives it what it supposes, ω from 1 to 1.6 over 12 blocks [I].
"""

pre_norm = "none"
mid_norm = "none"
post_norm = "both"
post_norm_blocks = 0
norm_groups = 1
lns = "off"
deepnorm = False
admin = True  # ω from a profiling forward before the first step
branch_scale = "none"
init = "normal"
residual_init = "plain"
