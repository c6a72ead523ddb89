"""mSGDW: momentum SGD with decoupled weight decay (DNT, arXiv 2507.17501).

    w ← w (1 − ηλ);   m ← g at first, then μ m + (1 − dampening) g;   w ← w − η m,  or − η (g + μ m) with Nesterov

By default this is the paper's momentum SGD, m ← μ m + g (sec. 2), with the decoupled decay of
timm's sgdw, which the paper uses (App. C): the order and the first step are timm's. State: 4 bytes
a parameter. As long as all gradients of a tensor have been exactly zero, its next one still counts
as the first (this matters to dampening only). Defaults: the paper's language models, GPT-2 and
L-DNT (Table 5).
"""

import torch
import torch.distributed as dist

from layers.sharding import local_shard, shard_group
from nanodnt.optim.kernels import can_compile, update_sgd
from nanodnt.optim.registry import divide_gradients, register


def options(config, role, model):
    return dict(momentum=config.momentum, dampening=config.dampening, nesterov=config.nesterov)


def state(p, group):
    return dict(momentum_buffer=torch.zeros_like(p))


def step(work, grad_scale, found_inf):
    for group, params, grads, states in work:
        shards, momenta = (
            shard_group(params[0]),
            [local_shard(s["momentum_buffer"]) for s in states],
        )
        params, grads = list(map(local_shard, params)), list(map(local_shard, grads))
        scale = grad_scale
        if group["dampening"]:  # then the kernel gets copies
            divide_gradients(grads, grad_scale)
            scale = None
            # 1 where a momentum is not all zeros, on any process
            started = (torch.stack(torch._foreach_norm(momenta, 1)) > 0).float()
            if shards:
                dist.all_reduce(started, dist.ReduceOp.MAX, shards)
            shares = 1 - group["dampening"] * started
            grads = [g * share for g, share in zip(grads, shares, strict=True)]
        numbers = {key: group[key] for key in ("lr", "weight_decay", "momentum", "nesterov")}
        update_sgd(
            params, grads, momenta, scale, found_inf, can_compile(group, params[0]), **numbers
        )


DEFAULTS = dict(learning_rate=1.0, weight_decay=1e-4, momentum=0.9, dampening=0.0, nesterov=False)
register(
    "msgdw", options, state, step, defaults=DEFAULTS, uses_betas=False, like=lambda config: "sgd"
)
