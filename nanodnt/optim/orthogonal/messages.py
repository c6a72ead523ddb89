"""Which process orthogonalises which of Muon's matrices, and the messages between them.

Three kinds of processes differ in `collect` and `spread`: Alone, Copies of all tensors (DDP), and
Shards of them (FSDP2). The matrices of one exchange have one shape. `owners` is the rank of the
process that has the work, for each of them.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from layers.sharding import own_part, row_ranges, shard_group
from nanodnt.optim.orthogonal.newton_schulz import split_into_stacks
from nanodnt.optim.registry import Group, State

Updates = Tensor | list[Tensor]  # one update (m, n), or (E, m, n), for each matrix of a batch


class Matrix(NamedTuple):
    """A parameter in one step. Under FSDP2 p is a DTensor; grad and tensors of its state are this
    process's rows, or are not sharded."""

    owner: int
    p: Tensor
    grad: Tensor
    state: State


class Batch(NamedTuple):
    """Matrices of one group and one shape."""

    group: Group
    matrices: list[Matrix]

    @property
    def p(self) -> Tensor:
        return self.matrices[0].p

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.group["ns_dtype"])

    @property
    def owners(self) -> list[int]:
        return [matrix.owner for matrix in self.matrices]


class Alone:
    """A single process, which owns all matrices."""

    count = 1  # of processes
    batches_under_way = 0  # number of batches that are not applied while the next one is computed

    def split(self, batch: Batch) -> Iterator[Batch]:
        """Stack by stack, to bound the memory."""
        for matrices in split_into_stacks(batch.matrices, batch.p):
            yield Batch(batch.group, matrices)

    def needs(self, matrix: Matrix) -> bool:
        """Whether this process needs the average of its gradients."""
        return True

    def collect(self, batch: Batch, averages: Tensor) -> Tensor:
        """The whole matrices that this process orthogonalises, as one stack."""
        return averages

    def spread(self, batch: Batch, updates: list[Tensor]) -> Callable[[], Updates]:
        """Send the updates, stacks of the matrices that this process owns. Returns a function that
        waits for the messages and returns this process's rows of the update of each matrix."""
        return lambda: updates[0]


class Copies(Alone):
    """DDP: gradients and momenta are the same everywhere; owners send their updates to all, while
    the next batch is computed."""

    batches_under_way = 1

    def __init__(self) -> None:
        self.count = dist.get_world_size()
        self.rank = dist.get_rank()

    def split(self, batch: Batch) -> Iterator[Batch]:
        yield batch

    def needs(self, matrix: Matrix) -> bool:
        return matrix.owner == self.rank

    def spread(self, batch: Batch, updates: list[Tensor]) -> Callable[[], Updates]:
        return start_exchange(batch.owners, updates, batch.p, batch.dtype)


