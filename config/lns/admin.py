"""Admin: Post-LN with a learned vector ω on the stream; a rival of LNS (arXiv 2502.05795). After
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/admin.py \
        --out_dir=out/lns_130m_admin
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/admin.py \
        --out_dir=out/lns_250m_admin
    python train.py config/quickstart.py config/dnt/s1.py config/lns/admin.py \
        --out_dir=out/quick_admin

The initial ω limits what each branch adds to what its depth can bear: ω₁ = 1, ωᵢ₊₁² = Var(ωᵢx) +
Var(fᵢ). The LNS paper finds Admin worse than Pre-LN at 130M (Table 7, but the text that we have
lacks its cells [U]). Admin assumes that the stream starts with variance 1. With embeddings of std
0.02 the second ω would be 0.02, and the first FFN would outweigh the stream. So there is an input
norm here [I]; --input_norm=False removes it.
"""

base = "post_ln.py"
input_norm = True  # gives the stream variance 1 at first [I]
admin = True  # ω from a profiling forward before the first step
