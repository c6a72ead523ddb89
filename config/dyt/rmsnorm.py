"""RMSNorm, the baseline of DyT in language models (arXiv 2503.10622). Put it after any Pre-LN
config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/rmsnorm.py \
        --out_dir=out/dyt_small_rmsnorm
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/7b.py config/dyt/rmsnorm.py \
        --out_dir=out/dyt_7b_rmsnorm
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/rmsnorm.py \
        --out_dir=out/quick_rmsnorm

Score and training loss of the paper's LLaMA 7B, 13B, 34B, 70B (Table 4): 0.513 and 1.59, 0.529 and
1.53, 0.536 and 1.50, 0.549 and 1.45. It does not give the eps of its norms [U]; 1e-6 is our
default. On images its baseline is LayerNorm: config/dyt/vit_layernorm.py.
"""

base = "dyt.py"
norm = "rmsnorm"
embed_scale = False
