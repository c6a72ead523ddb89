"""One step of Muon: average the gradients, collect whole matrices, orthogonalise them, spread the updates, apply them.

Alone, under DDP and under FSDP2 only `collect` and `spread` differ: `Alone`, `Replicated`, `Sharded`. With several
processes each matrix has an owner, the rank that orthogonalises it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.sgd import sgd

from layers.sharding import is_sharded, local_shard, shard_group
from nanodnt.optim.orthogonal.messages import assign_owners, rows_from_owners, rows_to_owners, start_exchange
from nanodnt.optim.orthogonal.newton_schulz import orthogonalize, split_into_stacks, stack_as
from nanodnt.optim.registry import average_gradients, for_kernel


class Matrix(NamedTuple):
    """A parameter in one step. Under FSDP2 p is a DTensor; grad and momentum are this process's rows."""

    owner: int
    p: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor


def update_matrices(work, grad_scale, found_inf) -> None:
    """Muon's `step`, see registry.py: all matrices of one shape, then those of the next."""
    for group, params, grads, states in work:
        momenta = [s["momentum_buffer"] for s in states]
        average_gradients(params, grads, momenta, group["momentum"], grad_scale, found_inf)
    way, under_way = choose_way(work[0][1][0]), []
    for group, same_shape in by_shape(work, way.world_size):
        for matrices in way.split(same_shape):
            updates = [orthogonalize(u, group["ns_steps"]) for u in way.collect(group, matrices)]
            under_way.append((group, matrices, way.spread(group, matrices, updates)))
            if len(under_way) > way.most_under_way:
                apply_updates(*under_way.pop(0), found_inf)
    for sent in under_way:
        apply_updates(*sent, found_inf)


def choose_way(p):
    """How a process whose parameters are like p works with the others."""
    shards = shard_group(p)
    if shards:
        return Sharded(shards)
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    return Alone() if alone else Replicated()


class Alone:
    """Every matrix is here. They are updated stack by stack, to bound the memory."""

    world_size, most_under_way = 1, 0

    def split(self, matrices: list) -> list:
        return split_into_stacks(matrices, matrices[0].p)

    def collect(self, group, matrices: list):
        """Yield stacks of the directions that this process orthogonalises."""
        yield directions(group, matrices)

    def spread(self, group, matrices: list, updates: list):
        """Send `updates`, a stack for each that `collect` yielded. Returns a function that waits for the others' and
        returns the update of each matrix, or this process's rows of it."""
        return lambda: updates[0]


class Replicated:
    """DDP: gradients and momenta are the same everywhere, and owners send their updates to all. That takes place while
    the updates of the next shape are computed."""

    most_under_way = 1

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def split(self, matrices: list) -> list:
        return [matrices]

    def collect(self, group, matrices: list):
        owned = [x for x in matrices if x.owner == self.rank]
        for part in split_into_stacks(owned, matrices[0].p):
            yield directions(group, part)

    def spread(self, group, matrices: list, updates: list):
        owners, dtype = [x.owner for x in matrices], getattr(torch, group["ns_dtype"])
        return start_exchange(owners, updates, matrices[0].p, dtype)


class Sharded:
    """FSDP2: owners get the rows of their matrices, and send rows of the updates back. A row of a stack of experts is a
    whole matrix, and stays where it is."""

    most_under_way = 0

    def __init__(self, shards):
        self.shards, self.world_size = shards, dist.get_world_size(shards)

    def split(self, matrices: list) -> list:
        return [matrices]

    def collect(self, group, matrices: list):
        u, p = directions(group, matrices), matrices[0].p
        if p.ndim == 2:
            u = rows_to_owners([x.owner for x in matrices], u, p.shape, self.shards)
        yield from split_into_stacks(u, p)

    def spread(self, group, matrices: list, updates: list):
        p, dtype = matrices[0].p, getattr(torch, group["ns_dtype"])
        owned = torch.cat(updates) if updates else torch.empty(0, *p.shape, dtype=dtype, device=p.device)
        rows = owned if p.ndim > 2 else rows_from_owners([x.owner for x in matrices], owned, p.shape, self.shards)
        return lambda: rows


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


def apply_updates(group, matrices: list, wait_for_updates, found_inf) -> None:
    """w ← w (1 − ηλ) − η s update, for this process's rows of every matrix. Where found_inf is true, updates may hold
    anything."""
    updates, (rows, columns), dtype = wait_for_updates(), matrices[0].p.shape[-2:], matrices[0].p.dtype
    size = 0.2 * max(rows, columns) ** 0.5
    if group["adjust_lr"] == "original":
        size = max(1, rows / columns) ** 0.5
    # torch's SGD without momentum: w − ηs (update + (λ/s) w)
    numbers = dict(lr=group["lr"] * size, weight_decay=group["weight_decay"] / size, maximize=False)
    numbers |= dict(momentum=0.0, dampening=0.0, nesterov=False) | for_kernel(None, found_inf)
    for part in split_into_stacks(list(zip(matrices, updates, strict=True)), matrices[0].p):
        params, steps = [local_shard(x.p) for x, _ in part], stack_as(dtype, [update for _, update in part])
        sgd(params, list(steps), [None] * len(params), **numbers)
