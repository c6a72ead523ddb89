"""AdamW (arXiv 1711.05101), by torch's fused kernel.

    w ← w (1 − ηλ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε is adam_eps. State: 8 bytes a parameter.
Defaults: L-DNT at every size, and GPT-2 Small, in the DNT paper (arXiv 2507.17501, Table 5).
"""

import torch
from torch import Tensor

from model import Transformer
from nanodnt.optim.kernels import decay_cautiously, update_adamw
from nanodnt.optim.registry import RATIOS, Group, State, Work, local_shards, register
from nanodnt.settings import TrainConfig

EPS = 1e-8


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    """A rule that AdamW completes may have neither flag: then ε is the default."""
    betas = (config.beta1, config.beta2)
    cautious = bool(config.cautious_decay)
    return Group(betas=betas, eps=config.adam_eps or EPS, cautious=cautious)


def state(p: Tensor, group: Group) -> State:
    return dict(
        step=torch.zeros((), device=p.device),
        exp_avg=torch.zeros_like(p),
        exp_avg_sq=torch.zeros_like(p),
    )


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    scale = 1.0 if grad_scale is None else grad_scale
    for group, params, grads, states in work:
        beta1, beta2 = group["betas"]
        weights = local_shards(params)
        gradients = local_shards(grads)
        averages = local_shards([s["exp_avg"] for s in states])
        # the new m, which has the sign of the update; computed where decay is cautious
        pairs = zip(gradients, averages, strict=True)
        ahead = (torch.lerp(g / scale, m, beta1) for g, m in pairs)
        decay = decay_cautiously(group, weights, ahead, found_inf)
        update_adamw(
            weights,
            gradients,
            averages,
            local_shards([s["exp_avg_sq"] for s in states]),
            [s["step"] for s in states],
            grad_scale,
            found_inf,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=group["eps"],
        )


register(
    "adamw",
    options,
    state,
    step,
    defaults=dict(learning_rate=6e-4, weight_decay=0.1, adam_eps=EPS, cautious_decay=False),
    ratios=RATIOS,
)
