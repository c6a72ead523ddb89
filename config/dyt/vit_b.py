"""ViT-B on ImageNet-1k as in the DyT paper (arXiv 2503.10622, Table 1): its LayerNorm baseline.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/vit_dyt.py \
        --out_dir=out/vit_b_dyt

Prepare the data once: python data/imagenet1k/prepare.py
(needs an account that has accepted ImageNet's terms)
The paper (App. A): ConvNeXt-B's recipe, but stochastic depth 0.1; LR 4e-3 (Table 13). Top-1:
LayerNorm 82.3, DyT 82.5; tuning the LR gives DyT 82.8, at 6e-3, and LayerNorm nothing (Tables 1,
13). ConvNeXt's recipe, as we know it [I]: 300 epochs in batches of 4096, 20 of them warm-up, AdamW
with betas 0.9 and 0.999, LR down to 1e-6, decay 0.05 but not on vectors and scalars, so not on α,
augmentation, label smoothing, no clipping. Not here: its averaged weights (EMA) and random erasing.
Whether the paper evaluates the average: [U]. Ours [I]: patches of 16 × 16, biases, exact GELU,
initial weights N(0, 0.02). Class token or mean over the patches: [U].
"""

out_dir = "out/vit_b"
dataset = "imagenet1k"

n_layer = 12
n_head = 12
n_embd = 768
patch_size = 16
image_size = 224
channels = 3
n_class = 1000
mlp = "gelu_erf"
bias = True
drop_path = 0.1
norm = "layernorm"
residual_init = "plain"

label_smoothing = 0.1
rand_augment = 9.0
rand_augment_std = 0.5
mixup = 0.8
cutmix = 1.0
crop_area = 0.08
flip = True

batch_size = 4096  # images a step, over all GPUs
micro_batch_size = 256  # on one GPU at a time
max_iters = 93_600  # 300 epochs of 312 steps
warmup_iters = 6240  # 20 epochs
learning_rate = 4e-3
min_lr = 1e-6
weight_decay = 0.05
beta2 = 0.999
grad_clip = 0.0  # off
decay_emb = False

eval_interval = 1560  # 5 epochs
eval_tokens = 0  # all images
