"""nGPT: a stream, and rows of all matrices, of length 1 (arXiv 2410.01131, and NVIDIA/ngpt). Layout
only, of language models: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/layouts/ngpt.py \
        --pos=rope --mlp=swiglu --tie_weights=False --learning_rate=15e-4 --min_lr=0 \
        --warmup_iters=0 --weight_decay=0 --out_dir=out/ngpt
    python train.py config/quickstart.py config/layouts/ngpt.py --warmup_iters=0 --weight_decay=0 \
        --out_dir=out/quick_ngpt

The first line has the paper's recipe: RoPE, SwiGLU, an untied head, Adam with betas .9 and .95,
clipping at 1, no warm-up, no decay, a rate of 15e-4 (30e-4 in the released launcher) that falls to
0. Its models have 24 × 1024 and 36 × 1280, its batches 512 sequences of OpenWebText. Decay would
only shorten rows, which get their length back.

Our stream has RMS 1, nGPT's has length 1. So ours is √d times as long: it takes in the √d of eq.
21, and the scales of the logits start at 1/√d. The scale of q and k is applied to q twice.
branch_scale_init is the start of α. The code has √d on both products of eq. 21; the norm after them
divides the other one out. It rotates neighbouring channels, we those half a head apart [I]. The
head's rows of padding have length 1, too [I].

The paper reports 4, 10 and 20 times fewer steps at contexts of 1k, 4k and 8k, with steps 60 to 80%
longer; by its code's README short runs gain less. Logits lie within ±1 at first, and their scale
moves by √d times the rate a step, so the loss falls slowly at first. The Pre-LN in that code
normalised its stream until November 2024 (its issue 1), so comparisons with it do not count.

With norm_eps=0 a config's dropout is refused: --dropout=0. Put no other layout after this one:
gain, gain_out and branch_scale would stay.
"""

base = "../dnt/s1.py"
norm_eps = 0.0
pre_norm = "none"
mid_norm = "both"
post_norm = "both"
input_norm = True
qk_norm = True
gain = "none"
gain_out = "sphere"
branch_scale = "layerscale"
branch_scale_init = 0.05
tied_skip = True
unit_rows = True

# unit_rows replaces these
init = "normal"
init_std = 0.02
residual_init = "gpt2"
