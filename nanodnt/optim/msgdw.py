"""mSGDW: momentum SGD with decoupled weight decay (DNT, arXiv 2507.17501).

    w ← w (1 − ηλ);   m ← g at first, then μ m + (1 − dampening) g
    w ← w − η m,  with Nesterov  w ← w − η (g + μ m)

By default this is the paper's momentum SGD, m ← μ m + g (sec. 2), with the decoupled decay of
timm's sgdw, which the paper uses (App. C): the order and the first step are timm's. State: 4 bytes
a parameter. Defaults: the paper's language models, GPT-2 and L-DNT (Table 5).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from layers.sharding import shard_group
from model import Transformer
from nanodnt.optim.kernels import can_compile, update_sgd
from nanodnt.optim.registry import Group, State, Work, divide_gradients, local_shards, register
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    return Group(momentum=config.momentum, dampening=config.dampening, nesterov=config.nesterov)


def state(p: Tensor, group: Group) -> State:
    return dict(momentum_buffer=torch.zeros_like(p))


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    for group, params, grads, states in work:
        momenta = local_shards([s["momentum_buffer"] for s in states])
        gradients = local_shards(grads)
        divisor = grad_scale
        if group["dampening"]:
            divide_gradients(grads, grad_scale)
            divisor = None
            gradients = dampened(gradients, momenta, group["dampening"], shard_group(params[0]))
        update_sgd(
            local_shards(params),
            gradients,
            momenta,
            divisor,
            found_inf,
            can_compile(group, params[0]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
        )


def dampened(
    grads: list[Tensor],
    momenta: list[Tensor],
    dampening: float,
    shards: "dist.ProcessGroup | None",
) -> list[Tensor]:
    """Copies of the gradients, times 1 − dampening where the momentum is not all zeros on every
    process. So as long as all gradients of a tensor have been exactly zero, its next one still
    counts as the first."""
    # the L1 norm is 0 only if every entry is: squares of small entries could underflow
    started = (torch.stack(torch._foreach_norm(momenta, 1)) > 0).float()
    if shards:
        dist.all_reduce(started, dist.ReduceOp.MAX, shards)
    shares = 1 - dampening * started
    return [g * share for g, share in zip(grads, shares, strict=True)]


register(
    "msgdw",
    options,
    state,
    step,
    defaults=dict(
        learning_rate=1.0, weight_decay=1e-4, momentum=0.9, dampening=0.0, nesterov=False
    ),
    lr_scaling=lambda config: "sgd",
)
