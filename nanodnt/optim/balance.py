"""The rule of the routers' biases, with every optimizer: balance=bias (Wang et al., arXiv
2408.15664, algorithm 1).

    b ← b − u sign(load − mean load)

The load of an expert is how often the last batch chose it, over all processes. It comes as the
gradient of b (see layers/moe.py), so micro batches and processes add it up like any other. u is the
constant `balance_rate`. No state.
"""

import torch

from layers.sharding import local_shard
from nanodnt.optim.registry import RULES, Rule, one_if_finite


def options(config, role, model):
    return dict(constant=True)


def state(p, group):
    return {}


def step(work, grad_scale, found_inf):
    taken = one_if_finite(found_inf)
    for group, params, grads, _ in work:
        signs = torch._foreach_sign(list(map(local_shard, grads)))
        torch._foreach_mul_(signs, -group["lr"] * taken)
        torch._foreach_add_(list(map(local_shard, params)), signs)


RULES["balance"] = Rule(options, state, step)
