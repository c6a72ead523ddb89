"""σReparam in place of norms, a rival of DyT (arXiv 2503.10622, Table 10). Put it after any Pre-LN
config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py \
        config/dyt/sigma_reparam.py --out_dir=out/vit_b_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py \
        config/dyt/sigma_reparam.py --out_dir=out/vit_l_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py \
        config/dyt/sigma_reparam.py --out_dir=out/dyt_small_sigma_reparam
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py \
        config/dyt/sigma_reparam.py --norm=rmsnorm --out_dir=out/dyt_small_sigma_norm
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/sigma_reparam.py \
        --out_dir=out/quick_sigma_reparam

Accuracy in the paper's Table 10 (ViT-B and ViT-L): 82.5 and 83.0 (norms 82.3 and 83.1, DyT 82.8 and
83.6). The paper follows "the original protocols" and searches each method's LR (sec. 6.4);
σReparam's is not in the text [U]. vit_b.py and vit_l.py have ConvNeXt's recipe [I]: sweep
--learning_rate. Without norms, as in the paper (sec. 6.4). In the code of σReparam's authors they
are optional: the fourth command keeps them. The paper has no language models of this kind: no
scalar on the embedding here [I]; --embed_scale=True adds DyT's.
"""

base = "dyt.py"
norm = "none"
embed_scale = False
sigma_reparam = True  # every matrix in the blocks [I] is γ W/σ(W), γ = σ(W) at first
