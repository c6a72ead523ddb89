"""Helpers for parameters that FSDP2 shards: DTensors, split by rows over processes. A stack of
matrices whose number does not divide evenly over the processes is split along its second dimension:
the rows of every matrix."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(p: Tensor) -> bool:
    """Whether p is a DTensor. (Importing its class would cost half a second at every start.)"""
    return hasattr(p, "device_mesh")


@torch.no_grad()
def assign(p: Tensor, full: Any) -> None:
    """p ← full, which has p's full shape: a tensor, or one on disk with a method read_into(out,
    rows, dim). Every process keeps its rows of a sharded p and reads no others; nothing is sent."""
    if hasattr(full, "read_into"):
        if is_sharded(p):
            full.read_into(local_shard(p), own_rows(p), shard_dim(p))
        else:
            full.read_into(p)
        return
    if is_sharded(p):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
    p.copy_(full)


def local_shard(p: Tensor) -> Tensor:
    """The rows of a sharded p that this process holds, perhaps none; a p that is not sharded is
    returned as it is."""
    return p.to_local() if is_sharded(p) else p


def full_tensor(p: Tensor) -> Tensor:
    """All of p. A sharded p is gathered, so all processes must call this."""
    return p.full_tensor() if is_sharded(p) else p


def shard_group(p: Tensor) -> "dist.ProcessGroup | None":
    """The process group that p's rows are split over; None where p is not sharded."""
    if not is_sharded(p):
        return None
    # the last dimension of the mesh is the one that shards; under HSDP there is another, of copies
    return p.device_mesh.get_group(p.device_mesh.ndim - 1)


def shard_dim(p: Tensor) -> int:
    """The dimension of p's rows: along which it is split, 0 where it is not sharded."""
    return p.placements[-1].dim if is_sharded(p) else 0


def own_rows(p: Tensor) -> range:
    """Indices of the rows of p that this process holds."""
    n = p.shape[shard_dim(p)]
    group = shard_group(p)
    if group is None:
        return range(n)
    return row_ranges(n, dist.get_world_size(group))[dist.get_rank(group)]


def own_part(by_row: Tensor, p: Tensor) -> Tensor:
    """A view of `by_row` (…, one number for each row of p) that holds the rows of this process."""
    rows = own_rows(p)
    dim = by_row.ndim + 1 - p.ndim + shard_dim(p)
    return by_row.narrow(dim, rows.start, len(rows))


def choose_dim(p: Tensor, world_size: int) -> int:
    """The dimension along which FSDP2 is to split p: the second of a stack whose matrices do not
    divide evenly over the processes, while their rows do; else the first."""
    is_uneven_stack = p.ndim == 3 and len(p) % world_size > 0
    return int(is_uneven_stack and p.shape[1] % world_size == 0)


def shard_numel(p: Tensor, world_size: int) -> int:
    """The entries of the largest shard of p."""
    if choose_dim(p, world_size) == 1:
        return p.numel() // world_size
    rows = -(-len(p) // world_size)
    return rows * p.shape[1:].numel()


def row_ranges(n: int, world_size: int) -> list[range]:
    """The rows of each process when FSDP2 splits n rows: ⌈n/world_size⌉ each, the last processes
    fewer or none."""
    size = -(-n // world_size)
    starts = [min(rank * size, n) for rank in range(world_size)]
    return [range(start, min(start + size, n)) for start in starts]
