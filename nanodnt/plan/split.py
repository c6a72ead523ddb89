"""How a run is split over GPUs, by the bytes that a step needs: DDP or FSDP2, what FSDP keeps, the
micro batch."""

import math
from bisect import bisect_left
from collections import Counter
from typing import NamedTuple

import torch

from layers.sharding import shard_numel
from nanodnt.engine import prepare_model, split_batch
from nanodnt.optim import make_optimizer
from nanodnt.plan.memory import Held, Peak, StepMemory, state_tensors, total_bytes
from nanodnt.run.compilation import choose_blocks
from nanodnt.run.environment import Split, possible_parallel
from nanodnt.run.parallel import (
    block_matrices,
    choose_shard_size,
    gathered_dtype,
    own_head,
    padded_numel,
)

BUSY = 4096  # tokens of a micro batch that keep a GPU busy: our choice
# Of what is counted as kept for the backward pass, compiled code keeps at least this share: our
# choice, below the 0.58 of GPT-2 and the 0.55 of DNT that were measured on an H100
# (docs/results/speed.md).
COMPILED = 0.5


class Way(NamedTuple):
    """One way to split a run."""

    name: str  # in --plan's table
    parallel: str  # none, ddp, fsdp
    keep: bool  # FSDP: all full weights and gradients are kept during a step
    held: Held


def one_gpu(model, optimizer) -> Way:
    """One process that holds everything."""
    weights = total_bytes(model.parameters())
    held = Held(
        weights + total_bytes(model.buffers()), weights, total_bytes(state_tensors(optimizer))
    )
    return Way("one GPU", "none", True, held)


def ddp(model, optimizer, config, gpus: int) -> Way:
    """Everything in each process. By blocks buckets hold the gradients all the time; as one graph
    gradients are sent after the backward pass, in a copy of which they are views afterwards."""
    held = one_gpu(model, optimizer).held
    messages = message_bytes(optimizer, gpus)
    if choose_blocks(config, model, "ddp", gpus)[0]:
        buckets = dict.fromkeys(
            ("forward", "loss", "backward", "clip", "optimizer"), held.gradients
        )
        buckets["optimizer"] += messages
        return Way("DDP", "ddp", True, held._replace(gradients=0, extra=buckets))
    return Way(
        "DDP", "ddp", True, held._replace(extra=dict(reduction=held.gradients, optimizer=messages))
    )


def fsdp(model, optimizer, config, gpus: int, keep: bool) -> Way:
    """A shard in each process, and what is gathered: an upper bound, by our inference.

    The root group is gathered from the start of a step to its end, then its gradients are reduced.
    Blocks are gathered one after the other. Unless all are kept (`keep`), a process holds the
    matrices of one block, and those of the next one twice, gathered and copied out. In the backward
    pass it also holds the gradients of that block, and in fp32 those of the block before, or of the
    head, which are being reduced. ValueError if fsdp_shard_size does not divide `gpus`."""
    n = choose_shard_size(config.fsdp_shard_size, gpus)
    parameters, head = list(model.parameters()), own_head(model)
    itemsize = gathered_dtype(model, model.runtime.compute_dtype or torch.float32).itemsize
    blocks = [padded_numel(block_matrices(block), n) for block in model.blocks]
    head_numel = padded_numel(head.parameters(), n) if head else 0
    matrices = total_bytes(block_matrices(model))
    root = total_bytes(parameters) - matrices - (total_bytes(head.parameters()) if head else 0)
    block = itemsize * max(blocks)
    gathered = root + itemsize * head_numel + (itemsize * sum(blocks) if keep else block)
    reduced = 4 * max(*blocks, head_numel)
    extra = dict(
        forward=gathered + 2 * block,
        loss=gathered + block,
        backward=gathered + (1 if keep else 3) * block + reduced,
        reduction=3 * root,
    )
    full_gradients = total_bytes(parameters) - (0 if keep else matrices)
    shard = shard_bytes(parameters, n)
    held = Held(
        weights=shard + total_bytes(model.buffers()),
        gradients=shard,
        state=shard_bytes(state_tensors(optimizer), n),
        extra=extra,
        accumulated=dict.fromkeys(("forward", "loss", "backward"), full_gradients),
    )
    return Way("FSDP" if keep else "FSDP by blocks", "fsdp", keep, held)


def list_ways(parallel: str, model, optimizer, config, gpus: int) -> list[Way]:
    """The ways of `parallel`, none, ddp or fsdp, the one with the fewest messages first."""
    if parallel == "none":
        return [one_gpu(model, optimizer)]
    if parallel == "ddp":
        return [ddp(model, optimizer, config, gpus)]
    return [fsdp(model, optimizer, config, gpus, keep) for keep in (True, False)]


