"""DyT, γ · tanh(αx) + β, in place of every norm of a ViT (arXiv 2503.10622). Put it after any Pre-LN config of images.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/vit_dyt.py \
        --out_dir=out/b_dyt
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/vit_dyt.py \
        --out_dir=out/l_dyt
    python train.py config/vdnt/digits.py config/dnt/s1.py config/dyt/vit_dyt.py --out_dir=out/digits_dyt

α₀ is 0.5 for all that is no language model, and β is there, as in the paper's vision models. ViT-L diverges with an α₀
above 0.6. Top-1: ViT-B 82.5, ViT-L 83.6 (LayerNorm 82.3 and 83.1). Squashing functions, ViT-S and ViT-B (Table 8):
identity 58.5, then fails, and 61.0, then diverges; tanh 80.3 and 82.5; hardtanh 79.9 and 82.2; sigmoid 79.6 and 81.6.
Without α (Table 9; ViT-B [I]): tanh 81.1, hardtanh 80.7, sigmoid 80.7. The scalar on the embedding is for language
models only.
"""

norm = "dyt"
norm_eps = 1e-6
dyt_alpha_attn = 0.5
dyt_alpha_other = 0.5
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = True
embed_scale = False
