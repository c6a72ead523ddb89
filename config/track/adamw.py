"""AdamW in the layout track: 5,000 steps, 2.62e9 tokens. Put it after config/track/base.py.

    torchrun --standalone --nproc_per_node=8 train.py config/track/base.py config/track/adamw.py \
        --out_dir=out/track_pre_ln_adamw

LR: 3.6e-3 is Adam's for 124M parameters on FineWeb in steps of this size in NorMuon's paper (arXiv
2510.05491), and lies between the 1.5e-3 of the optimizer track (with a warm-up of 250 steps) and
the 8e-3 of "Fantastic pretraining optimizers" (2509.02046, of which we have tables, not the text;
130M parameters, warm-up 2,000, where a half costs 0.02 and a warm-up of 500 diverges). Betas and
decay are nanoGPT's [I].
"""

optimizer = "adamw"
learning_rate = 3.6e-3
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
max_iters = 5000
warmup_iters = 500
