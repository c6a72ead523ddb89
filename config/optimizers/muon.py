"""Muon on the matrices of the blocks, AdamW on the rest, both at AdamW's LR [I]. Put it after a
config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon.py --out_dir=out/dnt_small_muon
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py \
        config/optimizers/muon.py --out_dir=out/gpt2_large_muon
    python train.py config/quickstart.py config/optimizers/muon.py --out_dir=out/quick_muon

LR, min LR and decay stay those of the config before it, chosen for AdamW: match_rms_adamw makes
Muon's updates as large as AdamW's, so we start from the same values [I]. The DNT paper's values are
in config/optimizers/muon_dnt.py, Keller Jordan's in config/optimizers/muon_original.py. To change
the LR of embeddings, head and gains alone: --adamw_learning_rate=3e-4.
"""

optimizer = "muon"
muon_adjust_lr = "match_rms_adamw"  # updates times 0.2·√max(rows, columns)
momentum = 0.95
nesterov = True
muon_steps = 5
