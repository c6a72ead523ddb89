"""DyT, γ · tanh(αx), in place of every norm, the final one too. Put it after any Pre-LN config.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        --out_dir=out/dyt_small_dyt
    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        --dyt_alpha_attn=0.8 --dyt_alpha_other=0.2 --out_dir=out/dyt_small_alpha
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/dyt.py --out_dir=out/quick_dyt

The embedding has the learned scalar of the paper's language models, √d at first. There is no β, as in its LLaMA code.
Score and loss of its LLaMA 7B, 13B, 34B, 70B: 0.513 and 1.60, 0.529 and 1.54, 0.536 and 1.50, 0.549 and 1.45.
α₀ by width, before attention and elsewhere: 1024: 1, 1; 2048: 1, 0.5; 4096: 0.8, 0.2; 5120: 0.6, 0.15; 8192: 0.2,
0.05. Larger models and larger LRs need a smaller α₀; the second command is one point of a grid.
"""

norm = "dyt"
dyt_alpha_attn = None  # the paper's α₀ for this width; 768 is not in its table and takes that of 1024 [I]
dyt_alpha_other = None
dyt_learn_alpha = True
dyt_squash = "tanh"
dyt_bias = False
embed_scale = True
branch_scale = "none"
branch_scale_init = None
fixup = False
sigma_reparam = False
