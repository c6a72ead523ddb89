"""AdamW (arXiv 1711.05101), by torch's fused kernel.

    w ← w (1 − ηλ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε is adam_eps. State: 8 bytes a parameter.
Defaults: L-DNT at every size, and GPT-2 Small, in the DNT paper (arXiv 2507.17501, Table 5).
"""

import torch
from torch import Tensor

from model import Transformer
from nanodnt.optim.kernels import can_compile, decay_cautiously, update_adamw, update_each
from nanodnt.optim.registry import (
    RATIOS,
    Group,
    State,
    Work,
    divide_gradients,
    local_shards,
    register,
)
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    betas = (config.beta1, config.beta2)
    return Group(betas=betas, eps=config.adam_eps, cautious=config.cautious_decay)


def state(p: Tensor, group: Group) -> State:
    return dict(
        step=torch.zeros((), device=p.device),
        exp_avg=torch.zeros_like(p),
        exp_avg_sq=torch.zeros_like(p),
    )


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    for group, params, grads, states in work:
        beta1, beta2 = group["betas"]
        weights = local_shards(params)
        gradients = local_shards(grads)
        averages = local_shards([s["exp_avg"] for s in states])
        rates = dict(lr=group["lr"], weight_decay=group["weight_decay"])
        divisor = grad_scale
        if group["cautious"] and group["weight_decay"]:
            divide_gradients(grads, grad_scale)
            divisor = None
            # the new m, which has the sign of the update
            ahead = (g.lerp(m, beta1) for g, m in zip(gradients, averages, strict=True))
            compiled = can_compile(group, params[0])
            lists = (weights, ahead)
            update_each(decay_cautiously, lists, None, found_inf, compiled, **rates)
            rates["weight_decay"] = 0.0
        update_adamw(
            weights,
            gradients,
            averages,
            local_shards([s["exp_avg_sq"] for s in states]),
            [s["step"] for s in states],
            divisor,
            found_inf,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            **rates,
        )


register(
    "adamw",
    options,
    state,
    step,
    defaults=dict(learning_rate=6e-4, weight_decay=0.1, adam_eps=1e-8, cautious_decay=False),
    ratios=RATIOS,
)
