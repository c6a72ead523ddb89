"""L-DNT-Small, 124M parameters as the paper counts them: DNT's default, setting S5 (arXiv
2507.17501, Fig. 3).

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/msgdw.py --out_dir=out/dnt_small_msgdw

Prepare the data once: python data/openwebtext/prepare.py
The paper: 200K steps of 480 × 1024 tokens of OpenWebText (dnt_large.py and dnt_xl.py: 512 × 1024),
cosine to 6e-5, clip 1.0, no dropout, bf16. AdamW: LR 6e-4, decay 0.1, betas 0.9 and 0.95. mSGDW: LR
1.0, decay 1e-4, momentum 0.9. These files do not set LR and decay, because these values are the
defaults of the two optimizers. Warm-up: the paper's text says 2000 steps (App. C), its Table 5 says
0 for mSGDW; we take 2000 for both [I]. Initial weights: "Xavier" (Table 5); config/init/xavier.py
lists our choices. The GELU is GPT-2's, the tanh form [I]; nanoGPT's is exact: --mlp=gelu_erf.
Validation loss in the paper: AdamW 2.863, mSGDW 2.849 (GPT-2: 2.867 and 2.906).
"""

out_dir = "out/dnt_small"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

# DNT, setting S5
pre_norm = "attn"
mid_norm = "both"
input_norm = True
qk_norm = True
init = "xavier"
residual_init = "plain"

batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 30
max_iters = 200_000
warmup_iters = 2000
min_lr = 6e-5

eval_interval = 1000
eval_tokens = 0  # all of val.bin
