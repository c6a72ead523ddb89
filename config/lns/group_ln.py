"""Group-LN: Pre-LN with statistics over groups of channels; a rival of LNS (arXiv 2502.05795).
After any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/group_ln.py \
        --out_dir=out/lns_130m_group_ln
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/group_ln.py \
        --out_dir=out/lns_250m_group_ln
    python train.py config/quickstart.py config/dnt/s1.py config/lns/group_ln.py \
        --out_dir=out/quick_group_ln

The number of groups is not in the paper's text [U]; we take 32, the usual one of GroupNorm [I]. The
LNS paper finds Group-LN worse than Pre-LN at 130M (Table 7, but the text that we have lacks its
cells [U]).
"""

base = "pre_ln.py"
norm_groups = 32  # [I]; it has to divide n_embd
