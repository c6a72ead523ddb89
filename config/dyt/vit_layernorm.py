"""LayerNorm, the baseline of DyT on images (arXiv 2503.10622). Put it after any Pre-LN config of
images.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py \
        config/dyt/vit_layernorm.py --out_dir=out/b_layernorm
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py \
        config/dyt/vit_layernorm.py --out_dir=out/l_layernorm
    python train.py config/vdnt/digits.py config/dnt/s1.py config/dyt/vit_layernorm.py \
        --out_dir=out/digits_layernorm

Top-1 in the paper (Table 1): ViT-B 82.3, ViT-L 83.1. It does not give the eps [U]; 1e-6 is timm's.
"""

base = "vit_dyt.py"
norm = "layernorm"
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_bias = False
