"""Muon with the DNT paper's LRs (arXiv 2507.17501, App. F.1). Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon_dnt.py --out_dir=out/dnt_small_muon_dnt
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py \
        config/optimizers/muon_dnt.py --out_dir=out/gpt2_small_muon_dnt
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon_dnt.py --muon_adjust_lr=original \
        --out_dir=out/dnt_small_muon_dnt_original
    python train.py config/quickstart.py config/optimizers/muon_dnt.py --out_dir=out/quick_muon_dnt

The paper: Muon for 2D matrices and AdamW for 1D vectors, LR 1e-4 and 6e-4 (its sentence has "2D
vectors" and "1D matrices"), 2000 steps of warm-up. GPT-2's validation loss then begins to rise
after 50K steps; DNT's curve hardly fluctuates, and DNT converges clearly faster than with AdamW.
Not in the text [U], so ours [I]: model and steps, those of the config before it; the scale of the
updates, match_rms_adamw (the third command has the other); momentum 0.95, Nesterov, 5 steps of
Newton-Schulz; decay 0.1; min LR a tenth of the LR, so that the rest ends at the 6e-5 of the paper's
other runs. Embedding and head, though 2D, are on AdamW [I].
"""

base = "muon.py"
learning_rate = 1e-4
min_lr = 1e-5  # the rest in proportion: 6e-5 [I]
weight_decay = 0.1  # [I]
adamw_learning_rate = 6e-4
