"""Muon as it is run in 2026: Polar Express, NorMuon and cautious weight decay together [I]. Put it
after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon_2026.py --out_dir=out/dnt_small_muon_2026
    python train.py config/quickstart.py config/optimizers/muon_2026.py \
        --out_dir=out/quick_muon_2026

Polar Express (arXiv 2505.16932) is in config/optimizers/muon_polar.py, NorMuon (2510.05491) in
config/optimizers/normuon.py. Cautious decay (2510.12402) acts only on entries that the update moves
towards zero, here on those of AdamW as well [I]; its paper leaves the decay as it is. Speed-run
code has all three, each in a form of its own: docs/optimizers.md has the differences.
"""

base = "normuon.py"
muon_coefficients = "polar"
cautious_decay = True
