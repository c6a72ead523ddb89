"""Bytes that a training step needs beside weights and optimizer state, counted and not estimated by
formula.

The training step of nanodnt/engine.py runs on the meta device, where tensors have shapes but no
contents. Every storage is counted from the operator that makes it until it is freed. So any layout,
optimizer or loss is counted as it is.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import Transformer
from nanodnt.engine import Trainer, training_step

NEXT_PHASE = dict(forward="backward", backward="clip", clip="optimizer")


class Row(NamedTuple):
    """Bytes after one operator of a step."""

    phase: str  # forward, loss, backward, clip, optimizer
    gradients: int
    other: int


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while this mode is on, until they are
    freed.

    `now` is their sum; `count_as_gradient` moves a storage from `now` to `gradients`. After each
    operator a Row is added to `rows`. Storages that existed before, and views, add nothing.

    `dry` is for meta tensors: operators that return nothing (the fused updates of lists of tensors)
    are skipped, and reading a number gives 0. Neither could run on meta tensors, and neither makes
    a storage."""

    def __init__(self, dry: bool = True):
        super().__init__()
        self.dry = dry
        self.storages = {}  # {key: (weak reference, bytes)}
        self.rows: list[Row] = []
        self.phase = "forward"
        self.now = 0
        self.gradients = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.register((args, kwargs), new=False)
        if self.dry and not func._schema.returns:
            return None
        if self.dry and func is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        result = func(*args, **kwargs)
        self.register(result, new=True)
        self.add_row()
        return result

    def add_row(self) -> None:
        self.rows.append(Row(self.phase, self.gradients, self.now))

    def register(self, tree: Any, new: bool) -> None:
        """Note the storages of tensors that are seen for the first time. They count if they are
        `new`: made by an operator."""
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.storages:
                continue
            size = storage.nbytes() if new else 0
            self.storages[key] = ref(storage, partial(self.forget, key)), size
            self.now += size

    def forget(self, key: int, _: Any) -> None:
        """Stop counting a storage that was freed."""
        _, size = self.storages.pop(key)
        self.now -= size

    def count_as_gradient(self, p: Tensor) -> None:
        """Count the storage of p.grad among the gradients from here on."""
        key = p.grad.untyped_storage()._cdata
        reference, size = self.storages[key]
        self.storages[key] = reference, 0
        self.now -= size
        self.gradients += size


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as one operator. Like a GPU's kernels it keeps q, k, v, the result and one fp32
    number a row; on meta tensors torch would take the plain formula and keep all scores."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(q, k, v, dropout_p, is_causal)[0]


def trace(
    model: Transformer, optimizer: Optimizer, grad_clip: float, checkpointing: bool, micro: int
) -> list[Row]:
    """The rows of a training step of one micro batch, of `micro` rows: one after each operator, and
    one before the loss."""
    model.runtime.checkpointing = checkpointing
    batch = model.example(micro)
    compute_loss = model.loss
    memory = Memory(dry=batch[0].is_meta)

    def enter_next_phase(phase: str) -> None:
        memory.phase = NEXT_PHASE.get(phase)

    def loss_as_a_phase(*args: Any) -> Tensor:
        memory.phase = "loss"
        memory.add_row()
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
    """Bytes of one process, without those that a micro batch adds."""

    weights: int
    gradients: int
    state: int
    # {phase: further bytes}; the phase "reduction" is the end of the last backward pass
    extra: dict[str, int] = {}
    # {phase: bytes on top of `extra` if an earlier micro batch has left gradients}
    accumulated: dict[str, int] = {}


class Peak(NamedTuple):
    """The moment when one process holds the most bytes."""

    phase: str
    parts: dict[str, float]  # {part, as --plan's table names it: bytes}
    total: float


class StepMemory:
    """The peak of a training step, for any micro batch, with or without activation
    checkpointing."""

    def __init__(
        self, model: Transformer, optimizer: Optimizer, grad_clip: float, checkpointing: bool
    ):
        self.checkpointing = checkpointing
        self.trace = cache(partial(trace, model, optimizer, grad_clip, checkpointing))
        # inputs and targets are on the device from the step's start
        self.row_bytes = total_bytes(model.example(1))

    def peak(self, micro: int, share: int, held: Held) -> Peak:
        """The peak of a step of `share` rows, `micro` at a time. If these are several micro
        batches, gradients of an earlier one exist from the start."""
        rows = self.trace(micro)
        accumulates = micro < share
        all_gradients = max(row.gradients for row in rows)

        def existing_gradients(row: Row) -> float:
            if accumulates:
                return held.gradients
            return held.gradients * row.gradients / all_gradients

        def gathered(row: Row) -> int:
            size = held.extra.get(row.phase, 0)
            if accumulates:
                size += held.accumulated.get(row.phase, 0)
            return size

        def total(row: Row) -> float:
            return existing_gradients(row) + gathered(row) + row.other

        reduction = Row("reduction", all_gradients, 0)
        highest = max([*rows, reduction], key=total)
        before_loss = next(row.other for row in rows if row.phase == "loss")
        kept = min(before_loss, highest.other)
        parts = {
            "weights": held.weights,
            "gradients outside buckets": existing_gradients(highest),
            "optimizer state": held.state,
            "DDP's buckets, FSDP's gathered copies": gathered(highest),
            "kept for the backward": kept,
            "everything else then": highest.other - kept + share * self.row_bytes,
        }
        return Peak(highest.phase, parts, sum(parts.values()))


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
