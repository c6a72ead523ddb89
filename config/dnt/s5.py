"""DNT's setting S5, its default (arXiv 2507.17501, Figs. 3 and 7). Layout only: put it after any
config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s5.py \
        --out_dir=out/s5
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s5.py \
        --optimizer=msgdw --learning_rate=1.0 --out_dir=out/s5_msgdw
    python train.py config/quickstart.py config/dnt/s5.py --out_dir=out/s5

S4 without the norm before the FFN. In the paper's Fig. 6 (mSGDW, 124M) it is about equal to S4;
these two are the best.
"""

base = "s4.py"
pre_norm = "attn"
