"""Muon (Keller Jordan; as torch.optim.Muon): momentum whose matrices are orthogonalised. AdamW for
the rest.

    m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g with Nesterov, else m;   w ← w (1 − ηλ) − η s NS(u)

The step is orthogonal/update.py, NS orthogonal/newton_schulz.py. s = √max(1, rows/columns) with
`original`; with `match_rms_adamw` it is 0.2 √max(rows, columns): updates are as large as AdamW's,
so AdamW's LR and decay can be used. Every matrix is orthogonalised by itself: q, k, v, gate, up. A
parameter of three dimensions is a stack of matrices: experts. State: 4 bytes a parameter. The bits
are the same for any number of ranks; under FSDP2 on a CPU, if rows have a multiple of 16 entries.

Defaults: AdamW's LR and decay with `match_rms_adamw`, our choice; with `original` those of Keller
Jordan's examples. Embedding and head, though 2D, are on AdamW: our choice.
"""

import torch

from nanodnt.optim.registry import register


def options(config, role, model):
    dtype = "bfloat16" if model.runtime.compute_dtype == torch.bfloat16 else "float32"
    numbers = dict(momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.muon_steps)
    return numbers | dict(adjust_lr=config.muon_adjust_lr, ns_dtype=dtype)


def state(p, group):
    if p.ndim < 2:
        raise ValueError(
            f"Muon is for matrices, not for a tensor of shape {tuple(p.shape)}: give it another rule"
        )
    return dict(momentum_buffer=torch.zeros_like(p))


def step(work, grad_scale, found_inf):
    from nanodnt.optim.orthogonal.update import update_matrices  # other optimizers do not need it

    update_matrices(work, grad_scale, found_inf)


def defaults_for(config) -> dict:
    """With `original`: Keller Jordan's LR and decay, for another scale of updates, and AdamW's own
    for the rest."""
    if config.muon_adjust_lr != "original":
        return {}
    return dict(
        learning_rate=0.02, weight_decay=0.01, adamw_learning_rate=6e-4, adamw_weight_decay=0.1
    )


DEFAULTS = dict(learning_rate=6e-4, weight_decay=0.1, momentum=0.95, nesterov=True, muon_steps=5)
# Muon's own
DEFAULTS |= dict(
    muon_adjust_lr="match_rms_adamw", adamw_learning_rate=None, adamw_weight_decay=None
)
SETTINGS = dict(defaults_for=defaults_for, rest="adamw", like=lambda config: config.muon_adjust_lr)
register("muon", options, state, step, defaults=DEFAULTS, **SETTINGS)
