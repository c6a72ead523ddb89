"""LLaMA-1B on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795). See
config/lns/130m.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/1b.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/1b.py config/lns/lns.py \
        --out_dir=out/lns_1b_lns

Prepare the data once: python data/c4/prepare.py --shards=80
1339.1M parameters with T5's vocabulary of 32000. LR and steps: sec. 5.1.
Perplexity in the images of the authors' repository:
Pre-LN 17.02, LNS 15.71, Post-LN 1390.75, DeepNorm 1409.08, Mix-LN 1414.78.
"""

base = "130m.py"
out_dir = "out/lns_1b"

n_layer = 24
n_head = 32
n_embd = 2048
n_ff = 5461
learning_rate = 5e-4
micro_batch_size = 16
max_iters = 100_000  # 13.1B tokens; the authors, who pad their sequences, quote 8.9B
warmup_iters = 1000  # 1%, where the scripts of the smaller models have 10%
