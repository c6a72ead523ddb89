"""HG: separate scale vectors for q, k, v, and for gate and up (arXiv 2605.26895). Put it after any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/hg.py --out_dir=out/scale_vectors_120m_hg
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/hg.py \
        --out_dir=out/quick_hg

According to secondary notes, gate and up are included. The abstract: "branch-specific
heterogeneity" helps by itself; the parts of the paper that we have lack how much [U].
"""

base = "shared.py"
gain = "branch"  # q, k, v, gate and up have one each
