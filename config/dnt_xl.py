"""L-DNT-XL, 1436M parameters as the paper counts them (arXiv 2507.17501, Table 3). See
config/dnt_small.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_xl.py
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_xl.py config/optimizers/msgdw.py \
        --out_dir=out/dnt_xl_msgdw

Validation loss in the paper: AdamW 2.396, mSGDW 2.408 (GPT-2: 2.435 and 2.472).
"""

base = "dnt_small.py"
out_dir = "out/dnt_xl"

n_layer = 48
n_head = 24
n_embd = 1536
batch_size = 512
micro_batch_size = 8
