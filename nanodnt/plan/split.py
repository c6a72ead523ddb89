"""The choice how a run is split over GPUs, by the bytes that a step needs: DDP or FSDP2, the
weights that FSDP keeps, the micro batch."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from layers.sharding import shard_numel
from model import Transformer
from nanodnt.engine import prepare_model, split_batch
from nanodnt.optim import make_optimizer, state_tensors
from nanodnt.plan.memory import Held, Peak, StepMemory, total_bytes
from nanodnt.run.compilation import choose_blocks
from nanodnt.run.environment import Env, Split, possible_parallel
from nanodnt.run.parallel import (
    block_matrices,
    choose_shard_size,
    gathered_dtype,
    own_head,
    padded_numel,
)
from nanodnt.settings import TrainConfig

BUSY = 4096  # tokens of a micro batch that keep a GPU busy: our choice
# Smallest share of the bytes counted as "kept for the backward" that compiled code keeps: our
# choice, below the 0.58 of GPT-2 and the 0.55 of DNT that were measured on an H100
# (docs/results/speed.md).
COMPILED = 0.5


class Way(NamedTuple):
    """One way to split a run."""

    name: str  # in --plan's table
    parallel: str  # none, ddp, fsdp
    keep: bool  # FSDP: all full weights and gradients are kept during a step
    held: Held


class CountedStep(NamedTuple):
    """A step of a run, on the meta device, to be counted."""

    model: Transformer
    optimizer: Optimizer
    memory: StepMemory
    gpus: int  # number of processes
    by_blocks: bool  # DDP: blocks are compiled one by one
    shard_size: int  # FSDP: number of processes that share one copy of the model


def count_step(model: Transformer, config: TrainConfig, env: Env) -> CountedStep:
    """The step of an empty copy of the model, as `env` computes it. ValueError if fsdp_shard_size
    does not divide the number of processes."""
    gpus = env.world_size
    copy = prepare_model(type(model).empty(model.config), config, env, torch.device("meta"))
    # after prepare_model, which sets the dtype of Muon's products
    optimizer = make_optimizer(copy, config)
    memory = StepMemory(copy, optimizer, config.grad_clip, config.activation_checkpointing)
    by_blocks, _ = choose_blocks(config.compile, config.batch_size, copy, "ddp", gpus)
    shard_size = choose_shard_size(config.fsdp_shard_size, gpus)
    return CountedStep(copy, optimizer, memory, gpus, by_blocks, shard_size)


def one_gpu(model: Transformer, optimizer: Optimizer) -> Way:
    """One process that holds everything."""
    weights = total_bytes(model.parameters())
    held = Held(
        weights=weights + total_bytes(model.buffers()),
        gradients=weights,
        state=total_bytes(state_tensors(optimizer)),
    )
    return Way("one GPU", "none", True, held)


def ddp(model: Transformer, optimizer: Optimizer, gpus: int, by_blocks: bool) -> Way:
    """Everything in each process. If blocks are compiled one by one, buckets hold the gradients all
    the time. In one graph, gradients are sent after the backward pass, as a copy; then they are
    views of it."""
    held = one_gpu(model, optimizer).held
    messages = message_bytes(optimizer, gpus)
    if by_blocks:
        phases = ("forward", "loss", "backward", "clip", "optimizer")
        buckets = dict.fromkeys(phases, held.gradients)
        buckets["optimizer"] += messages
        held = held._replace(gradients=0, extra=buckets)
    else:
        held = held._replace(extra=dict(reduction=held.gradients, optimizer=messages))
    return Way("DDP", "ddp", True, held)


def fsdp(model: Transformer, optimizer: Optimizer, shard_size: int, keep: bool) -> Way:
    """A shard in each process, of `shard_size` that share a copy of the model, and the gathered
    copies: an upper bound, by our inference.

    The root group is gathered from the start of a step to its end, then its gradients are reduced.
    Blocks are gathered one after the other. Unless all are kept (`keep`), a process holds the
    matrices of one block, and those of the next one twice, gathered and copied out. In the backward
    pass it also holds the gradients of that block, and in fp32 those of the block before, or of the
    head, which are being reduced."""
    parameters = list(model.parameters())
    matrices = block_matrices(model)
    head = own_head(model)
    head_parameters = list(head.parameters()) if head else []
    root = total_bytes(parameters) - total_bytes(matrices) - total_bytes(head_parameters)

    # numbers of entries that are gathered for each block, and for the head
    blocks = [padded_numel(block_matrices(block), shard_size) for block in model.blocks]
    head_numel = padded_numel(head_parameters, shard_size)
    itemsize = gathered_dtype(model, model.runtime.compute_dtype or torch.float32).itemsize
    block = itemsize * max(blocks)
    gathered = root + itemsize * head_numel
    reduced = 4 * max(*blocks, head_numel)
    if keep:
        name = "FSDP"
        gathered += itemsize * sum(blocks)
        blocks_in_backward = 1
        full_gradients = total_bytes(parameters)
    else:
        name = "FSDP by blocks"
        gathered += block
        blocks_in_backward = 3
        full_gradients = total_bytes(parameters) - total_bytes(matrices)
    extra = dict(
        forward=gathered + 2 * block,
        loss=gathered + block,
        backward=gathered + blocks_in_backward * block + reduced,
        reduction=3 * root,
    )
    shard = shard_bytes(parameters, shard_size)
    held = Held(
        weights=shard + total_bytes(model.buffers()),
        gradients=shard,
        state=shard_bytes(state_tensors(optimizer), shard_size),
        extra=extra,
        accumulated=dict.fromkeys(("forward", "loss", "backward"), full_gradients),
    )
    return Way(name, "fsdp", keep, held)


def list_ways(parallel: str, step: CountedStep) -> list[Way]:
    """The ways of `parallel`, none, ddp or fsdp, the one with the fewest messages first."""
    model = step.model
    optimizer = step.optimizer
    if parallel == "none":
        return [one_gpu(model, optimizer)]
    if parallel == "ddp":
        return [ddp(model, optimizer, step.gpus, step.by_blocks)]
    return [fsdp(model, optimizer, step.shard_size, keep) for keep in (True, False)]


def shard_bytes(tensors: Iterable[Tensor], n: int) -> int:
    """The size of the largest shard of n processes. Tensors without dimensions are on every
    process."""
    total = 0
    for t in tensors:
        total += t.element_size() * (shard_numel(t, n) if t.ndim else 1)
    return total


def message_bytes(optimizer: Optimizer, gpus: int) -> int:
    """The size of Muon's messages under DDP: for the two largest shapes of matrices, the updates
    that a process sends and those that it receives. Other optimizers send none."""
    sizes = []
    for group in optimizer.param_groups:
        if group["rule"] != "muon":
            continue
        itemsize = getattr(torch, group["ns_dtype"]).itemsize
        for shape, count in Counter(p.shape for p in group["params"]).items():
            sent = math.ceil(count / gpus)  # matrices that the process with the most of them sends
            sizes.append(itemsize * math.prod(shape) * sent * (gpus + 1))
    return sum(sorted(sizes)[-2:])


def largest_micro_batch(step: StepMemory, way: Way, share: int, limit: float) -> int:
    """The largest divisor of `share`, the rows of one process, whose peak is within `limit` bytes;
    else 1."""
    valid = divisors(share)

    def is_too_large(micro: int) -> bool:
        return step.peak(micro, share, way.held).total > limit

    n_fit = bisect_left(valid, True, key=is_too_large)
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
    for micro in divisors(share):
        if micro * block_size >= BUSY:
            return micro
    return share


def choose_split(model: Transformer, config: TrainConfig, env: Env, limit: float) -> Split:
    """The split of a run of the empty `model` over the processes of `env`, each with a GPU that has
    `limit` bytes for tensors.

    The way is the one with the fewest messages, among those that `config.parallel` allows, in which
    the micro batch fits that is set, or one of BUSY tokens. Then, if none is set, the micro batch
    is the largest that fits. The bytes counted are those of the eager step: an upper bound for
    compiled ones. Raises ValueError if a step would not fit, not even compiled, by `least_bytes`;
    unless must_fit is False."""
    given = config.micro_batch_size
    micro, accumulation = split_batch(config.batch_size, given, env.world_size)
    share = micro * accumulation  # rows of one process in a step
    step = count_step(model, config, env)
    ways = []
    for parallel in possible_parallel(config.parallel, env):
        ways += list_ways(parallel, step)
    wanted = given or busy_micro_batch(model.config.block_size, share)
    way = choose_way(step.memory, ways, share, wanted, limit)
    micro = given or largest_micro_batch(step.memory, way, share, limit)
    peak = step.memory.peak(micro, share, way.held)
    memory = f"{peak.total / 1e9:.1f} GB counted, not compiled, of {limit / 1e9:.1f} GB"
    # a step that checkpoints keeps no more than it must, compiled or not
    may_shrink = config.compile is not False and not config.activation_checkpointing
    is_needed = config.must_fit and not config.eval_only
    if least_bytes(peak, may_shrink) > limit and is_needed:
        raise ValueError(
            f"a step does not fit into a GPU with micro_batch_size={micro} ({memory}): "
            "--micro_batch_size=0 and --activation_checkpointing=True need less, more GPUs with "
            "--parallel=auto too; `python model.py CONFIG --plan --gpus=N` says what fits; "
            "--must_fit=False tries it all the same"
        )
    chosen = "as set" if given else "auto: the largest that fits"
    line = f"micro_batch_size {micro} ({chosen}; {memory})"
    if peak.total > limit:
        line = f"warning: memory may run out: {line}"
    return Split(way.parallel, way.keep, micro, share // micro, line)


def least_bytes(peak: Peak, may_shrink: bool) -> float:
    """The bytes that the step needs at least. `may_shrink`: compiled code may keep less than was
    counted."""
    if not may_shrink:
        return peak.total
    return peak.total - (1 - COMPILED) * peak.parts["kept for the backward"]
