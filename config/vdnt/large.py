"""V-DNT-Large on ImageNet-1k, 307M parameters in the paper and 304M here: DNT's S5 (arXiv
2507.17501).

    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py \
        config/vdnt/large_msgdw.py --out_dir=out/vdnt_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/vdnt/large.py config/dnt/s3.py \
        --out_dir=out/vdnt_large_s3

Prepare the data once: python data/imagenet1k/prepare.py
(needs an account that has accepted ImageNet's terms)
The paper's Table 4: 150 epochs in batches of 1024, 60 of them warm-up, cosine to 1e-8, images of
224 × 224, no clipping, RandAugment (9, 0.5), mixup 0.8, cutmix 1.0, no random erasing, label
smoothing 0.1, stochastic depth 0.1, "Truncated Xavier", no averaged weights. AdamW: LR 1e-3, decay
0.1, betas 0.9 and 0.99 (App. C's text: 0.95). mSGDW: LR 0.5, decay 2e-4, momentum 0.9
(large_msgdw.py). The ViT baselines have the same. Top-1 in the paper: AdamW 82.1, mSGDW 81.5
(ViT-Large: 81.7 and 78.2). Ours [I]: patches of 16 × 16, which make 304M parameters; random crops
of 8% of the area or more, flips; biases, exact GELU; no decay on positions and class token; head
and tables N(0, 0.02). Class token or mean over the patches: [U]. RandAugment, mixing, Xavier and
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
