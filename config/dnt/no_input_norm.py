"""DNT leave-one-out (App. F): S4 without the input norm. Layout only: put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/no_input_norm.py \
        --out_dir=out/no_input_norm
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/no_input_norm.py \
        --learning_rate=0.3 --warmup_iters=0 --out_dir=out/no_input_norm_stress
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/dnt/no_input_norm.py \
        --optimizer=msgdw --learning_rate=1.0 --warmup_iters=0 --out_dir=out/no_input_norm_stress_msgdw
    python train.py config/quickstart.py config/dnt/no_input_norm.py --out_dir=out/no_input_norm

In the paper's stress run this model converges. The paper ranks the norms: QK norm first, then pre and mid norms, then
the input norm. It says that it starts from S5, but lists two pre norms, as in S4: we start from S4 (config/dnt/s4.py)
[I].
Its "Adam, lr 0.3, no warmup" can hardly train a model with a tied head. So we read it as a sweep of LRs without
warm-up, whose result is the step of divergence [I]: 3e-3, 1e-2, 3e-2, 0.1, 0.3 for AdamW and 0.3, 1, 3 for mSGDW.
"""

norm = "rmsnorm"
norm_eps = 1e-6
pre_norm = "both"
mid_norm = "both"
post_norm = "none"
input_norm = False
qk_norm = True
