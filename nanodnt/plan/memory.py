"""Bytes that a training step needs, counted and not estimated by formula; the largest micro batch that fits.

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

from model import GPTConfig
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import make_optimizer
from nanodnt.plan.strategies import Strategy, make_strategy, total_bytes
from nanodnt.run.hardware import available_bytes, memory_bytes
from nanodnt.tasks import task_of

NEXT_PHASE = dict(forward="backward", backward="clip", clip="optimizer")


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while this mode is on, until they are freed.

    `now` is their sum; `count_as_gradient` moves a storage from `now` to `gradients`. After each operator a row
    (phase, gradients, now) is added to `rows`, unless `phase` is None. Storages that existed before, views and changes
    in place add nothing.

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
        existing = 1 if accumulates else 0 if strategy.in_buckets else self.gradients
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


def count_step(flags: GPTConfig, config, env, limit: float = math.inf) -> tuple:
    """(Timeline, Strategy) of a run in `env`, whose GPUs have `limit` bytes."""
    model = prepare_model(task_of(flags).network().empty(flags), config, replace(env, device=torch.device("meta")))
    optimizer = make_optimizer(model, config)
    strategy = make_strategy(env.parallel, model, optimizer, config, env.world_size, limit)
    return Timeline(model, optimizer, config, config.activation_checkpointing), strategy


def choose_micro_batch(flags: GPTConfig, config, env, share: int) -> tuple:
    """(micro batch, accumulation steps) on a GPU: the largest divisor of `share`, the rows of one process, that fits;
    it is printed. All ranks must call this, with `env.parallel` set. The count is that of `--plan`, of the eager step:
    an upper bound for compiled ones. If not even one row fits, it is 1 all the same."""
    limit = min(env.gather(available_bytes(env.device)))  # the same on all ranks
    total = min(env.gather(memory_bytes(env.device)))  # by which FSDP chose what to keep
    timeline, held = count_step(flags, config, env, total)
    micro = largest_micro_batch(timeline, held, share, limit)
    peak = timeline.peak(micro, share, held).total
    why, advice = "the largest that fits", ""
    if peak > limit:
        why = "none fits, memory may run out"
        advice = "; try --activation_checkpointing=True, or --parallel=fsdp on more GPUs"
    memory = f"{peak / 1e9:.1f} GB counted, not compiled, of {limit / 1e9:.1f} GB"
    env.print(f"micro_batch_size {micro} (auto: {why}; {memory}){advice}")
    return micro, share // micro