class Shards(Alone):
    """FSDP2: owners get the rows of their matrices, and send rows of the updates back. A row of a
    stack of experts is a whole matrix, and stays where it is."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self.group = group
        self.count = dist.get_world_size(group)

    def split(self, batch: Batch) -> Iterator[Batch]:
        yield batch

    def collect(self, batch: Batch, averages: Tensor) -> Tensor:
        if batch.p.ndim > 2:
            return averages
        return rows_to_owners(batch.owners, averages, batch.p.shape, self.group)

    def spread(self, batch: Batch, updates: list[Tensor]) -> Callable[[], Updates]:
        if not updates:  # this process owns none
            device = batch.matrices[0].grad.device
            updates = [torch.empty(0, *batch.p.shape, dtype=batch.dtype, device=device)]
        whole = torch.cat(updates)
        if batch.p.ndim > 2:
            return lambda: whole
        rows = rows_from_owners(batch.owners, whole, batch.p.shape, self.group)
        return lambda: rows


def choose_processes(p: Tensor) -> Alone:
    """The kind of processes that train the parameter p."""
    if shards := shard_group(p):
        return Shards(shards)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Copies()
    return Alone()


def all_rows(own: Tensor, p: Tensor) -> Tensor:
    """From a number for each row of this process of S matrices shaped as p, (S, …, rows), to those
    of all rows."""
    shards = shard_group(p)
    if shards is None:
        return own
    whole = own.new_zeros(len(own), *p.shape[:-1])
    own_part(whole, p).copy_(own)
    dist.all_reduce(whole, group=shards)
    return whole


@cache
def assign_owners(shapes: tuple[tuple[int, ...], ...], world_size: int) -> list[int]:
    """The rank that orthogonalises each parameter: the costliest first, each to the rank with the
    least work so far.

    Shapes of equal cost are assigned one after the other. So each is spread over all ranks: little
    padding."""
    costs = []
    for *stack, rows, columns in shapes:
        m, n = sorted((rows, columns))
        # multiplications of one step of the iteration
        costs.append(math.prod(stack) * (2 * m * m * n + m**3))
    work = [0] * world_size
    owners = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], shapes[i])):
        owners[i] = work.index(min(work))
        work[owners[i]] += costs[i]
    return owners


def start_exchange(
    owners: list[int], updates: list[Tensor], p: Tensor, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """DDP: start to send every process the updates of all matrices, which are shaped as p.
    `updates`: those that this process owns, as stacks (…, *shape). Returns a function that waits,
    and returns the update of each matrix.

    All processes send equally much, so ranks that own fewer matrices pad their message with
    uninitialised memory."""
    world_size = dist.get_world_size()
    most = max(owners.count(rank) for rank in range(world_size))
    sent = torch.empty(most, *p.shape, dtype=dtype, device=p.device)
    if updates:
        torch.cat(updates, out=sent[: sum(map(len, updates))])
    received = sent.new_empty(world_size, *sent.shape)
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    arrival = gather(received.flatten(0, 1), sent, async_op=True)

    def finish(sent: Tensor = sent) -> list[Tensor]:  # which keeps `sent` alive until then
        arrival.wait()
        return [received[owner, owners[:i].count(owner)] for i, owner in enumerate(owners)]

    return finish


class Sizes(NamedTuple):
    """Sizes of the messages of one exchange under FSDP2."""

    owned: int  # number of matrices that this process owns
    rows: list[int]  # rows of a matrix on each process
    # entries between this process and each other one: of the matrices that this process owns, and
    # of those that the other one owns
    at_owner: list[int]
    at_holder: list[int]


def rows_to_owners(
    owners: list[int], rows: Tensor, shape: torch.Size, shards: "dist.ProcessGroup"
) -> Tensor:
    """FSDP: give every process of the group `shards` the whole matrices that it owns. `rows`: this
    process's rows of each matrix. Returns (number of matrices that it owns, *shape)."""
    sizes = message_sizes(owners, shape, shards)
    sent = torch.cat([rows[i].flatten() for i in sort_by_owner(owners)])
    received = sent.new_empty(sum(sizes.at_owner))
    dist.all_to_all_single(received, sent, sizes.at_owner, sizes.at_holder, group=shards)
    parts = []
    for part, n in zip(received.split(sizes.at_owner), sizes.rows, strict=True):
        parts.append(part.view(sizes.owned, n, *shape[1:]))
    return torch.cat(parts, dim=1)


def rows_from_owners(
    owners: list[int], updates: Tensor, shape: torch.Size, shards: "dist.ProcessGroup"
) -> list[Tensor]:
    """The reverse: from `updates` (number of matrices that it owns, *shape) of every process to a
    list with this process's rows of the update of each matrix."""
    sizes = message_sizes(owners, shape, shards)
    own_rows = sizes.rows[dist.get_rank(shards)]
    sent = torch.cat([part.flatten() for part in updates.split(sizes.rows, dim=1)])
    received = sent.new_empty(len(owners), own_rows, *shape[1:])
    dist.all_to_all_single(received.view(-1), sent, sizes.at_holder, sizes.at_owner, group=shards)
    order = sort_by_owner(owners)
    return [received[order.index(i)] for i in range(len(owners))]


def message_sizes(owners: list[int], shape: torch.Size, shards: "dist.ProcessGroup") -> Sizes:
    world_size = dist.get_world_size(shards)
    rank = dist.get_rank(shards)
    row_size = math.prod(shape[1:])
    rows = [len(held) for held in row_ranges(shape[0], world_size)]
    owned = owners.count(rank)
    return Sizes(
        owned=owned,
        rows=rows,
        at_owner=[owned * n * row_size for n in rows],
        at_holder=[owners.count(other) * rows[rank] * row_size for other in range(world_size)],
    )


def sort_by_owner(owners: list[int]) -> list[int]:
    """The indices of the matrices, sorted by owner."""
    return sorted(range(len(owners)), key=lambda i: owners[i])
