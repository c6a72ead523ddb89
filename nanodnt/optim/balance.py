"""The rule of the routers' biases under every optimizer: balance=bias (Wang et al., arXiv
2408.15664, algorithm 1).

    b ← b − u sign(load − mean load)

The load of an expert is how often the last batch chose it, over all processes. It comes as the
gradient of b (see layers/moe.py), so micro batches and processes add it up like any other gradient.
u is `balance_rate`, the same in every step. No state.
"""

import torch
from torch import Tensor

from model import Transformer
from nanodnt.optim.registry import RULES, Group, Rule, State, Work, local_shards, one_if_finite
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    return Group(constant=True)


def state(p: Tensor, group: Group) -> State:
    return {}


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    taken = one_if_finite(found_inf)
    for group, params, grads, _ in work:
        signs = torch._foreach_sign(local_shards(grads))
        torch._foreach_mul_(signs, -group["lr"] * taken)
        torch._foreach_add_(local_shards(params), signs)


RULES["balance"] = Rule(options, state, step)
