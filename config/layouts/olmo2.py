"""OLMo-2's block: a norm after every branch and none before, QK-norm over the full width (arXiv
2501.00656, sec. 3.3.2). Layout only: put it after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/layouts/olmo2.py --out_dir=out/olmo2
    python train.py config/quickstart.py config/layouts/olmo2.py --out_dir=out/quick_olmo2

QK-norm has a gain for every channel of q and of k, before the split into heads and before RoPE, as
in transformers' modeling_olmo2.py. In the paper neither change helps alone; together they lower the
spikes of the gradient norm (Fig. 7: score 0.108 to 0.069). It has no table of losses. Its recipe at
7B: std 0.02 cut off at 3σ (we have no cut) without a factor for the depth, all norms decay,
embeddings do not: --init=normal --init_std=0.02 --residual_init=plain --decay_gains=all
--decay_emb=False. Do not start o and down at 0: the norm on the branch's output then multiplies
gradients by 1/√eps.
"""

base = "../dnt/s1.py"
pre_norm = "none"
mid_norm = "both"
qk_norm = True
qk_norm_over = "full"
