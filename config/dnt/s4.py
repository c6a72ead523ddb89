"""DNT's setting S4: S3 with mid norms (arXiv 2507.17501, sec. 4.4, Fig. 7). Layout only: put it
after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s4.py \
        --out_dir=out/s4
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s4.py \
        --optimizer=msgdw --learning_rate=1.0 --out_dir=out/s4_msgdw
    python train.py config/quickstart.py config/dnt/s4.py --out_dir=out/s4

In the paper's Fig. 6 (mSGDW, 124M) it is about equal to S5; these two are the best. The
leave-one-out files (no_qk_norm.py and three others) start from S4 [I].
"""

base = "s1.py"
mid_norm = "both"
input_norm = True
qk_norm = True
