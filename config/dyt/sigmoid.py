"""DyT with the sigmoid of αx (arXiv 2503.10622). Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/vit_b.py config/dyt/sigmoid.py \
        --out_dir=out/vit_b_sigmoid
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/sigmoid.py \
        --out_dir=out/dyt_small_sigmoid
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/sigmoid.py \
        --out_dir=out/quick_sigmoid

Accuracy of the paper's ViT-S and ViT-B (Table 8): 79.6 and 81.6, with tanh 80.3 and 82.5. On
images: α₀ 0.5, β, no scalar on the embedding. On language models it is our transfer [I]: α₀ and
scalar as in config/dyt/dyt.py, no β. Its output is not centred on 0.
"""

base = "dyt.py"
dyt_squash = "sigmoid"
