"""Peri-LN: norms before and after every branch, and on the embedding (arXiv 2502.02732). Layout
only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/peri_ln.py --out_dir=out/peri_ln
    python train.py config/quickstart.py config/layouts/peri_ln.py --out_dir=out/quick_peri_ln

We have the abstract, and texts that quote the paper [U]. The norm on the embedding is optional
there; with it is our choice [I], without it (--input_norm=False) this is Sandwich norm. Which
parameters decay, eps and the initial weights are not in these texts [U]. Losses as quoted, of
Pre-LN and Peri-LN: 3.43 and 3.34 at 400M, 3.29 and 3.18 at 1.5B, 3.20 and 3.11 at 3.2B (30B
tokens). HybridNorm's Table 13 has 2.751 for both (550M, 400B tokens; Peri-LN without the norm on
the embedding).
"""

base = "../dnt/s1.py"
mid_norm = "both"
input_norm = True
