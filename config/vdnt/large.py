"""V-DNT-Large, 304M parameters on ImageNet-1k: DNT's setting S5 on images (arXiv 2507.17501, Table 1).

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py config/vdnt/large_msgdw.py \
        --out_dir=out/vdnt_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py config/dnt/s3.py --out_dir=out/vdnt_large_s3

Prepare the data once: python data/imagenet1k/prepare.py     # needs an account that has accepted ImageNet's terms
The paper: 150 epochs of ImageNet-1k in batches of 1024, 60 of them warm-up, cosine to 1e-8, no clipping, RandAugment
(9, 0.5), mixup 0.8, cutmix 1.0, label smoothing 0.1, stochastic depth 0.1, "truncated Xavier", no averaged weights.
AdamW: LR 1e-3, decay 0.1, betas 0.9 and 0.99. mSGDW: LR 0.5, decay 2e-4, momentum 0.9 (large_msgdw.py).
Top-1 in the paper: AdamW 82.1, mSGDW 81.5 (ViT-Large: 81.7 and 78.2).
Ours [I]: patches of 16 × 16 in images of 224 × 224, which make 304M parameters where the paper has 307M; random crops
of 8% of the area or more, flips; biases, exact GELU; no decay on positions and class token; head and tables N(0, 0.02);
mSGDW has these 60 epochs of warm-up too. Class token or mean over the patches: [U]. RandAugment, mixing, Xavier and
more where we had to choose: docs/images.md.
"""

out_dir = "out/vdnt_large"
dataset = "imagenet1k"

n_layer = 24
n_head = 16
n_embd = 1024
patch_size = 16
image_size = 224
channels = 3
n_class = 1000
pool = "cls"
mlp = "gelu_erf"
bias = True
drop_path = 0.1
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
micro_batch_size = 128  # on one GPU at a time
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
