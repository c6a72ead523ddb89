"""The few helpers for parameters that FSDP2 shards: DTensors, split by rows over processes. Where a
stack of matrices has not one for each process, the rows of every matrix are split: its second
dimension."""

import torch
import torch.distributed as dist


def is_sharded(p) -> bool:
    """Whether p is a DTensor. (Importing its class would cost half a second at every start.)"""
    return hasattr(p, "device_mesh")


@torch.no_grad()
def assign(p, full):
    """p ← full, a tensor of p's full shape. Every process keeps its rows of a sharded p; nothing is
    sent. Of a tensor that is on disk, with a method read_into(out, rows, dim), it reads these rows
    alone."""
    if hasattr(full, "read_into"):
        full.read_into(local_shard(p), *((own_rows(p), shard_dim(p)) if is_sharded(p) else ()))
        return
    if is_sharded(p):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
    p.copy_(full)


def local_shard(p):
    """The rows of a sharded p that this process holds, perhaps none; a p that is not sharded is
    returned as it is."""
    return p.to_local() if is_sharded(p) else p


def full_tensor(p):
    """All of p. A sharded p is gathered, so all processes must call this."""
    return p.full_tensor() if is_sharded(p) else p


def shard_group(p):
    """The process group that p's rows are split over; None where p is not sharded."""
    # the last dimension of the mesh is the one that shards; under HSDP there is another, of copies
    return p.device_mesh.get_group(p.device_mesh.ndim - 1) if is_sharded(p) else None


def shard_dim(p) -> int:
    """The dimension of p's rows: along which it is split, 0 where it is not sharded."""
    return p.placements[-1].dim if is_sharded(p) else 0


def own_rows(p) -> range:
    """Which of p's rows this process holds."""
    n, group = p.shape[shard_dim(p)], shard_group(p)
    return row_ranges(n, dist.get_world_size(group))[dist.get_rank(group)] if group else range(n)


def choose_dim(p, world_size: int) -> int:
    """Along which dimension FSDP2 is to split p: the second of a stack whose matrices do not divide
    evenly over the processes, while their rows do."""
    return int(p.ndim == 3 and len(p) % world_size > 0 and p.shape[1] % world_size == 0)


def shard_numel(p, world_size: int) -> int:
    """The entries of the largest shard of p."""
    return (
        p.numel() // world_size
        if choose_dim(p, world_size)
        else -(-len(p) // world_size) * p.shape[1:].numel()
    )


def row_ranges(n: int, world_size: int) -> list:
    """The rows of each process when FSDP2 splits n rows: ⌈n/world_size⌉ each, the last processes
    fewer or none."""
    size = -(-n // world_size)
    return [range(min(rank * size, n), min((rank + 1) * size, n)) for rank in range(world_size)]
