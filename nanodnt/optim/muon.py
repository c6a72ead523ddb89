"""Muon (Keller Jordan; as torch.optim.Muon): momentum whose matrices are orthogonalised. AdamW for the rest.

    m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g with Nesterov, else m;   w ← w (1 − ηλ) − η s NS(u)

NS is in newton_schulz.py. s = √max(1, rows/columns) with `original`, and 0.2 √max(rows, columns) with
`match_rms_adamw`: then updates are as large as AdamW's, so AdamW's LR and decay can be used. With m ← μ m + g updates
would be the same, because NS does not depend on the scale of u. Every matrix is orthogonalised by itself: q, k, v,
gate, up. A parameter of three dimensions is a stack of matrices: experts. State: 4 bytes a parameter.

Under torchrun every rank orthogonalises the matrices that it owns: muon_messages.py has the messages. Of a stack, which
FSDP2 shards by matrices, each rank takes those that it holds. The bits are the same for any number of ranks; under
FSDP2 on a CPU, if rows have a multiple of 16 entries. Nothing is compiled, because nearly all of the time goes into
matrix products. Everything else works on lists of tensors, in few kernels.

Defaults: AdamW's LR and decay with `match_rms_adamw` [I]; with `original` those of Keller Jordan's examples. The DNT
paper (F.1) has 1e-4 for 2D matrices and 6e-4 for 1D vectors (it swaps the nouns there), and does not state the scale of
the updates [U]. Embedding and head, though 2D, are on AdamW [I].
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.sgd import sgd

from layers.sharding import is_sharded, local_shard, shard_group
from nanodnt.optim.muon_messages import (
    assign_owners,
    finish_exchange,
    rows_from_owners,
    rows_to_owners,
    start_exchange,
)
from nanodnt.optim.newton_schulz import orthogonalize, split_into_stacks, stack_as
from nanodnt.optim.registry import average_gradients, for_kernel, register


class Matrix(NamedTuple):
    """A parameter in one step. Under FSDP2 p is a DTensor; grad and momentum are this process's rows."""

    owner: int  # the rank that orthogonalises it
    p: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor


def options(config, role, model):
    dtype = "bfloat16" if model.runtime.compute_dtype == torch.bfloat16 else "float32"
    numbers = dict(momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.muon_steps)
    return numbers | dict(adjust_lr=config.muon_adjust_lr, ns_dtype=dtype)


def state(p, group):
    if p.ndim < 2:
        raise ValueError(f"Muon is for matrices, not for a tensor of shape {tuple(p.shape)}: give it another rule")
    return dict(momentum_buffer=torch.zeros_like(p))


def step(work, grad_scale, found_inf):
    """Update all matrices of one shape, then those of the next: in one process, under DDP, or under FSDP2."""
    _, params, _, _ = work[0]
    shards = shard_group(params[0])  # None unless FSDP2
    distributed = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(shards), dist.get_world_size(shards)) if distributed else (0, 1)
    for group, params, grads, states in work:
        momenta = [s["momentum_buffer"] for s in states]
        average_gradients(params, grads, momenta, group["momentum"], grad_scale, found_inf)
    exchanges = []  # DDP: updates that are being sent while those of the next shape are computed
    for group, matrices in by_shape(work, world_size):
        if shards:
            step_sharded(group, matrices, shards, found_inf)
        elif world_size == 1:
            for part in split_into_stacks(matrices, matrices[0].p):
                apply_updates(group, part, orthogonalize(directions(group, part), group["ns_steps"]), found_inf)
        else:
            exchanges.append((group, matrices, start_updates(group, matrices, rank)))
            if len(exchanges) > 1:  # at most two under way, to bound the memory
                finish_updates(*exchanges.pop(0), found_inf)
    for exchange in exchanges:
        finish_updates(*exchange, found_inf)


def by_shape(work, world_size: int):
    """Yield (group, matrices of one shape) of each group and shape."""
    params = [p for _, params, _, _ in work for p in params]
    # a sharded stack has an owner like the others, with none of its matrices to work on: they stay where they are
    shapes = tuple((0, *p.shape[1:]) if p.ndim > 2 and is_sharded(p) else tuple(p.shape) for p in params)
    owners = iter(assign_owners(shapes, world_size))
    for group, params, grads, states in work:
        found = {}
        for p, g, s in zip(params, grads, states, strict=True):
            matrix = Matrix(next(owners), p, local_shard(g), local_shard(s["momentum_buffer"]))
            found.setdefault(p.shape, []).append(matrix)
        for matrices in found.values():
            yield group, matrices


def directions(group, matrices: list) -> torch.Tensor:
    """u of each matrix, or this process's rows of it, as one stack in the dtype of the iteration."""
    momenta = [x.momentum for x in matrices]
    u = torch._foreach_lerp([x.grad for x in matrices], momenta, group["momentum"]) if group["nesterov"] else momenta
    return stack_as(getattr(torch, group["ns_dtype"]), u)


def apply_updates(group, matrices: list, updates, found_inf) -> None:
    """w ← w (1 − ηλ) − η s update, for this process's rows of every matrix. Where found_inf is true, updates may hold
    anything."""
    (rows, columns), dtype = matrices[0].p.shape[-2:], matrices[0].p.dtype
    size = 0.2 * max(rows, columns) ** 0.5
    if group["adjust_lr"] == "original":
        size = max(1, rows / columns) ** 0.5
    # torch's SGD without momentum: w − ηs (update + (λ/s) w)
    numbers = dict(lr=group["lr"] * size, weight_decay=group["weight_decay"] / size, maximize=False)
    numbers |= dict(momentum=0.0, dampening=0.0, nesterov=False) | for_kernel(None, found_inf)
    for part in split_into_stacks(list(zip(matrices, updates, strict=True)), matrices[0].p):
        params, steps = [local_shard(x.p) for x, _ in part], stack_as(dtype, [update for _, update in part])
        sgd(params, list(steps), [None] * len(params), **numbers)


def start_updates(group, matrices: list, rank: int):
    """DDP: compute the updates of the matrices that this rank owns, and start to send them. Gradients and momenta are
    the same everywhere already."""
    owned = [x for x in matrices if x.owner == rank]
    stacks = split_into_stacks(owned, matrices[0].p)
    updates = [orthogonalize(directions(group, part), group["ns_steps"]) for part in stacks]
    return start_exchange([x.owner for x in matrices], updates, matrices[0].p, getattr(torch, group["ns_dtype"]))


def finish_updates(group, matrices: list, exchange, found_inf) -> None:
    apply_updates(group, matrices, finish_exchange(exchange), found_inf)


def step_sharded(group, matrices: list, shards, found_inf) -> None:
    """FSDP2: the rows of u are sent to the owners of the matrices, and rows of the updates come back. A row of a stack
    is a whole matrix, and stays."""
    owners, p, u = [x.owner for x in matrices], matrices[0].p, directions(group, matrices)
    if p.ndim > 2:
        updates = [orthogonalize(stack, group["ns_steps"]) for stack in split_into_stacks(u, p)]
        return apply_updates(group, matrices, torch.cat(updates), found_inf)
    owned = rows_to_owners(owners, u, p.shape, shards)
    updates = [orthogonalize(stack, group["ns_steps"]) for stack in split_into_stacks(owned, p)]
    rows = rows_from_owners(owners, torch.cat(updates) if updates else owned, p.shape, shards)
    apply_updates(group, matrices, rows, found_inf)


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
