"""A small V-DNT (setting S5) on handwritten digits of 8 × 8 pixels: a minute on 2 CPU cores.

    python data/digits/prepare.py && python train.py config/vdnt/digits.py
    python train.py config/vdnt/digits.py config/dnt/s1.py --out_dir=out/digits_s1
    python train.py config/vdnt/digits.py config/dnt/s1.py config/dyt/vit_dyt.py \
        --out_dir=out/digits_dyt

1,437 images to train on, 360 held out, from the same writers: what it shows is that training works,
not how well a layout does on photographs. Sizes, rate and steps are ours [I]. Label smoothing,
stochastic depth, initial weights and the exact GELU are those of config/vdnt/large.py; the paper's
augmentation would be too much for 8 × 8 pixels.
"""

out_dir = "out/digits"
dataset = "digits"

n_layer = 6
n_head = 4
n_embd = 64
patch_size = 2
mlp = "gelu_erf"
bias = True
drop_path = 0.1
init = "xavier_cut"
residual_init = "plain"
# of positions, class token and head: 0.02 belongs to width 768
init_std = 0.02 * (768 / n_embd) ** 0.5

# DNT, setting S5
pre_norm = "attn"
mid_norm = "both"
input_norm = True
qk_norm = True

label_smoothing = 0.1

batch_size = 64
micro_batch_size = 64
max_iters = 1000
warmup_iters = 100
learning_rate = 3e-3
min_lr = 1e-5
decay_emb = False

eval_interval = 200
eval_tokens = 0  # all images
