"""Gemma 3's block: norms before and after every branch, QK-norm, a scale on the embedding. Layout
only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/gemma3.py --out_dir=out/gemma3
    python train.py config/quickstart.py config/layouts/gemma3.py --out_dir=out/quick_gemma3
    python train.py config/quickstart.py config/layouts/gemma3.py --mlp=geglu --n_kv_head=2 \
        --n_ff=512 --out_dir=out/quick_gemma3_parts

From transformers' modeling_gemma3.py; its report was not read. There the embedding is multiplied by
the constant √d; here the scale is learned and starts at √d [I]. A gain is stored there as 1 + w, so
weight decay pulls it to 1, here to 0: equal with decay_gains=none, the default. Not here: local
attention in five of six blocks, two values of rope_theta. The last line has the parts of its
network that are flags.
"""

base = "../dnt/s1.py"
mid_norm = "both"
qk_norm = True
embed_scale = True
