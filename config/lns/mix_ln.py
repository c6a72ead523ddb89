"""Mix-LN: Post-LN in the first quarter of blocks; a rival of LNS (arXiv 2502.05795). Put it after
any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/lns/130m.py config/lns/mix_ln.py \
        --out_dir=out/lns_130m_mix_ln
    torchrun --standalone --nproc_per_node=8 train.py config/lns/250m.py config/lns/mix_ln.py \
        --out_dir=out/lns_250m_mix_ln --post_norm_blocks=6
    python train.py config/quickstart.py config/dnt/s1.py config/lns/mix_ln.py \
        --out_dir=out/quick_mix_ln

The number of blocks follows the depth: 3 of 12, but --post_norm_blocks=6 of 24, as in the second
command. Perplexity in the images of the LNS repository (130M, 250M, 350M, 1B): 26.07, 21.39,
1363.21, 1414.78.
"""

base = "pre_ln.py"
post_norm_blocks = 3  # a quarter of 12 blocks; 6 of 24, 2 of 8
