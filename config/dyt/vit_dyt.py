"""DyT, γ · tanh(αx) + β, in place of every norm of a ViT (arXiv 2503.10622). Put it after any
Pre-LN config of images.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/vit_dyt.py \
        --out_dir=out/b_dyt
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/vit_dyt.py \
        --out_dir=out/l_dyt
    python train.py config/vdnt/digits.py config/dnt/s1.py config/dyt/vit_dyt.py \
        --out_dir=out/digits_dyt

α₀ is 0.5 for all models but LLMs (sec. 7.1), β is in the definition (Eq. 2), and the
scalar on the embedding is for language models only (App. A). Top-1 (Table 1): ViT-B 82.5, ViT-L
83.6 (LayerNorm 82.3 and 83.1). α₀ = 1 gives ViT-B 82.6 (Table 14), but ViT-L diverges above 0.6
(Fig. 9). Other functions, and without α (Tables 8 and 9): identity.py, hardtanh.py, sigmoid.py and
no_alpha.py beside this file.
"""

norm = "dyt"
norm_eps = 1e-6
dyt_alpha_attn = 0.5
dyt_alpha_other = 0.5
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = True
embed_scale = False
