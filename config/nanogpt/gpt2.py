"""nanoGPT's GPT-2 of 124M parameters on OpenWebText: its network, and the defaults of its train.py.
Also the base of a ported config: `base = "nanogpt/gpt2.py"`, or in front of it on the command line.

    torchrun --standalone --nproc_per_node=8 train.py config/nanogpt/gpt2.py
    python train.py config/nanogpt/gpt2.py --init_from=gpt2 --eval_only=True

Prepare the data once: python data/openwebtext/prepare.py
Values: nanoGPT's train.py (commit 3adf61e). Its config/train_gpt2.py adds eval_interval=1000 and
log_interval=10. nanoGPT writes the batch as 12 sequences and 40 accumulations, and evaluates on 200
times 12 sequences. What differs: nanoGPT draws rows at random, those of evaluations too, and makes
one step more than max_iters. Its learning rate in step t = 1, 2, … is t/2001 of the peak in warm-up
(here t/2000), and after it that of our step t - 1.
"""

base = "network.py"

out_dir = "out/nanogpt_gpt2"
dataset = "openwebtext"
init_from = "scratch"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
dropout = 0.0

batch_size = 12 * 40  # sequences a step, over all GPUs
max_iters = 600_000
optimizer = "adamw"
learning_rate = 6e-4
weight_decay = 0.1  # of all matrices, embeddings too
decay_emb = True
decay_gains = "none"
decay_scalars = False
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0

# A config that sets some of these keeps the others: min_lr does not follow learning_rate.
schedule = "cosine"
warmup_iters = 2000
lr_decay_iters = 600_000
min_lr = 6e-5

eval_interval = 2000
eval_tokens = 200 * 12 * 1024
eval_only = False
log_interval = 1
wandb_log = False
wandb_project = "owt"
