"""GPT-2 Large, 774M parameters as the DNT paper (arXiv 2507.17501) counts them. See
config/gpt2_small.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py \
        config/optimizers/msgdw.py --out_dir=out/gpt2_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py config/init/gpt2.py \
        --out_dir=out/init_large

The paper's LR for AdamW falls with the baseline's size, but not with DNT's: tune both to compare
them. Validation loss in the paper: AdamW 2.492, mSGDW 2.544.
"""

base = "gpt2_small.py"
out_dir = "out/gpt2_large"

n_layer = 36
n_head = 20
n_embd = 1280
learning_rate = 2.5e-4  # AdamW
batch_size = 512
micro_batch_size = 16
