"""LLaMA-1B on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/1b.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/1b.py config/lns/lns.py --out_dir=out/lns_1b_lns

Prepare the data once: python data/c4/prepare.py --shards=80
The paper (sec. 5.1): RMSNorm, SwiGLU, Adam, LR 5e-4, 100K steps. The authors' scripts: C4, shape, RoPE, untied head, no
1/√(2L), warm-up, betas 0.9 and 0.999, no decay, no clipping, cosine to 10%, 512 × 256 tokens a step.
Perplexity in the images of the authors' repository: Pre-LN 17.02, LNS 15.71, Post-LN 1390.75, DeepNorm 1409.08,
Mix-LN 1414.78. The DeepNorm code there has two errors (config/lns/deepnorm.py).
Different here: GPT-2's vocabulary of 50257 instead of T5's of 32000 (with which this model has 1339.1M parameters);
documents packed instead of padded to 256 tokens; weights in fp32 instead of bf16, which rounds away small steps of a
gain near 1. So compare losses with a baseline of your own, not with the numbers above [I]. The other schemes are in
config/lns/.
"""

out_dir = "out/lns_1b"
dataset = "c4"

n_layer = 24
n_head = 32
n_embd = 2048
n_ff = 5461
block_size = 256
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 5e-4
beta2 = 0.999
weight_decay = 0.0
grad_clip = 0.0  # off
batch_size = 512  # sequences a step, over all GPUs
micro_batch_size = 16  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 100_000  # 13.1B tokens; the authors, who pad their sequences, quote 8.9B
warmup_iters = 1000  # 1%, where the scripts of the smaller models have 10%
eval_tokens = 10_000_000
