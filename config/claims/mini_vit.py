"""The base model for claims about vision transformers on two CPU cores (studies/digits.py).

    python data/digits/prepare.py
    python train.py config/claims/mini_vit.py config/dnt/s5.py --out_dir=out/mini_vdnt

0.3M parameters on scikit-learn's handwritten digits, 1,437 images of 8 × 8 pixels: the model of
config/vdnt/digits.py with plain RMSNorm before each sub-layer, as the base of layouts. Clipping
is off as in DNT's vision models (Table 4). 18 passes over the images take half a minute of one
core. Float32 and not compiled, which is faster at this size.
"""

out_dir = "out/mini_vit"
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
# Positions, class token and head: 0.02 belongs to width 768.
init_std = 0.02 * (768 / n_embd) ** 0.5

label_smoothing = 0.1

batch_size = 64
micro_batch_size = 64
max_iters = 400
warmup_iters = 40
learning_rate = 2e-3
min_lr = 2e-4
grad_clip = 0.0
decay_emb = False

eval_interval = 400
eval_tokens = 0  # all images
log_interval = 20
track_interval = 0
compile = False
dtype = "float32"
