"""DyT without a squashing function: γ · αx (arXiv 2503.10622). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/identity.py \
        --out_dir=out/vit_b_identity
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/identity.py \
        --out_dir=out/dyt_small_identity
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/identity.py \
        --out_dir=out/quick_identity

Accuracy of the paper's ViT-S and ViT-B (Table 8): 58.5 and 61.0, then both diverge; with tanh 80.3
and 82.5. On images: α₀ 0.5, β, no scalar on the embedding. On language models it is our transfer
[I], for the paper's have tanh: α₀ and scalar as in config/dyt/dyt.py, no β.
"""

base = "dyt.py"
dyt_squash = "identity"
