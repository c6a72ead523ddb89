"""V-DNT-Huge on ImageNet-1k, 632M parameters: DNT's setting S5 on images (arXiv 2507.17501).

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py config/vdnt/huge_msgdw.py \
        --out_dir=out/vdnt_huge_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/huge.py config/dnt/s1.py config/vdnt/huge_msgdw.py \
        --out_dir=out/vdnt_huge_s1_msgdw

Prepare the data once: python data/imagenet1k/prepare.py     # needs an account that has accepted ImageNet's terms
The paper's Table 4: 150 epochs (Fig. 10's caption: 160) in batches of 1024, 60 of them warm-up, cosine to 1e-8, images
of 224 × 224, no clipping, RandAugment (9, 0.5), mixup 0.8, cutmix 1.0, no random erasing, label smoothing 0.1,
stochastic depth 0.5, "Truncated Xavier", no averaged weights. AdamW: LR 1e-3, decay 0.1, betas 0.9 and 0.99 (App. C's
text: 0.95). mSGDW: LR 0.1, decay 1e-3, momentum 0.9 (huge_msgdw.py). The ViT baselines have the same.
Top-1 in the paper: AdamW 81.9, mSGDW 81.2 (ViT-Huge: 80.8 and 73.5). Its Fig. 6, mSGDW: S1 is much the worst, S3 the
best, S4 and S5 are excellent too.
Ours [I]: patches of 14 × 14, by which the count is the paper's; random crops of 8% of the area or more, flips; biases,
exact GELU; no decay on positions and class token; head and tables N(0, 0.02). Class token or mean over the patches:
[U]. RandAugment, mixing, Xavier and more where we had to choose: docs/images.md.
"""

out_dir = "out/vdnt_huge"
dataset = "imagenet1k"

n_layer = 32
n_head = 16
n_embd = 1280
patch_size = 14
image_size = 224
channels = 3
n_class = 1000
pool = "cls"
mlp = "gelu_erf"
bias = True
drop_path = 0.5
init = "xavier_cut"
residual_init = "plain"

# DNT, setting S5
pre_norm = "attn"
mid_norm = "both"
input_norm = True
qk_norm = True

# the recipe, the same for both optimizers
label_smoothing = 0.1
rand_augment = 9.0
rand_augment_std = 0.5
mixup = 0.8
cutmix = 1.0
crop_area = 0.08
flip = True

batch_size = 1024  # images a step, over all GPUs
micro_batch_size = 64  # on one GPU at a time
max_iters = 187_650  # 150 epochs of 1,251 steps
warmup_iters = 75_060  # 60 epochs
learning_rate = 1e-3
min_lr = 1e-8
weight_decay = 0.1
beta2 = 0.99
grad_clip = 0.0  # off
decay_emb = False

eval_interval = 6255  # 5 epochs
eval_tokens = 0  # all images
