"""Muon with the coefficients of Polar Express (arXiv 2505.16932): five steps of Newton-Schulz, each
the best for the singular values that the one before has left. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/muon_polar.py --out_dir=out/dnt_small_muon_polar
    python train.py config/quickstart.py config/optimizers/muon_polar.py \
        --out_dir=out/quick_muon_polar

All else is config/optimizers/muon.py. The five triples are those that modded-nanogpt, nanochat and
dion have (safety factor 1.02), not the table of the paper's Algorithm 1 (1.01).
"""

base = "muon.py"
muon_coefficients = "polar"
