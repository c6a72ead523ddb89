"""DyT without the learned scalar on the embedding (arXiv 2503.10622). For any Pre-LN config of
text: images have none.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py \
        config/dyt/no_embed_scale.py --out_dir=out/dyt_small_no_embed_scale
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/no_embed_scale.py \
        --out_dir=out/quick_no_embed_scale

The paper adds that scalar, √d at first, to its LLaMAs (App. A): without it activations are too
small at the beginning, "and the training struggles to progress". It gives no number.
"""

base = "dyt.py"
embed_scale = False
