"""DyT without the learned scalar on the embedding. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/no_embed_scale.py \
        --out_dir=out/dyt_small_no_embed_scale
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/no_embed_scale.py \
        --out_dir=out/quick_no_embed_scale

The paper adds that scalar, √d at first, to its language models. We found no published number for leaving it out [U].
"""

norm = "dyt"
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = False
embed_scale = False
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
