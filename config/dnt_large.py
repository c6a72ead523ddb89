"""L-DNT-Large, 774M parameters as the paper counts them (arXiv 2507.17501, Table 3). See
config/dnt_small.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_large.py
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_large.py \
        config/optimizers/msgdw.py --out_dir=out/dnt_large_msgdw

Validation loss in the paper: AdamW 2.481, mSGDW 2.503 (GPT-2: 2.492 and 2.544).
"""

base = "dnt_small.py"
out_dir = "out/dnt_large"

n_layer = 36
n_head = 20
n_embd = 1280
batch_size = 512
micro_batch_size = 16
