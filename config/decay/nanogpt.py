"""Weight decay as in nanoGPT: all matrices, embeddings too, and nothing else. Put it after a config
of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py config/decay/nanogpt.py \
        --out_dir=out/dyt_7b_decay_nanogpt
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/decay/nanogpt.py --out_dir=out/blockwise_llama_237m_decay_nanogpt
    python train.py config/quickstart.py config/decay/nanogpt.py --out_dir=out/quick_decay_nanogpt

timm and ConvNeXt do the same, but a ViT's positions and class token do not decay there
(decay_emb=False). The DNT paper builds on nanoGPT and timm and does not name the parameters that
decay: we assume this rule [I]. It is the default here. The files in config/decay/ choose the
parameters that decay; the strength is the optimizer's default, so put them after the optimizer's
file.
"""

weight_decay = None  # AdamW 0.1, mSGDW 1e-4
decay_emb = True
decay_gains = "none"
decay_scalars = False
