"""mSGDW with the values of V-DNT-Large and ViT-Large (arXiv 2507.17501, Table 4). Put it after a
config of images.

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py \
        config/vdnt/large_msgdw.py --out_dir=out/vdnt_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py config/vdnt/vit.py \
        config/vdnt/large_msgdw.py --out_dir=out/vit_large_msgdw

Without clipping, unlike the paper's language models. Dampening and Nesterov are off, as by timm's
default; Table 4 does not name them. Warm-up stays that of the config before it: 60 epochs under
both optimizers. Another batch or model needs its own LR: sweep it [I].
"""

optimizer = "msgdw"
learning_rate = 0.5
min_lr = 1e-8
weight_decay = 2e-4
momentum = 0.9
dampening = 0.0
nesterov = False
grad_clip = 0.0
beta2 = 0.95  # back to the default: mSGDW has none
