"""Fixup in place of norms, a rival of DyT (arXiv 2503.10622, Table 10). Put it after any Pre-LN
config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/fixup.py \
        --out_dir=out/vit_b_fixup
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/fixup.py \
        --out_dir=out/vit_l_fixup
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/fixup.py \
        --out_dir=out/dyt_small_fixup
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/fixup.py \
        --residual_init=plain --out_dir=out/quick_fixup

Accuracy in the paper's Table 10 (ViT-B and ViT-L): 77.2 and 78.1 (norms 82.3 and 83.1, DyT 82.8 and
83.6). The paper follows "the original protocols" and searches each method's LR (sec. 6.4); Fixup's
is not in the text [U]. vit_b.py and vit_l.py have ConvNeXt's recipe [I]: sweep --learning_rate.
Fixup and SkipInit need "significantly lower" ones. Fixup was made for ResNets and starts the
classifier at zero, as a ViT's and an untied head do here. What it means for q, k and SwiGLU is our
choice [I]. The paper has no language models of this kind: no scalar on the embedding here [I];
--embed_scale=True adds DyT's.
"""

base = "dyt.py"
norm = "none"
embed_scale = False
fixup = True  # scalar biases and multipliers, branch ends that start at zero
