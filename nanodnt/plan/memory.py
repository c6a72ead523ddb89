"""Bytes that a training step needs, counted and not estimated by formula: on one GPU, under DDP, under FSDP2; and the
largest micro batch that fits.

The training step of nanodnt/engine.py runs on the meta device, where tensors have shapes but no contents. Every storage
is counted from the operator that makes it until it is freed. So any layout, optimizer or loss is counted as it is.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layers.sharding import shard_numel
from model import GPTConfig
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import make_optimizer
from nanodnt.run.compilation import choose_blocks
from nanodnt.run.hardware import available_bytes, memory_bytes
from nanodnt.run.parallel import block_matrices, gathered_dtype, keep_unsharded, own_head, padded_numel, uneven_experts
from nanodnt.tasks import task_of

# Of what is counted as kept for the backward pass, compiled code keeps at least this share: our choice, below the 0.58
# of GPT-2 and the 0.55 of DNT that were measured on an H100 (docs/results/speed.md).
COMPILED = 0.5
NEXT_PHASE = dict(forward="backward", backward="clip", clip="optimizer")


class Strategy(NamedTuple):
    """What one process holds, in bytes, besides what a micro batch adds."""

    name: str
    weights: int
    gradients: int
    state: int
    extra: dict = {}  # further bytes by phase; the phase "reduction" is the end of the last backward pass
    accumulated: dict = {}  # more than that if an earlier micro batch has left gradients, by phase
    note: str = ""  # a line for the reader


def total_bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def shard_bytes(tensors, n: int) -> int:
    """The size of the largest shard of n processes. Tensors without dimensions are on every process."""
    return sum(t.element_size() * (shard_numel(t, n) if t.ndim else 1) for t in tensors)


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
    if parallel == "ddp" and choose_blocks(config, model, parallel, gpus)[0]:  # in buckets, which hold the gradients
        buckets = dict.fromkeys(("forward", "loss", "backward", "clip", "optimizer"), weights)
        buckets["optimizer"] += message_bytes(optimizer, gpus)
        return Strategy("DDP", weights + buffers, 0, state_size, buckets)
    if parallel == "ddp":  # in one message, of which gradients are views afterwards
        sent = dict(reduction=weights, optimizer=message_bytes(optimizer, gpus))
        return Strategy("DDP", weights + buffers, weights, state_size, sent)
    n = config.fsdp_shard_size or gpus
    if gpus % n:
        raise ValueError(f"fsdp_shard_size={n} does not divide gpus={gpus}: choose a divisor")
    shard, dtype = shard_bytes(parameters, n), model.runtime.compute_dtype or torch.float32
    keep, text = keep_unsharded(model, dtype, 2 * weights + state_size, n, limit)
    blocks = total_bytes(block_matrices(model))
    accumulated = dict.fromkeys(("forward", "loss", "backward"), weights if keep else weights - blocks)
    head = own_head(model)
    root = weights - blocks - (total_bytes(head.parameters()) if head else 0)  # of the root group
    if experts := uneven_experts(model, n):
        text += f"; {experts} experts over {n} processes: gathered, they take the memory of {-(-experts // n) * n}"
    sharded = shard + buffers, shard, shard_bytes(state, n), gathered_copies(model, dtype, root, keep, n), accumulated
    return Strategy("FSDP", *sharded, note=f"FSDP: {text}")


def gathered_copies(model, dtype: torch.dtype, root: int, keep: bool, n: int) -> dict:
    """Bytes by phase of the full weights and gradients that FSDP2 holds for a while: an upper bound, by our inference.

    The root group, of `root` bytes, is gathered from the start of a step to its end, then its gradients are reduced.
    Blocks are gathered one after the other. Unless all are kept (`keep`), a process holds the matrices of one block,
    and those of the next one twice, gathered and copied out. In the backward pass it also holds the gradients of that
    block, and in fp32 those of the block before, or of the head, which are being reduced. Sizes: `padded_numel`."""
    itemsize, own = gathered_dtype(model, dtype).itemsize, own_head(model)
    counts = [padded_numel(block_matrices(block), n) for block in model.blocks]
    head = padded_numel(own.parameters(), n) if own else 0
    block, reduced = itemsize * max(counts), 4 * max(*counts, head)
    held = root + itemsize * head + (itemsize * sum(counts) if keep else block)
    phases = dict(forward=held + 2 * block, loss=held + block, backward=held + (1 if keep else 3) * block + reduced)
    return phases | dict(reduction=3 * root)


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while this mode is on, until they are freed.

    `now` is their sum; `count_as_gradient` moves a storage from `now` to `gradients`. After each operator a row
    (phase, gradients, now) is added to `rows`, unless `phase` is None. Storages of before, and views, add nothing.

    `dry` is for meta tensors: operators that return nothing (the fused updates of lists of tensors) are skipped, and
    reading a number gives 0. Neither could run on meta tensors, and neither makes a storage."""

    def __init__(self, dry: bool = True):
        super().__init__()
        self.dry, self.storages, self.rows, self.phase = dry, {}, [], "forward"
        self.now = self.gradients = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.register((args, kwargs), new=False)
        if self.dry and (not func._schema.returns or func is torch.ops.aten._local_scalar_dense.default):
            return 0.0 if func._schema.returns else None
        result = func(*args, **kwargs)
        self.register(result, new=True)
        self.peak = max(self.peak, self.now)
        if self.phase:
            self.rows.append((self.phase, self.gradients, self.now))
        return result

    def register(self, tree, new: bool) -> None:
        """Note the storages of tensors that are seen for the first time. They count if an operator has made them."""
        for storage in (t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)):
            key, size = storage._cdata, storage.nbytes() if new else 0
            if key not in self.storages:
                self.storages[key] = ref(storage, partial(self.forget, key)), size
                self.now += size

    def forget(self, key, _) -> None:
        """Stop counting a storage that was freed."""
        self.now -= self.storages.pop(key)[1]

    def count_as_gradient(self, p) -> None:
        """Count the storage of p.grad among the gradients from here on."""
        key = p.grad.untyped_storage()._cdata
        reference, size = self.storages[key]
        self.storages[key] = reference, 0
        self.now, self.gradients = self.now - size, self.gradients + size


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False):
    """Attention as one operator. Like a GPU's kernels it keeps q, k, v, the result and one fp32 number a row; on meta
    tensors torch would take the plain formula and keep all scores."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal)[0]


def trace(model, optimizer, config, micro: int, accumulation: int = 1) -> Memory:
    """Run one training step and count it. Its phases are forward, backward, clip, optimizer. The last forward row is
    what is held when the loss begins. The loss has no phase, so it leaves no rows: `loss_bytes` counts it."""
    batch, compute_loss = model.example(micro * accumulation), model.loss
    memory = Memory(dry=batch[0].is_meta)

    def enter_next_phase(phase):
        memory.phase = NEXT_PHASE.get(phase)

    def loss_without_rows(*args):
        memory.rows.append((memory.phase, memory.gradients, memory.now))
        memory.phase = None
        return compute_loss(*args)

    hooks = [p.register_post_accumulate_grad_hook(memory.count_as_gradient) for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer = Trainer(model, optimizer, scaler, micro, config.grad_clip, on_phase_end=enter_next_phase)
    with (
        patch.object(F, "scaled_dot_product_attention", fused_attention),
        patch.object(dist, "is_initialized", lambda: False),  # so that the optimizer sends no messages
        patch.object(model, "loss", loss_without_rows),
        memory,
    ):
        training_step(trainer, batch)
    optimizer.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return memory


def loss_bytes(model, micro: int) -> int:
    """Peak bytes of the loss of a micro batch, besides the residual stream that it is given."""
    c, (_, targets) = model.config, model.example(micro)
    x = torch.empty(micro, c.block_size, c.n_embd, device=targets.device, requires_grad=True)
    with Memory(dry=x.is_meta) as memory:
        model.loss(x, targets)
    return memory.peak


class Peak(NamedTuple):
    """The moment when one process holds the most."""

    phase: str
    parts: dict  # the bytes of each part, by the names in --plan's table
    total: float


class Timeline:
    """Bytes of a training step, operator by operator, for any micro batch.

    All bytes are linear in the micro batch, so steps of 2 and 3 rows determine the rest (a single row would take
    shortcuts). The exception is the loss, which works on chunks of tokens and is counted for each micro batch."""

    def __init__(self, model, optimizer, config, checkpointing: bool):
        model.runtime.checkpointing, self.loss_bytes = checkpointing, cache(partial(loss_bytes, model))
        two, three = (trace(model, optimizer, config, micro).rows for micro in (2, 3))
        phases, gradients, other = zip(*two, strict=True)
        self.before_loss, other = phases.index("backward") - 1, np.array(other, float)
        self.phases = [*phases, "loss", "reduction"]  # of each moment
        self.gradients = np.array([*gradients, 0, max(gradients)]) / max(gradients)  # the share that exists by then
        self.slope = np.array([row[-1] for row in three]) - other
        self.start = other - 2 * self.slope
        self.row_bytes = total_bytes(model.example(1))  # inputs and targets are on the device from the step's start

    def peak(self, micro: int, share: int, strategy: Strategy) -> Peak:
        """The moment when the most is held, in a step of `share` rows. If these are more than one micro batch,
        gradients of an earlier one exist from the start."""
        accumulates, other = micro < share, self.start + self.slope * micro  # besides weights, gradients and state
        other = np.append(other, (other[self.before_loss] + self.loss_bytes(micro), 0))
        of_phase = Counter(strategy.extra) + Counter(strategy.accumulated if accumulates else {})
        extra = np.array([of_phase[phase] for phase in self.phases])
        existing = 1 if accumulates else self.gradients
        gradients = strategy.gradients * existing + 0 * other
        i = (gradients + extra + other).argmax()
        kept = min(other[self.before_loss], other[i])
        parts = {
            "weights": strategy.weights,
            "gradients outside buckets": gradients[i],
            "optimizer state": strategy.state,
            "DDP's buckets, FSDP's gathered copies": extra[i],
            "kept for the backward": kept,
            "everything else then": other[i] - kept + share * self.row_bytes,
        }
        return Peak(self.phases[i], parts, sum(parts.values()))


def largest_micro_batch(timeline: Timeline, strategy: Strategy, share: int, limit: float) -> int:
    """The largest divisor of `share`, the rows of one process, whose peak is within `limit` bytes; else 1."""
    valid = [micro for micro in range(share, 0, -1) if share % micro == 0]
    return next((micro for micro in valid if timeline.peak(micro, share, strategy).total <= limit), 1)


def make_empty(model_config: GPTConfig, config, env) -> tuple:
    """(model, optimizer) of a run in `env`, on the meta device."""
    model = task_of(model_config).network().empty(model_config)
    prepare_model(model, config, env, torch.device("meta"))
    return model, make_optimizer(model, config)


def count_step(model_config: GPTConfig, config, env, limit: float = math.inf) -> tuple:
    """(Timeline, Strategy) of a run in `env`, whose GPUs have `limit` bytes."""
    model, optimizer = make_empty(model_config, config, env)
    strategy = make_strategy(env.parallel, model, optimizer, config, env.world_size, limit)
    return Timeline(model, optimizer, config, config.activation_checkpointing), strategy


def choose_micro_batch(model_config: GPTConfig, config, env, share: int) -> tuple:
    """(micro batch, accumulation steps) on a GPU: the one that is set, or else the largest divisor of `share`, the rows
    of one process, that fits; it is printed. All ranks must call this, with `env.parallel` set. The count is that of
    `--plan`, of the eager step: an upper bound for compiled ones. ValueError, which says what would fit, if this would
    not, not even compiled, by `least_bytes`; unless must_fit is False."""
    limit = min(env.gather(available_bytes(env.device)))  # the same on all ranks
    total = min(env.gather(memory_bytes(env.device)))  # by which FSDP chooses what to keep
    timeline, held = count_step(model_config, config, env, total)
    micro = config.micro_batch_size or largest_micro_batch(timeline, held, share, limit)
    counted = timeline.peak(micro, share, held)
    peak = counted.total
    memory = f"{peak / 1e9:.1f} GB counted, not compiled, of {limit / 1e9:.1f} GB"
    if least_bytes(counted, config) > limit and config.must_fit and not config.eval_only:
        fits = what_fits(model_config, config, env, share * env.world_size, limit, total)
        problem = f"a step does not fit into a GPU with micro_batch_size={micro} ({memory})"
        raise ValueError(f"{problem}: {fits}; --must_fit=False tries it all the same")
    if peak > limit:
        env.print(f"warning: micro_batch_size {micro}: memory may run out ({memory})")
    elif not config.micro_batch_size:
        env.print(f"micro_batch_size {micro} (auto: the largest that fits; {memory})")
    return micro, share // micro


def least_bytes(peak: Peak, config) -> float:
    """What is needed at least of what was counted, where the step may be compiled. (Checkpointing keeps no more than it
    must.)"""
    exact = config.compile is False or config.activation_checkpointing
    return peak.total - (0 if exact else (1 - COMPILED) * peak.parts["kept for the backward"])


def what_fits(model_config: GPTConfig, config, env, rows: int, limit: float, total: float) -> str:
    """What makes a step of `rows` rows fit into `limit` bytes a GPU, each of `total`: with the least GPUs, up to 1024
    times as many, as the settings are and with activation checkpointing."""
    found, half, worlds = [], env.dtype == torch.float16, [env.world_size * 2**i for i in range(11)]
    for checkpointing in dict.fromkeys((config.activation_checkpointing, True)):
        changed = replace(config, activation_checkpointing=checkpointing, fsdp_shard_size=0)
        model, optimizer = make_empty(model_config, changed, env)
        timeline = Timeline(model, optimizer, changed, checkpointing)
        for i, n in enumerate(n for n in worlds if rows % n == 0):
            kind = "fsdp" if n > 1 and not half else env.parallel  # which has no fp16
            strategy = make_strategy(kind, model, optimizer, changed, n, total)
            if least_bytes(timeline.peak(1, rows // n, strategy), changed) <= limit:
                flags = ["--parallel=fsdp"] * (kind != env.parallel)
                flags += ["--fsdp_shard_size=0"] * bool(config.fsdp_shard_size)
                flags += ["--micro_batch_size=1"] * (config.micro_batch_size > 1)
                flags += ["--activation_checkpointing=True"] * (checkpointing and not config.activation_checkpointing)
                words = [f"on {n} GPUs"] * (n > env.world_size) + [f"with {' '.join(flags)}"] * bool(flags)
                found.append(" ".join(words))
                worlds = worlds[:i]  # checkpointing is worth a word where it needs fewer
                break
    return f"it does {', or '.join(found)}" if found else "no number of GPUs does"
