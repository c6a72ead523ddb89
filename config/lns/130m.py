"""LLaMA-130M on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/lns.py \
        --out_dir=out/lns_130m_lns

Prepare the data once: python data/c4/prepare.py --shards=16
The paper (sec. 5.1): RMSNorm, SwiGLU, Adam, LR 1e-3. The authors' scripts: C4, shape, RoPE, untied
head, no 1/√(2L), steps, warm-up, betas 0.9 and 0.999, no decay, no clipping, cosine to 10%, 512 ×
256 tokens a step. Perplexity in the images of the authors' repository: Pre-LN 26.73, LNS 25.76,
Post-LN 26.95, DeepNorm 27.17, Mix-LN 26.07. The DeepNorm code there has two errors
(config/lns/deepnorm.py). Different here: GPT-2's vocabulary of 50257 instead of T5's of 32000 (with
which this model has 134.1M parameters); documents packed instead of padded to 256 tokens; weights
in fp32 instead of bf16, which rounds away small steps of a gain near 1. So compare losses with a
baseline of your own, not with the numbers above [I]. The other schemes are in config/lns/.
"""

out_dir = "out/lns_130m"
dataset = "c4"

n_layer = 12
n_head = 12
n_embd = 768
n_ff = 2048
block_size = 256
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 1e-3
beta2 = 0.999
weight_decay = 0.0
grad_clip = 0.0  # off
batch_size = 512  # sequences a step, over all GPUs
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 64
max_iters = 20_000  # 2.6B tokens; the authors, who pad their sequences, quote 2.2B
warmup_iters = 2000
eval_tokens = 10_000_000
