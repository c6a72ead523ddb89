"""AdamW (arXiv 1711.05101), by torch's fused kernel.

    w ← w (1 − ηλ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε = 1e-8. State: 8 bytes a parameter.
Defaults: L-DNT at every size, and GPT-2 Small, in the DNT paper (arXiv 2507.17501, Table 5).
"""

import torch

from layers.sharding import local_shard
from nanodnt.optim.kernels import update_adamw
from nanodnt.optim.registry import RATIOS, register


def options(config, role, model):
    return dict(betas=(config.beta1, config.beta2), eps=1e-8)


def state(p, group):
    return dict(
        step=torch.zeros((), device=p.device),
        exp_avg=torch.zeros_like(p),
        exp_avg_sq=torch.zeros_like(p),
    )


def step(work, grad_scale, found_inf):
    for group, params, grads, states in work:
        m, v, steps = (
            [local_shard(s[key]) for s in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        params, grads, (beta1, beta2) = (
            list(map(local_shard, params)),
            list(map(local_shard, grads)),
            group["betas"],
        )
        numbers = dict(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        update_adamw(params, grads, m, v, steps, grad_scale, found_inf, **numbers)


register(
    "adamw",
    options,
    state,
    step,
    defaults=dict(learning_rate=6e-4, weight_decay=0.1),
    ratios=RATIOS,
)
