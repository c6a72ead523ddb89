"""Qwen2.5-0.5B on C4 with Pre-LN: a baseline of the LNS paper (arXiv 2502.05795, sec. 5.3.2, Table
4).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/qwen_500m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/qwen_500m.py config/lns/lns.py \
        --out_dir=out/qwen_500m_lns

Prepare the data once: python data/c4/prepare.py --shards=48
The paper: the architecture, 6B tokens, perplexity 20.62 with Pre-LN and 19.57 with LNS. The shape
is that of the public model; LR, batch, schedule, context and data are not in the text [U]: they are
those of config/lns/130m.py [I]. Different here, besides what that file says: no biases on q, k and
v, since `bias` would give every matrix one; GPT-2's vocabulary instead of Qwen's of 151,936 (with
which this model has 494.0M parameters).
"""

base = "130m.py"
out_dir = "out/qwen_500m"

n_layer = 24
n_head = 14
n_kv_head = 2
n_embd = 896
n_ff = 4864
rope_theta = 1e6
tie_weights = True
micro_batch_size = 32
max_iters = 45_776  # 6.0B tokens
warmup_iters = 4578
