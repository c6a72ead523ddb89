"""DNT's setting S3: S2 with an input norm (arXiv 2507.17501, sec. 4.4, Fig. 7). Layout only: put it
after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s3.py \
        --out_dir=out/s3
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/s3.py \
        --optimizer=msgdw --learning_rate=1.0 --out_dir=out/s3_msgdw
    python train.py config/quickstart.py config/dnt/s3.py --out_dir=out/s3

In the paper's Fig. 6 (mSGDW) it is better than S1 and S2 at 124M, and the best of all on ImageNet.
"""

base = "s1.py"
input_norm = True
qk_norm = True
