"""Initial weights of GPT-2 and nanoGPT: N(0, 0.02), times 1/√(2L) on a branch's last matrix. Put it
after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py config/init/gpt2.py \
        --out_dir=out/init_small
    python train.py config/quickstart.py config/init/gpt2.py --out_dir=out/init_gpt2

The DNT paper's GPT-2 baselines have "Xavier" instead (arXiv 2507.17501, Table 5), and so has
config/gpt2_small.py. 0.02 belongs to widths near 768, where std·√width is 0.55. On narrow models it
is too small: docs/results/init.md.
"""

init = "normal"
init_std = 0.02
residual_init = "gpt2"
