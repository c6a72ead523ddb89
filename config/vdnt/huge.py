"""V-DNT-Huge on ImageNet-1k, 632M parameters: DNT's setting S5 on images (arXiv 2507.17501).

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py \
        config/vdnt/huge_msgdw.py --out_dir=out/vdnt_huge_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py config/dnt/s1.py \
        config/vdnt/huge_msgdw.py --out_dir=out/vdnt_huge_s1_msgdw

The recipe is that of config/vdnt/large.py, but stochastic depth is 0.5, and mSGDW has LR 0.1 and
decay 1e-3 (huge_msgdw.py). Table 4 has 150 epochs, Fig. 10's caption 160. Top-1 in the paper: AdamW
81.9, mSGDW 81.2 (ViT-Huge: 80.8 and 73.5). Its Fig. 6, mSGDW: S1 is much the worst, S3 the best, S4
and S5 are excellent too. Patches of 14 × 14 are ours [I]: by them the count is the paper's.
"""

base = "large.py"
out_dir = "out/vdnt_huge"

n_layer = 32
n_embd = 1280
patch_size = 14
drop_path = 0.5
micro_batch_size = 64
