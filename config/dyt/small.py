"""A small LLaMA with RMSNorm, 12 layers 768 wide: the base model for DyT and its rivals
(config/dyt/) [I].

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        --out_dir=out/dyt_small_dyt
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        config/decay/dyt.py --out_dir=out/dyt_small_dyt_decay

Prepare the data once: python data/openwebtext/prepare.py
The DyT paper (arXiv 2503.10622) has no run of this size: size, data, LR, batch and steps are ours
[I]. From the code of its LLaMA runs: AdamW's betas 0.9 and 0.95, decay 0.1, clip 1.0, min(2000,
T/20) steps of warm-up, 10% of the LR at the end, and the untied head. Two things are ours. The
schedule is a cosine; theirs is --schedule=dyt. Only matrices decay, so that decay is the same for
all schemes; theirs, on all parameters, is the last command. All schemes are compared at one LR; the
paper tunes it for the rivals and for DyT (Table 10), so sweep --learning_rate too.
"""

out_dir = "out/dyt_small"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
n_ff = 2048
block_size = 1024
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 6e-4
batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 30
max_iters = 50_000
warmup_iters = 2000

eval_interval = 1000
eval_tokens = 0  # all of val.bin
