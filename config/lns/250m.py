"""LLaMA-250M on C4 with Pre-LN: the baseline of the LNS paper (arXiv 2502.05795). See
config/lns/130m.py for the rest.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/lns.py \
        --out_dir=out/lns_250m_lns

Prepare the data once: python data/c4/prepare.py --shards=32
247.4M parameters with T5's vocabulary of 32000.
Perplexity in the images of the authors' repository:
Pre-LN 21.92, LNS 20.35, Post-LN 1409.79, DeepNorm 22.77, Mix-LN 21.39.
"""

base = "130m.py"
out_dir = "out/lns_250m"

n_layer = 24
n_head = 16
n_embd = 768
n_ff = 2560
max_iters = 40_000  # 5.2B tokens; the authors, who pad their sequences, quote 3.9B
warmup_iters = 4000
