"""LLaMA-350M on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795). See
config/lns/130m.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/350m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/350m.py config/lns/lns.py \
        --out_dir=out/lns_350m_lns

Prepare the data once: python data/c4/prepare.py --shards=48
368.0M parameters with T5's vocabulary of 32000.
Perplexity in the images of the authors' repository:
Pre-LN 19.58, LNS 18.20, Post-LN 1368.33, DeepNorm 1362.59, Mix-LN 1363.21.
"""

base = "130m.py"
out_dir = "out/lns_350m"

n_layer = 24
n_head = 16
n_embd = 1024
n_ff = 2736
learning_rate = 1e-3  # the paper's; the authors' script has 5e-4
micro_batch_size = 32
max_iters = 60_000  # 7.9B tokens; the authors, who pad their sequences, quote 6.0B
warmup_iters = 6000
