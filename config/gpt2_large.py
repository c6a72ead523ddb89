"""GPT-2 Large, 774M parameters: the baseline of DNT's Table 1, Pre-LN with nanoGPT's parts.

    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py config/optimizers/msgdw.py \
        --out_dir=out/gpt2_large_msgdw

Prepare the data once: python data/openwebtext/prepare.py
The paper: 200K steps of 512 × 1024 tokens of OpenWebText, cosine to 6e-5, clip 1.0, no dropout, bf16, betas 0.9 and
0.95. AdamW: LR 2.5e-4. mSGDW: LR 1.0. It does not state the weight decay of its baselines: we take DNT's, 0.1 and
1e-4 [I].
The paper lowers the baseline's LR with its size, but keeps 6e-4 for DNT at all sizes: tune both before you compare
them.
Norm: LayerNorm without bias, as in nanoGPT; the paper does not say what its baseline uses [I].
Validation loss in the paper: AdamW 2.492, mSGDW 2.544.
"""

out_dir = "out/gpt2_large"
dataset = "openwebtext"

n_layer = 36
n_head = 20
n_embd = 1280
block_size = 1024

norm = "layernorm"
norm_eps = 1e-5

learning_rate = 2.5e-4  # AdamW
batch_size = 512  # sequences a step, over all GPUs
micro_batch_size = 16  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 200_000
warmup_iters = 2000
min_lr = 6e-5

eval_interval = 1000
eval_tokens = 0  # all of val.bin
