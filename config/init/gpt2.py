"""GPT-2's initial weights: N(0, 0.02), and 1/√(2L) on the last matrix of a branch. Put it after a config of any size.

    python train.py config/quickstart.py config/init/gpt2.py --out_dir=out/init_gpt2

0.02 belongs to widths near 768, where std·√width is 0.55. On narrow models it is too small: docs/results/init.md.
"""

init = "normal"
init_std = 0.02
residual_init = "gpt2"
