"""Muon (Keller Jordan; as torch.optim.Muon): momentum whose matrices are orthogonalised. AdamW for the rest.

    m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g with Nesterov, else m;   w ← w (1 − ηλ) − η s NS(u)

NS is in orthogonal/newton_schulz.py. s = √max(1, rows/columns) with `original`, and 0.2 √max(rows, columns) with
`match_rms_adamw`: then updates are as large as AdamW's, so AdamW's LR and decay can be used. With m ← μ m + g updates
would be the same, because NS does not depend on the scale of u. Every matrix is orthogonalised by itself: q, k, v,
gate, up. A parameter of three dimensions is a stack of matrices: experts. State: 4 bytes a parameter.

Under torchrun every rank orthogonalises the matrices that it owns; of a stack, which FSDP2 shards by matrices, those
that it holds. The bits are the same for any number of ranks; under FSDP2 on a CPU, if rows have a multiple of 16
entries. Nothing is compiled, because nearly all of the time goes into matrix products.

Defaults: AdamW's LR and decay with `match_rms_adamw`, our choice; with `original` those of Keller Jordan's examples.
The DNT paper (F.1) has 1e-4 for 2D matrices and 6e-4 for 1D vectors (it swaps the nouns there), and does not state the
scale of the updates. Embedding and head, though 2D, are on AdamW: our choice.
"""

import torch

from nanodnt.optim.registry import register


def options(config, role, model):
    dtype = "bfloat16" if model.runtime.compute_dtype == torch.bfloat16 else "float32"
    numbers = dict(momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.muon_steps)
    return numbers | dict(adjust_lr=config.muon_adjust_lr, ns_dtype=dtype)


def state(p, group):
    if p.ndim < 2:
        raise ValueError(f"Muon is for matrices, not for a tensor of shape {tuple(p.shape)}: give it another rule")
    return dict(momentum_buffer=torch.zeros_like(p))


def step(work, grad_scale, found_inf):
    from nanodnt.optim.orthogonal.update import update_matrices  # other optimizers do not need it

    update_matrices(work, grad_scale, found_inf)


def defaults_for(config) -> dict:
    """With `original`: Keller Jordan's LR and decay, for another scale of updates, and AdamW's own for the rest."""
    if config.muon_adjust_lr != "original":
        return {}
    return dict(learning_rate=0.02, weight_decay=0.01, adamw_learning_rate=6e-4, adamw_weight_decay=0.1)


def check(config) -> None:
    if config.muon_steps is not None and not 1 <= config.muon_steps <= 20:
        raise ValueError(f"muon_steps={config.muon_steps} must be between 1 and 20")


DEFAULTS = dict(learning_rate=6e-4, weight_decay=0.1, momentum=0.95, nesterov=True, muon_steps=5)
DEFAULTS |= dict(muon_adjust_lr="match_rms_adamw", adamw_learning_rate=None, adamw_weight_decay=None)  # Muon's own
register("muon", options, state, step, defaults=DEFAULTS, defaults_for=defaults_for, rest="adamw", check=check)
