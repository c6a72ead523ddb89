"""Xavier normal for matrices, no 1/√(2L), and embeddings N(0, 0.049) [I]: those of width_128.py. For width 128.

    python train.py config/claims/mini_gpt.py config/init/xavier_128.py config/dnt/s5.py --out_dir=out/init_xavier

For another width change `_width`. Measured: docs/results/init.md.
"""

_width = 128

init = "xavier"
init_std = 0.02 * (768 / _width) ** 0.5
residual_init = "plain"
