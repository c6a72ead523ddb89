"""The character-level Shakespeare model of nanoGPT's README, as a DNT (setting S5).

    python data/shakespeare_char/prepare.py
    python train.py config/shakespeare_char.py  # one GPU: minutes
    # a CPU: minutes
    python train.py config/shakespeare_char.py --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 \
        --batch_size=12 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
    python train.py config/shakespeare_char.py --optimizer=msgdw --learning_rate=1.0 \
        --out_dir=out/shakespeare_msgdw

Sizes and AdamW settings are nanoGPT's (LR 1e-3, beta2 0.99, dropout 0.2). The DNT paper has no run
of this size, so the mSGDW command uses the LR of its 124M model [I].
"""

out_dir = "out/shakespeare_char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2
init_std = 0.02 * (768 / n_embd) ** 0.5  # 0.02 belongs to width 768: docs/results/init.md

# DNT, setting S5
pre_norm = "attn"
mid_norm = "both"
input_norm = True
qk_norm = True

batch_size = 64
learning_rate = 1e-3  # AdamW; 1.0 for mSGDW
min_lr = 1e-4
beta2 = 0.99
max_iters = 5000
warmup_iters = 100

eval_interval = 250
eval_tokens = 0  # all of val.bin
