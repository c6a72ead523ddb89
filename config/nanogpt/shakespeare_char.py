"""nanoGPT's config/train_shakespeare_char.py, ported: characters of Shakespeare, 10.7M parameters.

    python data/shakespeare_char/prepare.py
    python train.py config/nanogpt/shakespeare_char.py  # one GPU: minutes
    # a CPU: minutes
    python train.py config/nanogpt/shakespeare_char.py --n_layer=4 --n_head=4 --n_embd=128 \
        --block_size=64 --batch_size=12 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 \
        --eval_tokens=15360 --log_interval=1

The last command is that of nanoGPT's README for a CPU: eval_iters=20 are 20 × 12 × 64 tokens. What
differs from nanoGPT: gpt2.py says it. config/shakespeare_char.py has the same sizes, and DNT's
network.
"""

base = "gpt2.py"

out_dir = "out/nanogpt_shakespeare_char"
dataset = "shakespeare_char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
dropout = 0.2

batch_size = 64 * 1  # gradient_accumulation_steps=1
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100

eval_interval = 250
eval_tokens = 200 * 64 * 256
log_interval = 10
wandb_project = "shakespeare-char"
