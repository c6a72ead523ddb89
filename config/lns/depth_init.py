"""Pre-LN with depth-scaled initialisation, a rival of LNS (arXiv 2502.05795). Put it after any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/depth_init.py \
        --out_dir=out/lns_130m_depth_init
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/depth_init.py \
        --out_dir=out/lns_250m_depth_init
    python train.py config/quickstart.py config/dnt/s1.py config/lns/depth_init.py \
        --out_dir=out/quick_depth_init

Perplexity in the images of the LNS repository (130M, 250M): 26.95, 21.50. The paper (sec. 6) scales
"weight matrices" by 1/√(2ℓ); we scale o and down only [I].
"""

base = "pre_ln.py"
residual_init = "depth"  # o and down of block ℓ start × 1/√(2ℓ)
