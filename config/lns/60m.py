"""LLaMA-60M on C4 with Pre-LN: the smallest size for the LNS schemes (arXiv 2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/60m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/60m.py config/lns/lns.py --out_dir=out/lns_60m_lns

Prepare the data once: python data/c4/prepare.py --shards=8
The paper's LLaMAs start at 130M. It trains OLMo models of 60M to 7B too, whose shape is not in the text [U]. This is
the public LLaMA-60M of GaLore. Steps and warm-up are ours [I], the other settings are those of config/lns/130m.py.
Losses of the smallest OLMo after 20B tokens, read off Fig. 1: 3.67 with Pre-LN, 3.56 with LNS.
Different here: GPT-2's vocabulary of 50257 instead of T5's of 32000 (with which this model has 58.1M parameters);
documents packed instead of padded to 256 tokens; weights in fp32 instead of bf16, which rounds away small steps of a
gain near 1. So compare losses with a baseline of your own, not with the numbers above [I]. The other schemes are in
config/lns/.
"""

out_dir = "out/lns_60m"
dataset = "c4"

n_layer = 8
n_head = 8
n_embd = 512
n_ff = 1376
block_size = 256
pos = "rope"
mlp = "swiglu"
tie_weights = False
residual_init = "plain"

learning_rate = 1e-3  # the paper's for models up to 350M
beta2 = 0.999
weight_decay = 0.0
grad_clip = 0.0  # off
batch_size = 512  # sequences a step, over all GPUs
micro_batch_size = 64  # on one GPU at a time; lower it when memory runs out, accumulation makes up for it
max_iters = 10_000  # 1.3B tokens [I]
warmup_iters = 1000  # [I]
eval_tokens = 10_000_000
