"""GPT-2 Small, 124M parameters as the DNT paper (arXiv 2507.17501) counts them: the Pre-LN baseline
of its Table 1.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py \
        config/optimizers/msgdw.py --out_dir=out/gpt2_small_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small.py config/init/gpt2.py \
        --out_dir=out/init_small

Prepare the data once: python data/openwebtext/prepare.py
The paper: 200K steps of 480 × 1024 tokens of OpenWebText (gpt2_large.py and gpt2_xl.py: 512 ×
1024), cosine to 6e-5, clip 1.0, no dropout, bf16. AdamW: LR 6e-4 (2.5e-4, 1.5e-4), decay 0.1, betas
0.9 and 0.95. mSGDW: LR 1.0, decay 1e-4, momentum 0.9. Warm-up: its text says 2000 steps (App. C),
its Table 5 says 0 for mSGDW; we take 2000 [I]. Initial weights: "Xavier", as for DNT (Table 5;
config/init/xavier.py). The third command has nanoGPT's own. LayerNorm without bias is nanoGPT's
[I]: the paper builds on nanoGPT, but calls RMSNorm its default norm (sec. 2). The GELU is GPT-2's,
the tanh form [I]; nanoGPT's is exact: --mlp=gelu_erf. Validation loss in the paper: AdamW 2.867,
mSGDW 2.906.
"""

out_dir = "out/gpt2_small"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

norm = "layernorm"
norm_eps = 1e-5
init = "xavier"
residual_init = "plain"

learning_rate = 6e-4  # AdamW
batch_size = 480  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 30
max_iters = 200_000
warmup_iters = 2000
min_lr = 6e-5

eval_interval = 1000
eval_tokens = 0  # all of val.bin
