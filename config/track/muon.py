"""Muon in the layout track: 3,300 steps, 1.73e9 tokens. Put it after config/track/base.py.

    torchrun --standalone --nproc_per_node=8 train.py config/track/base.py config/track/muon.py \
        --out_dir=out/track_pre_ln_muon

Matrices of the blocks: LR 0.025 and decay 0.05, tuned by the optimizer track of modded-nanogpt for
a run of 3,250 steps. The rest, on AdamW: 3.2e-3 of "Fantastic pretraining optimizers" (arXiv
2509.02046, of which we have tables, not the text; Muon, 130M parameters, batches of this size),
nanoGPT's betas and decay [I]. The track's own rates for the rest (embedding 0.7, head 0.004) belong
to embeddings of N(0, 1) behind a norm: config/optimizers/track_3.py has them.
"""

optimizer = "muon"
momentum = 0.95
nesterov = True
muon_adjust_lr = "original"  # updates times √max(1, rows/columns)
learning_rate = 0.025
weight_decay = 0.05
adamw_learning_rate = 3.2e-3
adamw_weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
max_iters = 3300
warmup_iters = 330
