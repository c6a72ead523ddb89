"""The usual scale vectors: one per norm, without decay (arXiv 2605.26895). Put it after any Pre-LN
config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/shared.py --out_dir=out/scale_vectors_120m_shared
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/shared.py \
        --out_dir=out/quick_shared

The baseline of all files in this folder, except those that are compared with
config/scale_vectors/qk_norm.py.
"""

gain = "shared"
gain_out = "none"
gain_param = "direct"
qk_norm = False
decay_gains = "none"
