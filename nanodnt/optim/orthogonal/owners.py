"""Steps of whole matrices by the processes that own them: for SOAP.

Under DDP the owner of a matrix updates the weights and their state, and sends them to all. Under
FSDP2 it gets the rows of the matrix, its gradient and state, and sends the changed ones back.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from layers.sharding import is_sharded, local_shard, shard_dim, shard_group
from nanodnt.optim.orthogonal.messages import choose_processes, rows_from_owners, rows_to_owners
from nanodnt.optim.registry import Work

# p, grad and the state of a matrix, or of a stack of matrices; under FSDP2 DTensors, but for `step`
Tensors = dict[str, Tensor]


def make_batches(part: Work) -> Iterator[list[Tensors]]:
    """Yield the matrices of each shape, at most one for each process at a time. Rank i owns the
    i-th of them."""
    count = choose_processes(part.params[0]).count
    by_shape = {}
    for p, grad, state in zip(part.params, part.grads, part.states, strict=True):
        by_shape.setdefault(p.shape, []).append(dict(state, p=p, grad=grad))
    for matrices in by_shape.values():
        for i in range(0, len(matrices), count):
            yield matrices[i : i + count]


def update_batch(batch: list[Tensors], changed: list[str], update: Callable) -> None:
    """update(tensors) of the whole matrix that this process owns, in place. Then every process gets
    the tensors `changed` of all matrices."""
    p = batch[0]["p"]
    if shards := shard_group(p):
        update_shards(batch, changed, update, shards)
        return
    count = choose_processes(p).count
    rank = dist.get_rank() if count > 1 else 0
    if rank < len(batch):
        update(batch[rank])
    if count > 1:
        for owner, tensors in enumerate(batch):
            for key in changed:
                dist.broadcast(tensors[key], owner)


def update_shards(
    batch: list[Tensors], changed: list[str], update: Callable, shards: "dist.ProcessGroup"
) -> None:
    dim = shard_dim(batch[0]["p"])
    owners = list(range(len(batch)))
    rows = {}  # those of this process, in the first dimension
    whole = {}  # (number of matrices that this process owns: 1 or 0, all rows, …)
    for key, tensor in batch[0].items():
        if is_sharded(tensor):
            rows[key] = [local_shard(tensors[key]).transpose(0, dim) for tensors in batch]
            shape = torch.Size((tensor.shape[dim], *rows[key][0].shape[1:]))
            whole[key] = rows_to_owners(owners, rows[key], shape, shards)
    rank = dist.get_rank(shards)
    if rank < len(batch):
        update(batch[rank] | {key: t[0].transpose(0, dim) for key, t in whole.items()})
    for key in changed:
        shape = whole[key].shape[1:]
        torch._foreach_copy_(rows[key], rows_from_owners(owners, whole[key], shape, shards))
