"""GPT-2's initial weights at width 128: N(0, 0.049), which keeps std·√width at its value for width
768.

    python train.py config/claims/mini_gpt.py config/init/width_128.py --out_dir=out/init_width

The scaling is ours [I]. For another width change `_width`. Measured: docs/results/init.md.
"""

base = "gpt2.py"
_width = 128

init_std = 0.02 * (768 / _width) ** 0.5