def shard_bytes(tensors, n: int) -> int:
    """The size of the largest shard of n processes. Tensors without dimensions are on every
    process."""
    return sum(t.element_size() * (shard_numel(t, n) if t.ndim else 1) for t in tensors)


def message_bytes(optimizer, gpus: int) -> int:
    """The size of Muon's messages under DDP: for the two largest shapes of matrices, the updates
    that a process sends and those that it receives. Other optimizers send none."""
    sizes = []
    for group in optimizer.param_groups:
        if group["rule"] == "muon":
            itemsize = getattr(torch, group["ns_dtype"]).itemsize
            for shape, count in Counter(p.shape for p in group["params"]).items():
                # as many matrices as the process sends that owns the most
                sent = math.ceil(count / gpus)
                sizes.append(itemsize * math.prod(shape) * sent * (gpus + 1))
    return sum(sorted(sizes)[-2:])


def largest_micro_batch(step: StepMemory, way: Way, share: int, limit: float) -> int:
    """The largest divisor of `share`, the rows of one process, whose peak is within `limit` bytes;
    else 1."""
    valid = divisors(share)
    n_fit = bisect_left(
        valid, True, key=lambda micro: step.peak(micro, share, way.held).total > limit
    )
    return valid[max(n_fit - 1, 0)]


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def choose_way(step: StepMemory, ways: list[Way], share: int, wanted: int, limit: float) -> Way:
    """The first way in which `wanted` rows fit into `limit` bytes, or the last."""
    for way in ways[:-1]:
        if step.peak(wanted, share, way.held).total <= limit:
            return way
    return ways[-1]


def busy_micro_batch(block_size: int, share: int) -> int:
    """The smallest divisor of `share` that has BUSY tokens, or `share`."""
    return next((micro for micro in divisors(share) if micro * block_size >= BUSY), share)


def count_step(model, config, env) -> tuple:
    """(an empty copy of the model as `env` computes it, its optimizer, StepMemory)."""
    model = prepare_model(type(model).empty(model.config), config, env, torch.device("meta"))
    # after prepare_model, which sets the dtype of Muon's products
    optimizer = make_optimizer(model, config)
    return model, optimizer, StepMemory(model, optimizer, config, config.activation_checkpointing)


def choose_split(model, config, env, limit: float) -> Split:
    """How a run of the empty `model` is split over the processes of `env`, each with a GPU that has
    `limit` bytes for tensors.

    Of the ways that `config.parallel` allows, it is the one with the fewest messages in which a
    micro batch fits that is set, or has BUSY tokens; then, if none is set, the largest micro batch
    that fits. The count is of the eager step: an upper bound for compiled ones. ValueError if it
    would not fit, not even compiled, by `least_bytes`; unless must_fit is False."""
    given = config.micro_batch_size
    share = math.prod(split_batch(config.batch_size, given, env.world_size))
    copy, optimizer, step = count_step(model, config, env)
    kinds = possible_parallel(config.parallel, env)
    ways = [
        way for kind in kinds for way in list_ways(kind, copy, optimizer, config, env.world_size)
    ]
    way = choose_way(
        step, ways, share, given or busy_micro_batch(model.config.block_size, share), limit
    )
    micro = given or largest_micro_batch(step, way, share, limit)
    peak = step.peak(micro, share, way.held)
    memory = f"{peak.total / 1e9:.1f} GB counted, not compiled, of {limit / 1e9:.1f} GB"
    if least_bytes(peak, config) > limit and config.must_fit and not config.eval_only:
        problem = f"a step does not fit into a GPU with micro_batch_size={micro} ({memory})"
        less = "--micro_batch_size=0 and --activation_checkpointing=True need less, more GPUs with --parallel=auto too"
        plan = "`python model.py CONFIG --plan --gpus=N` says what fits"
        raise ValueError(f"{problem}: {less}; {plan}; --must_fit=False tries it all the same")
    chosen = "as set" if given else "auto: the largest that fits"
    line = f"micro_batch_size {micro} ({chosen}; {memory})"
    if peak.total > limit:
        line = f"warning: memory may run out: {line}"
    return Split(way.parallel, way.keep, micro, share // micro, line)


def least_bytes(peak: Peak, config) -> float:
    """What is needed at least of what was counted, where the step may be compiled. (Checkpointing
    keeps no more than it must.)"""
    if config.compile is False or config.activation_checkpointing:
        return peak.total
    return peak.total - (1 - COMPILED) * peak.parts["kept for the backward"]
