"""Steps of whole matrices by the processes that own them: for SOAP.

Under DDP the owner of a matrix updates the weights and their state, and sends them to all. Under
FSDP2 it gets the rows of the matrix, its gradient and state, and sends the changed ones back.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from layers.sharding import local_shard, shard_dim, shard_group
from nanodnt.optim.orthogonal.messages import choose_processes, rows_from_owners, rows_to_owners
from nanodnt.optim.registry import Group, Work


class Matrix(NamedTuple):
    """A matrix, or a stack of matrices, in one step."""

    t: int  # number of its earlier gradients
    tensors: dict[str, Tensor]  # p, grad, and its state; under FSDP2 DTensors


def make_batches(part: Work) -> Iterator[list[Matrix]]:
    """Yield the matrices of each shape, at most one for each process at a time. Rank i owns the
    i-th of them. `step` of their state counts their gradients."""
    count = choose_processes(part.params[0]).count
    by_shape = {}
    for p, grad, state in zip(part.params, part.grads, part.states, strict=True):
        tensors = dict(state, p=p, grad=grad)
        step = tensors.pop("step")
        by_shape.setdefault(p.shape, []).append(Matrix(int(step), tensors))
        step += 1
    for matrices in by_shape.values():
        for i in range(0, len(matrices), count):
            yield matrices[i : i + count]


def update_batch(batch: list[Matrix], changed: list[str], update: Callable, group: Group) -> None:
    """update(tensors, t, group) of the whole matrix that this process owns, in place. Then every
    process gets the tensors `changed` of all matrices."""
    p = batch[0].tensors["p"]
    if shard_group(p):
        update_shards(batch, changed, update, group)
        return
    count = choose_processes(p).count
    rank = dist.get_rank() if count > 1 else 0
    if rank < len(batch):
        update(batch[rank].tensors, batch[rank].t, group)
    if count > 1:
        for owner, matrix in enumerate(batch):
            for key in changed:
                dist.broadcast(matrix.tensors[key], owner)


def update_shards(batch: list[Matrix], changed: list[str], update: Callable, group: Group) -> None:
    p = batch[0].tensors["p"]
    shards = shard_group(p)
    dim = shard_dim(p)
    owners = list(range(len(batch)))
    rows = {}  # those of this process, in the first dimension
    whole = {}  # (number of matrices that this process owns: 1 or 0, all rows, …)
    for key, tensor in batch[0].tensors.items():
        rows[key] = [local_shard(matrix.tensors[key]).transpose(0, dim) for matrix in batch]
        shape = torch.Size((tensor.shape[dim], *rows[key][0].shape[1:]))
        whole[key] = rows_to_owners(owners, rows[key], shape, shards)
    rank = dist.get_rank(shards)
    if rank < len(batch):
        tensors = {key: t[0].transpose(0, dim) for key, t in whole.items()}
        update(tensors, batch[rank].t, group)
    for key in changed:
        shape = whole[key].shape[1:]
        torch._foreach_copy_(rows[key], rows_from_owners(owners, whole[key], shape, shards))
