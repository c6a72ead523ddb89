"""Muon (Keller Jordan; as torch.optim.Muon): momentum whose matrices are orthogonalised; AdamW for
all other parameters.

    m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g with Nesterov, else m;   w ← w (1 − ηλ) − η s NS(u)

The step is orthogonal/update.py, NS orthogonal/newton_schulz.py. s = √max(1, rows/columns) with
`original`; with `match_rms_adamw` it is 0.2 √max(rows, columns): updates are as large as AdamW's,
so AdamW's LR and decay can be used. Every matrix is orthogonalised by itself: q, k, v, gate, up. A
parameter of three dimensions is a stack of matrices: experts. State: 4 bytes a parameter. The bits
are the same for any number of ranks; under FSDP2 on a CPU, if rows have a multiple of 16 entries.

muon_coefficients=polar is Polar Express (arXiv 2505.16932), muon_row_norm NorMuon (2510.05491).

Defaults: AdamW's LR and decay with `match_rms_adamw`, our choice; with `original` those of Keller
Jordan's examples. Embedding and head, though 2D, are on AdamW: our choice.
"""

import torch
from torch import Tensor

from model import Transformer
from nanodnt.optim.registry import Group, State, Work, refuse, register
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    in_bf16 = model.runtime.compute_dtype == torch.bfloat16
    return Group(
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.muon_steps,
        coefficients=config.muon_coefficients,
        adjust_lr=config.muon_adjust_lr,
        row_beta=config.beta2 if config.muon_row_norm else None,
        cautious=config.cautious_decay,
        ns_dtype="bfloat16" if in_bf16 else "float32",
    )


def state(p: Tensor, group: Group) -> State:
    if p.ndim < 2:
        shape = tuple(p.shape)
        refuse(f"Muon is for matrices, not for a tensor of shape {shape}: give it another rule")
    tensors = dict(momentum_buffer=torch.zeros_like(p))
    if group["row_beta"] is not None:
        # not sharded: one number a row, on all processes
        tensors["row_squares"] = torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
    return tensors


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    from nanodnt.optim.orthogonal.update import update_matrices  # other optimizers do not need it

    update_matrices(work, grad_scale, found_inf)


def defaults_for(config: TrainConfig) -> dict[str, float]:
    """With `original`: Keller Jordan's LR and decay, which suit its scale of updates, and AdamW's
    own for the other parameters. ValueError for more steps than there are coefficients."""
    from nanodnt.optim.orthogonal.newton_schulz import ITERATIONS  # others do not need it

    most = len(ITERATIONS[config.muon_coefficients or "jordan"].steps)
    if config.muon_steps and config.muon_steps > most:
        text = f"muon_steps={config.muon_steps}: muon_coefficients={config.muon_coefficients}"
        refuse(f"{text} has coefficients for {most}: lower muon_steps")
    if config.muon_adjust_lr != "original":
        return {}
    return dict(
        learning_rate=0.02, weight_decay=0.01, adamw_learning_rate=6e-4, adamw_weight_decay=0.1
    )


register(
    "muon",
    options,
    state,
    step,
    defaults=dict(
        learning_rate=6e-4,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        muon_steps=5,
        muon_coefficients="jordan",
        muon_row_norm=False,
        cautious_decay=False,
        adam_eps=1e-8,
        muon_adjust_lr="match_rms_adamw",
        adamw_learning_rate=None,
        adamw_weight_decay=None,
    ),
    defaults_for=defaults_for,
    fallback_rule="adamw",
    lr_scaling=lambda config: config.muon_adjust_lr,
)
