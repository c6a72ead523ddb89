"""Pre-LN with GPT-2's scaled initialisation, a rival of LNS (arXiv 2502.05795). Put it after any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/scaled_init.py \
        --out_dir=out/lns_130m_scaled_init
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/scaled_init.py \
        --out_dir=out/lns_250m_scaled_init
    python train.py config/quickstart.py config/dnt/s1.py config/lns/scaled_init.py \
        --out_dir=out/quick_scaled_init

Perplexity in the images of the LNS repository (130M, 250M): 26.04, 20.98, against 26.73 and 21.92
without the factor. LNS is 0.011 and 0.031 nats better than this. The paper's text scales "W0 and
W2" by 1/√(2L), which sec. 5.4 calls weights of the feed-forward; we scale o and down, as GPT-2 does
[I].
"""

base = "pre_ln.py"
residual_init = "gpt2"  # o and down start × 1/√(2L)
