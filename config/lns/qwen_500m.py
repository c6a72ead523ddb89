"""Qwen2.5-0.5B on C4 with Pre-LN: a baseline of the LNS paper (arXiv 2502.05795, sec. 5.3.2, Table 4).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/qwen_500m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/qwen_500m.py config/lns/lns.py \
        --out_dir=out/qwen_500m_lns

Prepare the data once: python data/c4/prepare.py --shards=48
The paper: the architecture, 6B tokens, perplexity 20.62 with Pre-LN and 19.57 with LNS. The shape is that of the public
model; LR, batch, schedule, context and data are not in the text [U]: they are those of config/lns/350m.py [I].
Different here: no biases on q, k and v, since `bias` would give every matrix one; GPT-2's vocabulary of 50257 instead
of Qwen's of 151,936 (with which this model has 494.0M parameters). So compare losses with a baseline of your own, not
with the numbers above [I].
"""

out_dir = "out/qwen_500m"
dataset = "c4"

n_layer = 24
n_head = 14
n_kv_head = 2
n_embd = 896
n_ff = 4864
block_size = 256
pos = "rope"
rope_theta = 1e6
mlp = "swiglu"
tie_weights = True
residual_init = "plain"

learning_rate = 1e-3
beta2 = 0.999
weight_decay = 0.0
grad_clip = 0.0  # off
batch_size = 512  # sequences a step, over all GPUs
micro_batch_size = 32  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 45_776  # 6.0B tokens
warmup_iters = 4578
eval_tokens = 10_000_000
