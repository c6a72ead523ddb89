"""DyT with β: γ · tanh(αx) + β (arXiv 2503.10622). Put it after any Pre-LN config of text.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/beta.py \
        --out_dir=out/dyt_small_beta
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/beta.py --out_dir=out/quick_beta

The paper's definition (Eq. 2) has β, and images have it without this file. The authors' LLaMA code has none, like
RMSNorm. The paper has no number that compares them.
"""

norm = "dyt"
dyt_alpha_attn = None
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = True  # β, 0 at first
embed_scale = None  # a learned scalar in language models (App. A), none on images
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
