"""The usual scale vectors, and QK-norm (arXiv 2605.26895). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/qk_norm.py --out_dir=out/scale_vectors_120m_qk_norm
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/qk_norm.py \
        --out_dir=out/quick_qk_norm

DNP and the unified variant normalise the outputs of linear maps, q and k by head in our reading
[I]: that is QK-norm. This file shows what it does alone [I]; whether the paper's baseline has it is
not known [U]. It is also the base for the study of decay, which needs scale vectors that no linear
map follows: those on q and k.
"""

base = "shared.py"
qk_norm = True
