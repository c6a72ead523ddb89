"""DyT without a squashing function: γ · αx. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/identity.py \
        --out_dir=out/dyt_small_identity
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/identity.py --out_dir=out/quick_identity

Accuracy of the paper's ViT-S and ViT-B (Table 8): 58.5 and 61.0, then both fail; with tanh 80.3 and 82.5. Expect
divergence.
"""

norm = "dyt"
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "identity"
dyt_bias = False
embed_scale = True
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
