"""One step of Muon: average the gradients, orthogonalise and apply the directions, one shape after
another. With several processes each matrix has an owner, the rank that orthogonalises it."""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from layers.sharding import is_sharded, local_shard, row_ranges, shard_dim, shard_group
from nanodnt.optim.kernels import can_compile, update_averages, update_sgd
from nanodnt.optim.orthogonal.newton_schulz import orthogonalize, split_into_stacks, stack_as


class Matrix(NamedTuple):
    """A parameter in one step. Under FSDP2 p is a DTensor; grad and momentum are this process's
    rows."""

    owner: int
    p: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor


def update_matrices(work, grad_scale, found_inf) -> None:
    """Muon's `step`, see registry.py."""
    shards = shard_group(work[0][1][0])
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    world_size = dist.get_world_size(shards) if shards or together else 1
    # DDP: the updates of one shape are under way while those of the next are computed
    finish = None
    for group, matrices in by_shape(work, world_size):
        if shards:
            updates = sharded_updates(group, matrices, shards, grad_scale, found_inf)
            apply_updates(group, matrices, updates, found_inf)
        elif together:
            started = start_updates(group, matrices, grad_scale, found_inf)
            if finish:
                finish()
            finish = started
        else:  # stack by stack, to bound the memory
            for part in split_into_stacks(matrices, matrices[0].p):
                u = directions(group, part, grad_scale, found_inf)
                apply_updates(group, part, orthogonalize(u, group["ns_steps"]), found_inf)
    if finish:
        finish()


def by_shape(work, world_size: int):
    """Yield (group, matrices of one shape) of each group and shape."""
    work = [
        (group, each_matrix(p, g, [s["momentum_buffer"] for s in states]))
        for group, p, g, states in work
    ]
    params = [p for _, matrices in work for p, _, _ in matrices]
    # a sharded stack has an owner like the others, with none of its matrices to work on: they stay
    # where they are
    shapes = tuple(
        (0, *p.shape[1:]) if p.ndim > 2 and is_sharded(p) else tuple(p.shape) for p in params
    )
    owners = iter(assign_owners(shapes, world_size))
    for group, matrices in work:
        found = {}
        for p, g, m in matrices:
            found.setdefault(p.shape, []).append(
                Matrix(next(owners), p, local_shard(g), local_shard(m))
            )
        for matrices in found.values():
            yield group, matrices


def each_matrix(*lists) -> list:
    """(p, gradient, momentum), … of the lists of these; of a stack whose matrices are split by
    rows, for each."""
    found = []
    for tensors in zip(*lists, strict=True):
        split = shard_dim(tensors[0]) > 0
        found += (
            [tuple(t[i] for t in tensors) for i in range(len(tensors[0]))] if split else [tensors]
        )
    return found


def directions(group, matrices: list, grad_scale, found_inf, wanted: bool = True):
    """Average the gradients. Returns u of each matrix, or this process's rows of it, as one stack
    in the dtype of the iteration; if not `wanted`, of none."""
    params, grads, momenta = map(
        list, zip(*((local_shard(x.p), x.grad, x.momentum) for x in matrices), strict=True)
    )
    shape, dtype = (len(grads) if wanted else 0, *grads[0].shape), getattr(torch, group["ns_dtype"])
    stack = grads[0].new_empty(shape, dtype=dtype)
    how = dict(
        beta=group["momentum"], nesterov=group["nesterov"], compiled=can_compile(group, params[0])
    )
    update_averages(params, grads, momenta, list(stack), grad_scale, found_inf, **how)
    return stack


def start_updates(group, matrices: list, grad_scale, found_inf):
    """DDP: gradients and momenta are the same everywhere, owners send their updates to all. Returns
    a function that waits for them and applies them."""
    p, owned = matrices[0].p, [x for x in matrices if x.owner == dist.get_rank()]
    if others := [x for x in matrices if x.owner != dist.get_rank()]:
        directions(group, others, grad_scale, found_inf, wanted=False)
    parts = (directions(group, part, grad_scale, found_inf) for part in split_into_stacks(owned, p))
    updates = [orthogonalize(u, group["ns_steps"]) for u in parts]
    receive = start_exchange(
        [x.owner for x in matrices], updates, p, getattr(torch, group["ns_dtype"])
    )
    return lambda: apply_updates(group, matrices, receive(), found_inf)


def sharded_updates(group, matrices: list, shards, grad_scale, found_inf):
    """FSDP2: owners get the rows of their matrices, and send rows of the updates back. A row of a
    stack of experts is a whole matrix, and stays where it is."""
    u, p = directions(group, matrices, grad_scale, found_inf), matrices[0].p
    owners = [x.owner for x in matrices]
    if p.ndim == 2:
        u = rows_to_owners(owners, u, p.shape, shards)
    updates = [orthogonalize(part, group["ns_steps"]) for part in split_into_stacks(u, p)]
    u = torch.cat(updates) if updates else u  # none: this process owns none
    return u if p.ndim > 2 else rows_from_owners(owners, u, p.shape, shards)


