"""What every entry of the layout track has in common (docs/track.md): 162M parameters, 124M without
the head, on FineWeb.

    python data/fineweb/prepare.py --shards=27
    torchrun --standalone --nproc_per_node=8 train.py config/track/base.py config/track/muon.py \
        --out_dir=out/track_pre_ln_muon
    torchrun --standalone --nproc_per_node=8 train.py config/track/base.py config/track/muon.py \
        config/dnt/s5.py --out_dir=out/track_dnt_muon

The layout is Pre-LN with RMSNorm; an entry's file comes last. From the optimizer track of
modded-nanogpt: GPT-2's ids of FineWeb, 512 × 1024 tokens a step, an untied head, RoPE, and the
first 10,485,760 validation tokens. There is no soft cap, no scale of attention of its own, no RoPE
on half of the channels and no matrix that starts at zero, so the 3.28 there is another network's.
GELU, 12 heads, no biases, the schedule's form and a tenth of the steps as warm-up, which Post-LN
needs, are ours [I]. 27 shards are the first that AdamW's 2.62e9 tokens do not read twice.
"""

out_dir = "out/track"
dataset = "fineweb"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
n_kv_head = 0
head_size = 0
mlp = "gelu"
n_ff = 0
n_expert = 0
pos = "rope"
tie_weights = False
bias = False
dropout = 0.0
drop_path = 0.0

batch_size = 512  # sequences a step, over all GPUs; a GPU takes as many at a time as fit
max_iters = 5000  # AdamW's; Muon has fewer
warmup_iters = 500
schedule = "linear"
min_lr = 0.0
grad_clip = 1.0
decay_emb = True
decay_gains = "none"
decay_scalars = False
blockwise_lr = False
doc_mask = False

# Each evaluation reads 10 million tokens and costs about 7 steps: checkpoints come more often.
eval_interval = 1000
save_interval = 250
eval_rows = "first"
eval_tokens = 10_485_760
target_val_loss = 0.0
