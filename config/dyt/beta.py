"""DyT with β: γ · tanh(αx) + β (arXiv 2503.10622). Put it after any Pre-LN config of text.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/beta.py \
        --out_dir=out/dyt_small_beta
    python train.py config/quickstart.py config/dnt/s1.py config/dyt/beta.py \
        --out_dir=out/quick_beta

The paper's definition (Eq. 2) has β, and images have it without this file. The authors' LLaMA code
has none, like RMSNorm. The paper has no number that compares them.
"""

base = "dyt.py"
dyt_bias = True  # β, 0 at first
