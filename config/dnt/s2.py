"""DNT's setting S2: Pre-LN with QK norm (arXiv 2507.17501, sec. 4.4, Fig. 7). Layout only: put it
after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s2.py \
        --out_dir=out/s2
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s2.py \
        --optimizer=msgdw --learning_rate=1.0 --out_dir=out/s2_msgdw
    python train.py config/quickstart.py config/dnt/s2.py --out_dir=out/s2

In the paper's Fig. 6 (mSGDW, 124M) it is similar to S1, the worst.
"""

base = "s1.py"
qk_norm = True
