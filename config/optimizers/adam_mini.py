"""Adam-mini: AdamW with one second moment per block of a parameter. Put it after a config of any
size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/adam_mini.py --out_dir=out/dnt_small_adam_mini
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py \
        config/optimizers/adam_mini.py --out_dir=out/gpt2_large_adam_mini
    python train.py config/quickstart.py config/optimizers/adam_mini.py \
        --out_dir=out/quick_adam_mini

LR, betas and decay stay those of the config before it, chosen for AdamW: Adam-mini's authors
recommend the same values, and the blockwise LR paper takes AdamW's LRs too (sec. 6.3). Their code
never decays the gains of norms, but the models in config/blockwise/ do: after those, use
config/blockwise/adam_mini.py.
"""

optimizer = "adam_mini"
