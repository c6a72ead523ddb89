"""No weight decay at all, as in the LNS paper's scripts (arXiv 2502.05795). Put it after a config
of any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/decay/lns.py \
        --out_dir=out/dnt_small_decay_lns
    python train.py config/quickstart.py config/decay/lns.py --out_dir=out/quick_decay_lns

The models in config/lns/ have this setting already. config/optimizers/muon_original.py sets a
second decay, for the parameters on AdamW: after that file, also set adamw_weight_decay=0 on the
command line.
"""

base = "nanogpt.py"
weight_decay = 0.0
