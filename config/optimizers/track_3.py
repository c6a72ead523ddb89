"""The tuned rates of modded-nanogpt's third track, which ranks optimizers at 124M (its entry 36:
Muon, 3250 steps to 3.28). Put it after a config of any size, with an untied head.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py config/dnt/s3.py \
        config/optimizers/track_3.py --tie_weights=False --batch_size=512 --micro_batch_size=32 \
        --out_dir=out/gpt2_small_track_3 --max_iters=3250 --schedule=wsd --wsd_decay_iters=2275
    python train.py config/quickstart.py config/optimizers/track_3.py --tie_weights=False \
        --out_dir=out/quick_track_3

Muon has 0.025 and decay 0.05, the embedding 0.7, the head 0.004, all vectors 0.015, these three
with decay 0.001, on gains and biases too. In flags all but Muon's are ratios to 0.015, the LR of
AdamW. No clipping, no warm-up; the rates are flat, then linear to 0 over the last 70%: the last
three flags of the first command.

Their loss is a sum over the 524,288 tokens of a step, ours the mean. Only ε sees that: their 1e-10
beside gradients that are so many times larger is 1.9e-16 here.

What their setting has and no flag says, so that 3.28 there and here are different runs: logits 15x
/ √(x² + 225), attention scaled by 0.12, RoPE on half of the channels, an embedding that starts as
N(0, 1), o, down and head that start at 0. The rate of the embedding suits its start and the norm
behind it, as in config/dnt/s3.py; at a standard deviation of 0.02 the first step is 35 times as
large as the weights. Their Newton-Schulz takes 12 steps with (2, -1.5, 0.5), which come close to 1;
Polar Express is the nearest here [I].
"""

base = "muon_original.py"
learning_rate = 0.025
weight_decay = 0.05
muon_coefficients = "polar"
adamw_learning_rate = 0.015
adamw_weight_decay = 0.001
decay_gains = "all"
decay_scalars = True
blockwise_lr = True
lr_ratio_emb = 0.7 / 0.015
lr_ratio_head = 0.004 / 0.015
lr_ratio_qk = 1.0
lr_ratio_vo = 1.0
lr_ratio_ffn = 1.0
lr_ratio_norm = 1.0
beta1 = 0.8
beta2 = 0.95
adam_eps = 1e-10 / 524_288  # theirs, of the mean loss
grad_clip = 0.0
warmup_iters = 0
min_lr = 0.0
