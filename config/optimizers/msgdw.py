"""mSGDW, DNT's momentum SGD with decoupled weight decay (arXiv 2507.17501). Put it after a config
of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/msgdw.py --out_dir=out/dnt_small_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py \
        config/optimizers/msgdw.py --out_dir=out/gpt2_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/msgdw.py --warmup_iters=0 --out_dir=out/dnt_small_msgdw_cold
    python train.py config/quickstart.py config/optimizers/msgdw.py --out_dir=out/quick_msgdw

Under mSGDW all language models of the paper, DNT and GPT-2, have these values at every size, the
clipping too (Table 5); that an LR of 1.0 needs it is ours [I]. Dampening and Nesterov are not in
the paper's formula (sec. 2), and are off by default in timm's mSGDW, which it uses (App. C).
Warm-up stays that of the config before it: the paper's text says 2000 steps (App. C), its Table 5
says 0, as in the third command. Other models and batches need their own LR: sweep it [I]; the
paper's is from a rough grid. Its vision models have LRs of 0.5 and 0.1.
"""

optimizer = "msgdw"
learning_rate = 1.0
min_lr = 6e-5
weight_decay = 1e-4
momentum = 0.9
dampening = 0.0
nesterov = False
grad_clip = 1.0
