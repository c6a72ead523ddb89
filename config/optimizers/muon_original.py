"""Muon in Keller Jordan's convention, AdamW on the rest. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon_original.py --out_dir=out/dnt_small_muon_original
    python train.py config/quickstart.py config/optimizers/muon_original.py \
        --out_dir=out/quick_muon_original

The matrices have the LR 0.02 and the decay 0.01 of his examples, which suit only this scale of the
updates. The rest has the AdamW of the DNT paper, LR 6e-4 and decay 0.1. Both LRs fall to a tenth,
so the rest ends at that paper's 6e-5 [I]. The ε of his Adam is 1e-10, ours is 1e-8.
"""

base = "muon.py"
learning_rate = 0.02
min_lr = 0.002  # the rest in proportion: 6e-5
weight_decay = 0.01
adamw_learning_rate = 6e-4
adamw_weight_decay = 0.1
muon_adjust_lr = "original"  # updates times √max(1, rows/columns)
