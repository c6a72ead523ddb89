"""Muon in Keller Jordan's convention, AdamW on the rest. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/optimizers/muon_original.py \
        --out_dir=out/dnt_small_muon_original
    python train.py config/quickstart.py config/optimizers/muon_original.py --out_dir=out/quick_muon_original

LR 0.02 and decay 0.01 of the matrices are those of his examples, for this scale of the updates alone. The rest has the
DNT paper's AdamW, 6e-4 and 0.1, and both go to a tenth: the rest to that paper's 6e-5 [I]. His Adam has an ε of 1e-10,
ours 1e-8.
"""

optimizer = "muon"
learning_rate = 0.02
min_lr = 0.002  # the rest in proportion: 6e-5
weight_decay = 0.01
adamw_learning_rate = 6e-4
adamw_weight_decay = 0.1
muon_adjust_lr = "original"  # updates times √max(1, rows/columns)
momentum = 0.95
nesterov = True
muon_steps = 5