def apply_updates(group, matrices: list, updates, found_inf) -> None:
    """w ← w (1 − ηλ) − η s update, for this process's rows of every matrix. With found_inf they may
    hold anything."""
    (rows, columns), compiled = matrices[0].p.shape[-2:], can_compile(group, matrices[0].p)
    size = 0.2 * max(rows, columns) ** 0.5
    if group["adjust_lr"] == "original":
        size = max(1, rows / columns) ** 0.5
    numbers = dict(
        lr=group["lr"] * size,
        weight_decay=group["weight_decay"] / size,
        momentum=0.0,
        nesterov=False,
    )
    for part in split_into_stacks(list(zip(matrices, updates, strict=True)), matrices[0].p):
        params, steps = [local_shard(x.p) for x, _ in part], [update for _, update in part]
        if not compiled:
            steps = list(stack_as(params[0].dtype, steps))
        update_sgd(params, steps, [None] * len(params), None, found_inf, compiled, **numbers)


# Messages. All matrices of one exchange have one shape; `owners`: for each the rank of the process
# that has the work.


@cache
def assign_owners(shapes: tuple, world_size: int) -> list:
    """The rank that orthogonalises each parameter: the costliest first, each to the rank with the
    least work so far.

    Shapes of equal cost are assigned one after the other. So each is spread over all ranks: little
    padding."""
    costs = []
    for *stack, rows, columns in shapes:
        m, n = sorted((rows, columns))
        # multiplications of one step of the iteration
        costs.append(math.prod(stack) * (2 * m * m * n + m**3))
    work, owners = [0] * world_size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], shapes[i])):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def start_exchange(owners: list, updates: list, p, dtype: torch.dtype):
    """DDP: start to send every process the updates of all matrices, which are shaped as p.
    `updates`: those that this process owns, as stacks (…, *shape). Returns a function that waits,
    and returns the update of each matrix.

    All processes send equally much, so ranks that own fewer matrices pad their message with
    uninitialised memory."""
    world_size = dist.get_world_size()
    most = max(owners.count(rank) for rank in range(world_size))
    # alive until `finish` is done, which has it
    sent = torch.empty(most, *p.shape, dtype=dtype, device=p.device)
    if updates:
        torch.cat(updates, out=sent[: sum(map(len, updates))])
    received = sent.new_empty(world_size, *sent.shape)
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    arrival = gather(received.flatten(0, 1), sent, async_op=True)

    def finish(sent=sent) -> list:
        arrival.wait()
        return [received[owner, owners[:i].count(owner)] for i, owner in enumerate(owners)]

    return finish


def rows_to_owners(owners: list, rows, shape: tuple, shards) -> torch.Tensor:
    """FSDP: give every process of the group `shards` the whole matrices that it owns. `rows`: this
    process's rows of each matrix. Returns (number of matrices that it owns, *shape)."""
    owned, row_counts, at_owner, at_holder = message_sizes(owners, shape, shards)
    sent = torch.cat([rows[i].flatten() for i in by_owner(owners)])
    received = sent.new_empty(sum(at_owner))
    dist.all_to_all_single(received, sent, at_owner, at_holder, group=shards)
    parts = [
        part.view(owned, r, *shape[1:])
        for part, r in zip(received.split(at_owner), row_counts, strict=True)
    ]
    return torch.cat(parts, dim=1)


def rows_from_owners(owners: list, updates, shape: tuple, shards) -> list:
    """The reverse: from `updates` (number of matrices that it owns, *shape) of every process to a
    list with this process's rows of the update of each matrix."""
    _, row_counts, at_owner, at_holder = message_sizes(owners, shape, shards)
    sent = torch.cat([part.flatten() for part in updates.split(row_counts, dim=1)])
    received = sent.new_empty(len(owners), row_counts[dist.get_rank(shards)], *shape[1:])
    dist.all_to_all_single(received.view(-1), sent, at_holder, at_owner, group=shards)
    order = by_owner(owners)
    return [received[order.index(i)] for i in range(len(owners))]


def message_sizes(owners: list, shape: tuple, shards) -> tuple:
    """(number of matrices that this process owns, rows of a matrix on each process; entries between
    each process and this one: of the matrices that this one owns, and of those that the other
    owns)."""
    world_size, rank, row_size = (
        dist.get_world_size(shards),
        dist.get_rank(shards),
        math.prod(shape[1:]),
    )
    row_counts, owned = [len(rows) for rows in row_ranges(shape[0], world_size)], owners.count(rank)
    at_holder = [owners.count(other) * row_counts[rank] * row_size for other in range(world_size)]
    return owned, row_counts, [owned * r * row_size for r in row_counts], at_holder


def by_owner(owners: list) -> list:
    """The indices of the matrices, sorted by owner."""
    return sorted(range(len(owners)), key=lambda i: owners[i])
