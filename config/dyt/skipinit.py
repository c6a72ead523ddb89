"""SkipInit in place of norms, a scalar on every branch: a rival of DyT (arXiv 2503.10622). After
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/skipinit.py \
        --out_dir=out/vit_b_skipinit
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_l.py config/dyt/skipinit.py \
        --out_dir=out/vit_l_skipinit
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/skipinit.py \
        --out_dir=out/dyt_small_skipinit
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/skipinit.py \
        --out_dir=out/quick_skipinit

Accuracy in the paper's Table 10 (ViT-B and ViT-L): 74.1 and 75.6 (norms 82.3 and 83.1, DyT 82.8 and
83.6). The paper follows "the original protocols" and searches each method's LR (sec. 6.4);
SkipInit's is not in the text [U]. vit_b.py and vit_l.py have ConvNeXt's recipe [I]: sweep
--learning_rate. Fixup and SkipInit need "significantly lower" ones. The scalar starts at 0, as in
the original. The LNS paper's starts at 1/√L, and there the norms stay [I]: config/lns/skipinit.py.
The DyT paper has no language models of this kind: no scalar on the embedding here [I];
--embed_scale=True adds DyT's.
"""

base = "dyt.py"
norm = "none"
embed_scale = False
branch_scale = "skipinit"
branch_scale_init = 0.0  # every branch is off at first
