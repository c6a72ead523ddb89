"""ViT-L on ImageNet-1k as in the DyT paper (arXiv 2503.10622, Table 1): its LayerNorm baseline.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/vit_dyt.py \
        --out_dir=out/vit_l_dyt

The recipe is that of config/dyt/vit_b.py, but the paper has stochastic depth 0.4 and betas 0.9,
0.95 (App. A). Top-1: LayerNorm 83.1, DyT 83.6; tuning the LR gives nothing (Tables 1, 13). With an
α₀ above 0.6 it diverges (Fig. 9).
"""

base = "vit_b.py"
out_dir = "out/vit_l"

n_layer = 24
n_head = 16
n_embd = 1024
drop_path = 0.4
micro_batch_size = 128
beta2 = 0.95
