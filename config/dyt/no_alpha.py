"""DyT without α: γ · tanh(x) (arXiv 2503.10622). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/no_alpha.py \
        --out_dir=out/vit_b_no_alpha
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/no_alpha.py \
        --dyt_squash=hardtanh --out_dir=out/vit_b_no_alpha_hardtanh
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/no_alpha.py \
        --out_dir=out/dyt_small_no_alpha
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/no_alpha.py \
        --out_dir=out/quick_no_alpha

Accuracy of the paper's ViT-B (Table 9) for tanh, hardtanh and sigmoid (--dyt_squash=sigmoid): 81.1,
80.7, 80.7; with α 82.5, 82.2, 81.6. On images: β, no scalar on the embedding. On language models it
is our transfer [I]: the scalar of config/dyt/dyt.py, no β.
"""

base = "dyt.py"
dyt_alpha_attn = 1.0  # tanh(x)
dyt_alpha_other = 1.0
dyt_learn_alpha = False
