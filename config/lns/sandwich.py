"""Sandwich-LN: norms before and after every branch; a rival of LNS (arXiv 2502.05795). Put it after
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/sandwich.py \
        --out_dir=out/lns_130m_sandwich
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/sandwich.py \
        --out_dir=out/lns_250m_sandwich
    python train.py config/quickstart.py config/dnt/s1.py config/lns/sandwich.py \
        --out_dir=out/quick_sandwich

The LNS paper finds it slightly better than Pre-LN at 130M (Table 7, but the text that we have lacks
its cells [U]). CogView, which it is from, also has 1/√(2L) on a branch's last matrix
(--residual_init=gpt2); we leave that out, to compare it with the other schemes [I].
"""

base = "pre_ln.py"
mid_norm = "both"
