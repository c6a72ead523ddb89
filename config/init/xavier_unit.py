"""Xavier normal for matrices, no 1/√(2L), and embeddings N(0, 1) [I]. Put it after a config of any
size.

    python train.py config/quickstart.py config/init/xavier_unit.py --out_dir=out/init_unit

With a tied head the first logits are then as large as √width. Measured: docs/results/init.md.
"""

base = "xavier.py"
init_std = 1.0
