"""NorMuon (arXiv 2510.05491): Muon whose updates are divided by the size that each of their rows,
an output neuron, has had lately. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/normuon.py --out_dir=out/dnt_small_normuon
    python train.py config/quickstart.py config/optimizers/normuon.py --out_dir=out/quick_normuon

β₂ of that average is beta2, which AdamW has for the other parameters, too; the paper's is 0.95.
The step has an RMS of 0.2 · LR (the paper's line 10, from notes); with --muon_adjust_lr=original it
is as large as Muon's, as in its authors' code. LR and decay are those of config/optimizers/muon.py
[I]; the paper's at 124M are 3.6e-4 and, for AdamW, 3.6e-3.
"""

base = "muon.py"
muon_row_norm = True
beta2 = 0.95
