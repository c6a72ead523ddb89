"""mSGDW, DNT's momentum SGD with decoupled weight decay (arXiv 2507.17501). Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/optimizers/msgdw.py \
        --out_dir=out/dnt_small_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_large.py config/optimizers/msgdw.py \
        --out_dir=out/gpt2_large_msgdw
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/optimizers/msgdw.py \
        --warmup_iters=0 --out_dir=out/dnt_small_msgdw_cold
    python train.py config/quickstart.py config/optimizers/msgdw.py --out_dir=out/quick_msgdw

The paper's language models, DNT and GPT-2, all have these values, whatever their size. An LR of 1.0 goes with gradients
of norm 1 at most, so clipping is on here too. Decay is not stated for the GPT-2 baselines: DNT's [I]. Warm-up is the
size's: 2000 steps in the paper's text, 0 in its Table 5, as in the third line.
Other models and batches than the paper's want their own LR: sweep it [I]. Its vision models have 0.5 and 0.1.
"""

optimizer = "msgdw"
learning_rate = 1.0
min_lr = 6e-5
weight_decay = 1e-4
momentum = 0.9
dampening = 0.0
nesterov = False
grad_clip = 1.0
