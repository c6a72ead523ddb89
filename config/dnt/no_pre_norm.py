"""DNT leave-one-out (arXiv 2507.17501, App. F): S4 without both pre norms. Layout only: put it
after any config.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/dnt/no_pre_norm.py --out_dir=out/no_pre_norm
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/dnt/no_pre_norm.py --learning_rate=0.3 --warmup_iters=0 --weight_decay=0 \
        --out_dir=out/no_pre_norm_stress
    python train.py config/quickstart.py config/dnt/no_pre_norm.py --out_dir=out/no_pre_norm

The second command is the paper's stress run: Adam (AdamW without decay [I]), LR 0.3, no warm-up.
There this model begins to collapse at about step 4K. The paper ranks the norms: QK, then pre and
mid, then input norm; V-DNT with AdamW gives a similar ranking. The text says that it starts from
S5, but lists two pre norms and removes both, and S5 has one: we start from S4 (config/dnt/s4.py)
[I]. Size, betas, clipping, schedule and steps are not in the text [U], which mentions steps up to
30K: here they are those of config/dnt_small.py [I].
"""

base = "s4.py"
pre_norm = "none"
