"""Muon's messages: which process orthogonalises which matrix, and how updates and rows get from process to process.

All matrices of one exchange have the same shape. `owners`: for each the rank of the process that orthogonalises it.
"""

import math
from functools import cache

import torch
import torch.distributed as dist

from layers.sharding import row_ranges


@cache
def assign_owners(shapes: tuple, world_size: int) -> list:
    """The rank that orthogonalises each parameter: the costliest first, each to the rank with the least work so far.

    Shapes of equal cost are assigned one after the other. So each shape is spread over all ranks, and `start_exchange`
    needs little padding."""
    costs = []
    for *stack, rows, columns in shapes:
        m, n = sorted((rows, columns))
        costs.append(math.prod(stack) * (2 * m * m * n + m**3))  # multiplications of one step of the iteration
    work, owners = [0] * world_size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], shapes[i])):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def start_exchange(owners: list, updates: list, p, dtype: torch.dtype):
    """DDP: start to send every process the updates of all matrices, which are shaped as p. `updates`: those that this
    process owns, as stacks (…, *shape). Returns a function that waits, and returns the update of each matrix.

    All processes send equally much, so ranks that own fewer matrices pad their message with uninitialised memory."""
    world_size = dist.get_world_size()
    most = max(owners.count(rank) for rank in range(world_size))
    sent = torch.empty(most, *p.shape, dtype=dtype, device=p.device)  # alive until `finish` is done, which has it
    if updates:
        torch.cat(updates, out=sent[: sum(map(len, updates))])
    received = sent.new_empty(world_size, *sent.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    arrival = gather(received.flatten(0, 1), sent, async_op=True)

    def finish(sent=sent) -> list:
        arrival.wait()
        return [received[owner, owners[:i].count(owner)] for i, owner in enumerate(owners)]

    return finish


def rows_to_owners(owners: list, rows, shape: tuple, shards) -> torch.Tensor:
    """FSDP: give every process of the group `shards` the whole matrices that it owns. `rows`: this process's rows of
    each matrix. Returns (number of matrices that it owns, *shape)."""
    owned, row_counts, at_owner, at_holder = message_sizes(owners, shape, shards)
    sent = torch.cat([rows[i].flatten() for i in by_owner(owners)])
    received = sent.new_empty(sum(at_owner))
    dist.all_to_all_single(received, sent, at_owner, at_holder, group=shards)
    parts = [part.view(owned, r, *shape[1:]) for part, r in zip(received.split(at_owner), row_counts, strict=True)]
    return torch.cat(parts, dim=1)


def rows_from_owners(owners: list, updates, shape: tuple, shards) -> list:
    """The reverse: from `updates` (number of matrices that it owns, *shape) of every process to a list with this
    process's rows of the update of each matrix."""
    _, row_counts, at_owner, at_holder = message_sizes(owners, shape, shards)
    sent = torch.cat([part.flatten() for part in updates.split(row_counts, dim=1)])
    received = sent.new_empty(len(owners), row_counts[dist.get_rank(shards)], *shape[1:])
    dist.all_to_all_single(received.view(-1), sent, at_holder, at_owner, group=shards)
    order = by_owner(owners)
    return [received[order.index(i)] for i in range(len(owners))]


def message_sizes(owners: list, shape: tuple, shards) -> tuple:
    """(number of matrices that this process owns, rows of a matrix on each process; entries between each process and
    this one: of the matrices that this one owns, and of those that the other owns)."""
    world_size, rank, row_size = dist.get_world_size(shards), dist.get_rank(shards), math.prod(shape[1:])
    row_counts, owned = [len(rows) for rows in row_ranges(shape[0], world_size)], owners.count(rank)
    at_holder = [owners.count(other) * row_counts[rank] * row_size for other in range(world_size)]
    return owned, row_counts, [owned * r * row_size for r in row_counts], at_holder


def by_owner(owners: list) -> list:
    """The indices of the matrices, sorted by owner."""
    return sorted(range(len(owners)), key=lambda i: owners[i])
