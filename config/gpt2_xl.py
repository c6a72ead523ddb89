"""GPT-2 XL, 1436M parameters as the DNT paper (arXiv 2507.17501) counts them. See
config/gpt2_small.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl.py
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl.py config/optimizers/msgdw.py \
        --out_dir=out/gpt2_xl_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl.py config/init/gpt2.py \
        --out_dir=out/init_xl

The paper's LR for AdamW falls with the baseline's size, but not with DNT's: tune both to compare
them. The shape is L-DNT-XL's, which has 1436M too [I]: OpenAI's GPT-2 XL is 1600 wide. Validation
loss in the paper: AdamW 2.435, mSGDW 2.472.
"""

base = "gpt2_small.py"
out_dir = "out/gpt2_xl"

n_layer = 48
n_head = 24
n_embd = 1536
learning_rate = 1.5e-4  # AdamW
batch_size = 512
micro_batch_size = 8
