"""mSGDW with the values of V-DNT-Huge and ViT-Huge (arXiv 2507.17501, Table 4). Put it after a
config of images.

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py \
        config/vdnt/huge_msgdw.py --out_dir=out/vdnt_huge_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py config/vdnt/vit.py \
        config/vdnt/huge_msgdw.py --out_dir=out/vit_huge_msgdw

Without clipping, unlike the paper's language models. Dampening and Nesterov are off, as by timm's
default; Table 4 does not name them. Warm-up stays that of the config before it: 60 epochs under
both optimizers. Another batch or model needs its own LR: sweep it [I].
"""

base = "large_msgdw.py"
learning_rate = 0.1
weight_decay = 1e-3
