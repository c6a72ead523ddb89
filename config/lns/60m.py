"""LLaMA-60M on C4 with Pre-LN: the smallest size for the LNS schemes (arXiv 2502.05795).

    torchrun --standalone --nproc_per_node=8 train.py config/lns/60m.py
    torchrun --standalone --nproc_per_node=8 train.py config/lns/60m.py config/lns/lns.py \
        --out_dir=out/lns_60m_lns

Prepare the data once: python data/c4/prepare.py --shards=8
The paper's LLaMAs start at 130M. It trains OLMo models of 60M to 7B too, whose shape is not in the
text [U]. This is the public LLaMA-60M of GaLore, 58.1M parameters with T5's vocabulary of 32000.
Steps and warm-up are ours [I], the rest is that of config/lns/130m.py. Losses of the smallest OLMo
after 20B tokens, read off Fig. 1: 3.67 with Pre-LN, 3.56 with LNS.
"""

base = "130m.py"
out_dir = "out/lns_60m"

n_layer = 8
n_head = 8
n_embd = 512
n_ff = 1376
max_iters = 10_000  # 1.3B tokens [I]
warmup_iters = 1000  # [I]
