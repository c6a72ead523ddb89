"""Weight decay as in DyT's LLaMA code (arXiv 2503.10622): everything. Put it after a config of any
size.

    torchrun --standalone --nproc_per_node=8 train.py config/dyt/small.py config/dyt/dyt.py \
        config/decay/dyt.py --out_dir=out/dyt_small_dyt_decay
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/decay/dyt.py \
        --out_dir=out/dnt_small_decay_dyt
    python train.py config/quickstart.py config/decay/dyt.py --out_dir=out/quick_decay_dyt

0.1 on all parameters: matrices, gains, α, the scalar on the embedding, and here biases too. The 7B
to 70B models in config/dyt/ have this rule already. DyT's vision code does not decay parameters of
one dimension, α included: the ViTs in config/dyt/ have that rule; on a language model it is
config/decay/nanogpt.py. A model without gains (norm=none) is refused; with --decay_gains=none it
trains, and its scalars decay.
"""

base = "nanogpt.py"
decay_gains = "all"
decay_scalars = True  # α, β, the embedding's scalar, biases
