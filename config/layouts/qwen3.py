"""Qwen3's block: Pre-LN with QK-norm on each head, as DNT's setting S2. Layout only: put it after
any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/qwen3.py --out_dir=out/qwen3
    python train.py config/quickstart.py config/layouts/qwen3.py --out_dir=out/quick_qwen3
    python train.py config/quickstart.py config/layouts/qwen3.py --mlp=swiglu --n_kv_head=2 \
        --n_ff=512 --out_dir=out/quick_qwen3_parts

From transformers' modeling_qwen3.py. One gain of size head_dim for all heads of q, one for all of
k; before RoPE; norm_eps=1e-6. The last line has the other parts of its network.
"""

base = "../dnt/s1.py"
qk_norm = True
