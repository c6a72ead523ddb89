"""IWD, weight decay for the gains before a linear map (arXiv 2605.26895). Put it after a config of
any size.

    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py config/decay/iwd.py \
        --out_dir=out/dnt_small_decay_iwd
    torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py \
        config/optimizers/msgdw.py config/decay/iwd.py --out_dir=out/dnt_small_msgdw_decay_iwd
    python train.py config/quickstart.py config/decay/iwd.py --out_dir=out/quick_decay_iwd

The abstract: decay helps an Input-Norm and harms an Output-Norm. Which norms these are, and the
name IWD, are from secondary notes: we decay the gains of pre norms and the final norm [I], not
those of mid, post, QK and input norms. The parts of the paper that we have lack the strength of
this decay [U]: we take that of the matrices [I]. config/scale_vectors/iwd.py has the same rule for
a LLaMA with QK-norm.
"""

base = "nanogpt.py"
decay_gains = "input"
