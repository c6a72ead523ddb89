"""LLaMA-350M on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/350m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/350m.py config/lns/lns.py --out_dir=out/lns_350m_lns

Prepare the data once: python data/c4/prepare.py --shards=48
The paper (sec. 5.1): RMSNorm, SwiGLU, Adam, LR 1e-3 (the script: 5e-4). The authors' scripts: C4, shape, RoPE, untied
head, no 1/√(2L), steps, warm-up, betas 0.9 and 0.999, no decay, no clipping, cosine to 10%, 512 × 256 tokens a step.
Perplexity in the images of the authors' repository: Pre-LN 19.58, LNS 18.20, Post-LN 1368.33, DeepNorm 1362.59,
Mix-LN 1363.21. The DeepNorm code there has two errors (config/lns/deepnorm.py).
Different here: GPT-2's vocabulary of 50257 instead of T5's of 32000 (with which this model has 368.0M parameters);
documents packed instead of padded to 256 tokens; weights in fp32 instead of bf16, which rounds away small steps of a
gain near 1. So compare losses with a baseline of your own, not with the numbers above [I]. The other schemes are in
config/lns/.
"""

out_dir = "out/lns_350m"
dataset = "c4"

n_layer = 24
n_head = 16
n_embd = 1024
n_ff = 2736
block_size = 256
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 1e-3  # the paper's; the authors' script has 5e-4
beta2 = 0.999
weight_decay = 0.0
grad_clip = 0.0  # off
batch_size = 512  # sequences a step, over all GPUs
micro_batch_size = 32  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 60_000  # 7.9B tokens; the authors, who pad their sequences, quote 6.0B
warmup_iters = 6000
eval_tokens = 10_000_000
