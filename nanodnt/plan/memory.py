"""Bytes that a training step needs beside weights and optimizer state, counted and not estimated by
formula.

The training step of nanodnt/engine.py runs on the meta device, where tensors have shapes but no
contents. Every storage is counted from the operator that makes it until it is freed. So any layout,
optimizer or loss is counted as it is.
"""

from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanodnt.engine import Trainer, training_step

NEXT_PHASE = dict(forward="backward", backward="clip", clip="optimizer")


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while this mode is on, until they are
    freed.

    `now` is their sum; `count_as_gradient` moves a storage from `now` to `gradients`. After each
    operator a row (phase, gradients, now) is added to `rows`. Storages of before, and views, add
    nothing.

    `dry` is for meta tensors: operators that return nothing (the fused updates of lists of tensors)
    are skipped, and reading a number gives 0. Neither could run on meta tensors, and neither makes
    a storage."""

    def __init__(self, dry: bool = True):
        super().__init__()
        self.dry = dry
        self.storages, self.rows = {}, []
        self.phase = "forward"
        self.now = self.gradients = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.register((args, kwargs), new=False)
        if self.dry and not func._schema.returns:
            return None
        if self.dry and func is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        result = func(*args, **kwargs)
        self.register(result, new=True)
        self.rows.append((self.phase, self.gradients, self.now))
        return result

    def register(self, tree, new: bool) -> None:
        """Note the storages of tensors that are seen for the first time. They count if an operator
        has made them."""
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.storages:
                size = storage.nbytes() if new else 0
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
        self.now -= size
        self.gradients += size


def fused_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False):
    """Attention as one operator. Like a GPU's kernels it keeps q, k, v, the result and one fp32
    number a row; on meta tensors torch would take the plain formula and keep all scores."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal
    )[0]


def trace(model, optimizer, grad_clip: float, checkpointing: bool, micro: int) -> list:
    """Rows (phase, gradients, other bytes) after each operator of a training step of one micro
    batch, and before the loss. The phases are forward, loss, backward, clip, optimizer."""
    model.runtime.checkpointing = checkpointing
    batch, compute_loss = model.example(micro), model.loss
    memory = Memory(dry=batch[0].is_meta)

    def enter_next_phase(phase):
        memory.phase = NEXT_PHASE.get(phase)

    def loss_as_a_phase(*args):
        memory.phase = "loss"
        memory.rows.append(("loss", memory.gradients, memory.now))
        result = compute_loss(*args)
        memory.phase = "forward"
        return result

    hooks = [
        p.register_post_accumulate_grad_hook(memory.count_as_gradient) for p in model.parameters()
    ]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer = Trainer(model, optimizer, scaler, micro, grad_clip, on_phase_end=enter_next_phase)
    with (
        patch.object(F, "scaled_dot_product_attention", fused_attention),
        # so that the optimizer sends no messages
        patch.object(dist, "is_initialized", lambda: False),
        patch.object(model, "loss", loss_as_a_phase),
        memory,
    ):
        training_step(trainer, batch)
    optimizer.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return memory.rows


class Held(NamedTuple):
    """What one process holds, in bytes, besides what a micro batch adds."""

    weights: int
    gradients: int
    state: int
    extra: dict = {}  # further bytes by phase; the phase "reduction" is the end of the last
    #   backward pass
    accumulated: dict = {}  # more than that if an earlier micro batch has left gradients, by phase


class Peak(NamedTuple):
    """The moment when one process holds the most."""

    phase: str
    parts: dict  # the bytes of each part, by the names in --plan's table
    total: int


class StepMemory:
    """The peak of a training step, for any micro batch, with or without activation
    checkpointing."""

    def __init__(self, model, optimizer, config, checkpointing: bool):
        self.trace = cache(partial(trace, model, optimizer, config.grad_clip, checkpointing))
        # inputs and targets are on the device from the step's start
        self.row_bytes = total_bytes(model.example(1))

    def peak(self, micro: int, share: int, held: Held) -> Peak:
        """The moment when the most is held, in a step of `share` rows. If these are more than one
        micro batch, gradients of an earlier one exist from the start."""
        rows = self.trace(micro)
        accumulates = micro < share
        all_gradients = max(gradients for _, gradients, _ in rows)

        def existing_gradients(gradients: int) -> float:
            return held.gradients if accumulates else held.gradients * gradients / all_gradients

        def gathered(phase: str) -> int:
            earlier = held.accumulated.get(phase, 0) if accumulates else 0
            return held.extra.get(phase, 0) + earlier

        def sum_of(row: tuple) -> float:
            phase, gradients, other = row
            return existing_gradients(gradients) + gathered(phase) + other

        phase, gradients, other = max([*rows, ("reduction", all_gradients, 0)], key=sum_of)
        before_loss = next(bytes_then for name, _, bytes_then in rows if name == "loss")
        kept = min(before_loss, other)
        parts = {
            "weights": held.weights,
            "gradients outside buckets": existing_gradients(gradients),
            "optimizer state": held.state,
            "DDP's buckets, FSDP's gathered copies": gathered(phase),
            "kept for the backward": kept,
            "everything else then": other - kept + share * self.row_bytes,
        }
        return Peak(phase, parts, sum(parts.values()))


def total_bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def state_tensors(optimizer) -> list:
    """All tensors of the optimizer's state."""
    return [t for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t)]
