"""σReparam in place of norms. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/sigma_reparam.py \
        --out_dir=out/vit_b_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/sigma_reparam.py \
        --out_dir=out/vit_l_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/sigma_reparam.py \
        --out_dir=out/dyt_small_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/sigma_reparam.py --norm=rmsnorm \
        --out_dir=out/dyt_small_sigma_norm
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/sigma_reparam.py \
        --out_dir=out/quick_sigma_reparam

Accuracy in the paper's Table 10 (ViT-B and ViT-L, LRs tuned): 82.5 and 83.0 (norms 82.3 and 83.1, DyT 82.8 and 83.6).
In the code of σReparam's authors norms are optional: we leave them out [I], the fourth command keeps them. The paper
has no language models of this kind: no scalar on the embedding here [I]; --embed_scale=True adds DyT's.
"""

norm = "none"
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = None
embed_scale = False
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = True  # every matrix in the blocks is γ W/σ(W), γ = σ(W) at first
