"""Xavier normal for matrices, as the DNT paper says; no 1/√(2L) [I]. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py config/init/xavier.py --out_dir=out/xavier
    python train.py config/quickstart.py config/init/xavier.py --out_dir=out/init_xavier

Embeddings (and with them a tied head) are N(0, 0.02) [I]: Xavier's std would be 0.006 for 50,304 tokens of width 768.
"""

init = "xavier"
init_std = 0.02
residual_init = "plain"
