"""What one process holds when a model is trained on one GPU, under DDP, or under FSDP2."""

import math
from collections import Counter
from typing import NamedTuple

import torch

from nanodnt.run.parallel import block_matrices, gathered_dtype, keep_unsharded, padded_numel


class Strategy(NamedTuple):
    """What one process holds, in bytes, besides what a micro batch adds."""

    name: str
    weights: int
    gradients: int
    state: int
    extra: dict = {}  # further bytes by phase; the phase "reduction" is the end of FSDP's backward pass
    accumulated: dict = {}  # more than that if an earlier micro batch has left gradients, by phase
    in_buckets: bool = False  # DDP: `extra` has the last micro batch's gradients; `gradients` are of earlier ones
    note: str = ""  # a line for the reader


def total_bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def shard_bytes(tensors, n: int) -> int:
    """The size of the largest shard, where n processes split the rows of each tensor as FSDP2 does: ⌈rows/n⌉ each.
    Tensors without dimensions are on every process."""
    return sum(total_bytes([t]) if t.ndim == 0 else -(-len(t) // n) * total_bytes([t[0]]) for t in tensors)


def state_tensors(optimizer) -> list:
    """All tensors of the optimizer's state."""
    return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]


def message_bytes(optimizer, gpus: int) -> int:
    """The size of Muon's messages under DDP: for the two largest shapes of matrices, the updates that a process sends
    and those that it receives. Other optimizers send none."""
    sizes = []
    for group in optimizer.param_groups:
        shapes = Counter(p.shape for p in group["params"]) if group["rule"] == "muon" else {}
        for shape, count in shapes.items():
            one = math.prod(shape) * getattr(torch, group["ns_dtype"]).itemsize
            sent = -(-count // gpus)  # every process sends as many matrices as the one that owns the most
            sizes.append(one * sent * (gpus + 1))
    return sum(sorted(sizes)[-2:])


def make_strategy(parallel: str, model, optimizer, config, gpus: int, limit: float = math.inf) -> Strategy:
    """What one of `gpus` processes holds under `parallel`: none, ddp or fsdp; each GPU has `limit` bytes. ValueError if
    fsdp_shard_size does not divide `gpus`."""
    parameters, state, buffers = list(model.parameters()), state_tensors(optimizer), total_bytes(model.buffers())
    weights, state_size = total_bytes(parameters), total_bytes(state)
    if parallel == "none":
        return Strategy("one GPU", weights + buffers, weights, state_size)
    if parallel == "ddp":
        buckets = dict.fromkeys(("forward", "loss", "backward", "clip", "optimizer"), weights)
        buckets["optimizer"] += message_bytes(optimizer, gpus)
        return Strategy("DDP", weights + buffers, weights, state_size, buckets, in_buckets=True)
    n = config.fsdp_shard_size or gpus
    if gpus % n:
        raise ValueError(f"fsdp_shard_size={n} does not divide gpus={gpus}: choose a divisor")
    shard, dtype = shard_bytes(parameters, n), model.runtime.compute_dtype or torch.float32
    keep, text = keep_unsharded(model, dtype, 3 * weights + state_size, n, limit)
    root = weights - total_bytes(block_matrices(model))  # of the root group
    accumulated = dict.fromkeys(("forward", "loss", "backward"), weights if keep else root)
    experts = model.config.n_expert
    if experts % n:
        text += f"; {experts} experts over {n} processes: gathered, they take the memory of {-(-experts // n) * n}"
    sharded = shard + buffers, shard, shard_bytes(state, n), gathered_copies(model, dtype, root, keep, n), accumulated
    return Strategy("FSDP", *sharded, note=f"FSDP: {text}")


def gathered_copies(model, dtype: torch.dtype, root: int, keep: bool, n: int) -> dict:
    """Bytes by phase of the full weights and gradients that FSDP2 holds for a while: an upper bound, by our inference.

    The root group, of `root` bytes, is gathered from the start of a step to its end, then its gradients are reduced.
    Blocks are gathered one after the other. Unless all are kept (`keep`), a process holds the matrices of one block,
    and those of the next one twice, gathered and copied out. In the backward pass it also holds the gradients of that
    block, and in fp32 those of the block before, which are being reduced. Copies are as large as the n shards together:
    `padded_numel`."""
    itemsize = gathered_dtype(model, dtype).itemsize
    counts = [padded_numel(block_matrices(block), n) for block in model.blocks]
    block, reduced = itemsize * max(counts), 4 * max(counts)
    held = root + (itemsize * sum(counts) if keep else block)
    phases = dict(forward=held + 2 * block, loss=held + block, backward=held + (1 if keep else 3) * block + reduced)
    return phases | dict(reduction=3 * root)
