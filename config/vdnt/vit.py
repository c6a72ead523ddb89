"""The DNT paper's (arXiv 2507.17501) ViT: Pre-LN with LayerNorm. Put it after config/vdnt/large.py
or huge.py.

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py config/vdnt/vit.py \
        --out_dir=out/vit_large
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py config/vdnt/vit.py \
        --out_dir=out/vit_huge
    python train.py config/vdnt/digits.py config/vdnt/vit.py --out_dir=out/digits_vit

Top-1 of ViT-Large and Huge in the paper: AdamW 81.7 and 80.8, mSGDW 78.2 and 73.5. LayerNorm with
an eps of 1e-6 is timm's [I]: the paper builds on timm, but calls RMSNorm its default norm (sec. 2).
With RMSNorm: config/dnt/s1.py.
"""

base = "../dnt/s1.py"
norm = "layernorm"
