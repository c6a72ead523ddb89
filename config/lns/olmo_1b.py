"""OLMo-1B with OLMo's scaled initialisation: the baseline of Table 3 of the LNS paper (arXiv
2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/olmo_1b.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/olmo_1b.py config/lns/lns.py \
        --out_dir=out/olmo_1b_lns
    torchrun --standalone --nproc_per_node=8 train.py config/lns/olmo_1b.py config/lns/lns.py \
        --n_layer=32 --n_head=32 --n_embd=4096 --n_ff=11008 --tie_weights=False \
        --init_std=0.015625 --learning_rate=3e-4 --micro_batch_size=2 --out_dir=out/olmo_7b_lns

Prepare the data once: python data/c4/prepare.py --shards=128
The paper (sec. 5.3.1): OLMos of 60M to 7B, 20B tokens. 1/√d for input, 1/√(2dℓ) for output
projections; LNS without the second factor (footnote 1). Losses: 7B 2.69, LNS 2.50; 1B, read off
Fig. 1, 3.15 and 2.85; of which initialisation: [U]. Its text lacks shapes, recipe and Table 3's
cells [U]: here they are OLMo's public ones of 1B and, third command, 7B. Different here: C4 and
GPT-2's vocabulary; 500 steps of warm-up, not 2000, in a run so short; weights are not cut off at
3σ; the embedding has 1/√d too; the FFN's down has the paper's √(2dℓ), OLMo's code has the FFN's
width for d there [I].
"""

out_dir = "out/olmo_1b"
dataset = "c4"

n_layer = 16
n_head = 16
n_embd = 2048
n_ff = 8192
block_size = 2048
pos = "rope"
mlp = "swiglu"
norm = "layernorm"
norm_eps = 1e-5
gain = "none"
init_std = 2048**-0.5  # 1/√d
residual_init = "depth"  # o and down of block ℓ start × 1/√(2ℓ)

learning_rate = 4e-4
weight_decay = 0.1
batch_size = 2048  # sequences a step, over all GPUs: 4.2M tokens
# Sequences on one GPU at a time. Lower it when memory runs out: accumulation makes up for it.
micro_batch_size = 8
max_iters = 4768  # 20B tokens
warmup_iters = 500  # [I]
eval_interval = 250
eval_tokens = 10_000_000
