"""What one process holds when a model is trained on one GPU, under DDP, or under FSDP2. Marks: [I] our inference."""

import math
from collections import Counter
from typing import NamedTuple

import torch


class Strategy(NamedTuple):
    """What one process holds, in bytes, besides what a micro batch adds."""

    name: str
    weights: int
    gradients: int
    state: int
    extra: dict = {}  # further bytes by phase; the phase "reduction" is the end of FSDP's backward pass
    in_buckets: bool = False  # DDP: `extra` has the last micro batch's gradients; `gradients` are of earlier ones


def total_bytes(tensors) -> int:
    """The size of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


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


def strategies(model, optimizer, config, gpus: int) -> list:
    """The strategies for this number of GPUs: one GPU alone, or DDP and FSDP. ValueError if fsdp_shard_size does not
    divide `gpus`."""
    parameters, state, buffers = list(model.parameters()), state_tensors(optimizer), total_bytes(model.buffers())
    weights, state_size = total_bytes(parameters), total_bytes(state)
    if gpus == 1:
        return [Strategy("one GPU", weights + buffers, weights, state_size)]
    n = config.fsdp_shard_size or gpus
    if gpus % n:
        raise ValueError(f"fsdp_shard_size={n} does not divide gpus={gpus}: choose a divisor")
    buckets = dict.fromkeys(("forward", "loss", "backward", "clip", "optimizer"), weights)
    buckets["optimizer"] += message_bytes(optimizer, gpus)
    shard = shard_bytes(parameters, n)
    return [
        Strategy("DDP", weights + buffers, weights, state_size, buckets, in_buckets=True),
        Strategy("FSDP", shard + buffers, shard, shard_bytes(state, n), gathered_copies(model)),
    ]


def gathered_copies(model) -> dict:
    """Bytes by phase of the full weights and gradients that FSDP2 holds for a while: an upper bound [I].

    The root group is everything but the blocks. It is gathered from the start of a step to its end, then its gradients
    are reduced. Blocks are gathered one after the other: a process holds the weights of one block, and those of the
    next one twice, gathered and copied out. In the backward pass it also holds the gradients of that block, and those
    of the block before, which are being reduced."""
    block = max(total_bytes(block.parameters()) for block in model.blocks)
    root = total_bytes(model.parameters()) - sum(total_bytes(block.parameters()) for block in model.blocks)
    return dict(forward=root + 3 * block, loss=root + 2 * block, backward=root + 5 * block, reduction=3 * root)
