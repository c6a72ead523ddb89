"""DyT for every norm, the final one too: γ · tanh(αx), on images + β (arXiv 2503.10622). After any
Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        --out_dir=out/dyt_small_dyt
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        --dyt_alpha_attn=0.8 --dyt_alpha_other=0.2 --out_dir=out/dyt_small_alpha
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/dyt.py --out_dir=out/quick_dyt

Language models: a learned scalar on the embedding, √d at first (App. A); no β, as in the authors'
LLaMA code. Score and training loss of LLaMA 7B, 13B, 34B, 70B (Table 4): 0.513 and 1.60, 0.529 and
1.54, 0.536 and 1.50, 0.549 and 1.45. α₀ by width, before attention and elsewhere (Tables 11 and
12): 1024: 1, 1; 2048: 1, 0.5; 4096: 0.8, 0.2; 5120: 0.6, 0.15; 8192: 0.2, 0.05. Larger models and
LRs need a smaller α₀ (sec. 7.1); the second command is one point of a grid. On images: α₀ 0.5, β,
no scalar on the embedding; config/dyt/vit_dyt.py has the numbers.
"""

norm = "dyt"
dyt_alpha_attn = None  # the paper's α₀: 0.5 on images, else by width; 768 takes that of 1024 [I]
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = None  # β (Eq. 2) on images, none in language models (the authors' code)
embed_scale = None  # a learned scalar in language models (App. A), none on images
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
