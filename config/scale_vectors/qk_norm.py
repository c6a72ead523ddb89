"""The usual scale vectors, and QK-norm. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/scale_vectors/llama_120m.py \
        config/scale_vectors/qk_norm.py --out_dir=out/scale_vectors_120m_qk_norm
    python train.py config/quickstart.py config/dnt/s1.py config/scale_vectors/qk_norm.py --out_dir=out/quick_qk_norm

DNP and the unified variant normalise the outputs of linear maps, so they add a norm on q and k. This file shows what
that norm does alone [I]. It is also the base for the study of decay, which needs scale vectors that no linear map
follows: those on q and k.
"""

gain = "shared"
gain_out = "none"
gain_param = "direct"
qk_norm = True
decay_gains = "none"
