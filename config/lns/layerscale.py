"""LayerScale: a learned vector on every branch's output; a rival of LNS (arXiv 2502.05795). After
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/layerscale.py \
        --out_dir=out/lns_130m_layerscale
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/layerscale.py \
        --out_dir=out/lns_250m_layerscale
    python train.py config/quickstart.py config/dnt/s1.py config/lns/layerscale.py \
        --out_dir=out/quick_layerscale

Perplexity in the images of the LNS repository (130M, 250M): 27.93, 23.45. Of the start value the
paper says only that it is small [U]; ours is LayerScale's own for 12 to 18, 24 and 36 layers, and
other depths take the nearest [I]. Another start value: --branch_scale_init=0.1.
"""

base = "pre_ln.py"
branch_scale = "layerscale"  # starts at 0.1 up to 18 layers, 1e-5 up to 24, then 1e-6
