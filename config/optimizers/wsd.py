"""WSD: warm-up, constant LR, and a decay over the last fifth. Put it after a config of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/optimizers/wsd.py \
        --out_dir=out/dnt_small_wsd
    torchrun --standalone --nproc_per_node=8 train.py config/blockwise/llama_237m.py \
        config/blockwise/blockwise.py config/optimizers/wsd.py \
        --out_dir=out/blockwise_llama_237m_lr_wsd
    python train.py config/quickstart.py config/optimizers/wsd.py --out_dir=out/quick_wsd

It is a schedule, so it goes with any optimizer; peak and min LR stay those of the config before it.
The decay is linear and takes a fifth of the run [I]; --wsd_decay_iters=10000 sets another length,
--wsd_decay=sqrt or --wsd_decay=cosine another form. docs/optimizers.md shows how to extend such a
run. The WSD script in the code of the blockwise LR paper has another shape: it divides the run into
thirds.
"""

schedule = "wsd"
wsd_decay = "linear"
wsd_decay_iters = None  # a fifth of lr_decay_iters
