"""One optimizer step, one evaluation, and how a batch is split over processes and micro batches."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from layers.scaling import multiplier
from layers.sharding import full_tensor
from model import Transformer
from nanodnt.data import PreparedData
from nanodnt.optim import Optimizer, lr_at
from nanodnt.run.environment import Env, Stop
from nanodnt.settings import TrainConfig
from nanodnt.tasks import Task


class StepResult(NamedTuple):
    """The results of a training step: tensors on the device. The host has not waited for them."""

    loss: Tensor  # (), nats; its mean over the processes is the loss of the step
    grad_norm: Tensor  # (), norm of the gradient before clipping
    found_inf: Tensor  # (), bool: the gradient was not finite, and the step changed nothing


def split_batch(batch_size: int, micro_batch_size: int, world_size: int) -> tuple[int, int]:
    """(micro batch, accumulation steps) of a process; micro_batch_size = 0 takes the largest micro
    batch up to 16. ValueError with valid values nearby."""
    sequences, remainder = divmod(batch_size, world_size)
    if remainder:
        low = sequences * world_size
        near = f"{low} or {low + world_size}" if low else str(world_size)
        raise ValueError(
            f"batch_size={batch_size} cannot be split over {world_size} processes: use {near}"
        )
    valid = [m for m in range(1, sequences + 1) if sequences % m == 0]
    micro = micro_batch_size or max(m for m in valid if m <= 16)
    if micro not in valid:
        nearest = sorted(valid, key=lambda m: abs(m - micro))[:2]
        near = " or ".join(str(m) for m in sorted(nearest))
        share = f"the {sequences} sequences of each process"
        raise ValueError(
            f"micro_batch_size={micro} does not divide {share} "
            f"(batch_size={batch_size} over {world_size}): use {near}"
        )
    return micro, sequences // micro


def choose_stream_dtype(setting: str, env: Env) -> torch.dtype | None:
    """The dtype of the residual stream, None for fp32. auto: bf16 on a GPU, where products are in
    bf16 too. A network on the meta device is planned for a GPU."""
    on_gpu = env.device.type in ("cuda", "meta")
    if setting == "bfloat16" or (setting == "auto" and on_gpu and env.dtype == torch.bfloat16):
        return torch.bfloat16
    return None


def prepare_model(
    model: Transformer, config: TrainConfig, env: Env, device: torch.device | None = None
) -> Transformer:
    """`model` on `device` (None: that of `env`), with dtypes, activation checkpointing and losses
    from `config`."""
    device = device or env.device
    kernels = ()  # eager code has none
    if config.compile:
        from nanodnt.run.kernels import choose_kernels

        kernels = choose_kernels(config.kernels, device, env.dtype).value
    # a larger model's gradients of its routers shrink by this factor
    branch_multiplier = multiplier(model.config, "branch") or 1.0
    return model.to(device).set_runtime(
        compute_dtype=env.dtype,
        stream_dtype=choose_stream_dtype(config.stream_dtype, env),
        kernels=kernels,
        checkpointing=config.activation_checkpointing,
        loss_chunks=config.loss_chunks,
        label_smoothing=config.label_smoothing,
        balance_coef=config.balance_coef * branch_multiplier,
        z_coef=config.z_coef * branch_multiplier,
        loss_scale=torch.ones((), device=device),
    )


def set_learning_rates(optimizer: Optimizer, step: int, config: TrainConfig) -> dict[str, float]:
    """Give every group its LR for the update after `step` steps. Returns {"lr": the base LR,
    "lr_LABEL": a group's}."""
    rates = {"lr": lr_at(step, config)}
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, config, group)
        rates[f"lr_{group['label']}"] = group["lr"]
    return rates


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout as a function of (seed, step, rank): resuming needs no saved state of random
    number generators."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


@dataclass
class Trainer:
    """The parts of a training step."""

    model: Transformer  # its parameters are trained
    optimizer: Optimizer
    scaler: torch.amp.GradScaler  # scaler of the loss, for fp16
    micro: int  # sequences, or images, of a micro batch
    grad_clip: float  # limit on the gradient norm; 0 = none
    # Returns logits and loss: the model, compiled or wrapped for several processes; None = model.
    step_model: Callable | None = None
    # Called with the name of a phase at its end: forward, backward, clip, optimizer.
    on_phase_end: Callable[[str], None] = lambda phase: None
    # Called after the last micro batch if step_model does not average the gradients.
    average_gradients: Callable[[], None] = lambda: None


def training_step(
    trainer: Trainer, batch: tuple[Tensor, ...], targets_per_rank: float | None = None
) -> StepResult:
    """One optimizer step on this process's part of a batch, tensors (rows, …), the second one the
    targets.

    targets_per_rank  number of targets of the whole batch that count (are not −1), divided by the
                      number of processes: so the loss is their mean for any split of the batch.
                      None: all count
    """
    loss = accumulate(trainer, batch, targets_per_rank)
    grad_norm, found_inf = clip(trainer)
    update(trainer)
    return StepResult(loss, grad_norm, found_inf)


def accumulate(
    trainer: Trainer, batch: tuple[Tensor, ...], targets_per_rank: float | None
) -> Tensor:
    """Sum the gradients of all micro batches into p.grad, times the scaler's factor.

    The model's loss is the mean over the targets of a micro batch. It is weighted by their share of
    all targets that count. The routers' losses have no targets: each micro batch has the weight
    1/n, by `loss_scale`. Returns the loss of the batch, ().
    """
    micro_batches = list(zip(*(t.split(trainer.micro) for t in batch), strict=True))
    n = len(micro_batches)
    step_model = trainer.model if trainer.step_model is None else trainer.step_model
    loss = torch.zeros((), device=batch[0].device)
    trainer.model.runtime.loss_scale = trainer.scaler.scale(torch.ones_like(loss)) / n
    # Under DDP p.grad is a view of a bucket. Set to None, it would be allocated anew for the first
    # micro batches, beside the bucket.
    in_buckets = isinstance(step_model, DistributedDataParallel) and n > 1
    trainer.optimizer.zero_grad(set_to_none=not in_buckets)
    for i, micro_batch in enumerate(micro_batches):
        with sync_gradients(step_model, last=i == n - 1):
            divisor = n  # inverse of the micro batch's weight
            if targets_per_rank is not None:
                divisor = targets_per_rank / (micro_batch[1] != -1).sum()
            micro_loss = step_model(*micro_batch)[1] / divisor
            trainer.on_phase_end("forward")
            trainer.scaler.scale(micro_loss).backward()
            trainer.on_phase_end("backward")
        loss += micro_loss.detach()
    trainer.average_gradients()
    return loss


def sync_gradients(model: Callable, last: bool) -> AbstractContextManager:
    """Context of one micro batch. DDP and FSDP average the gradients that they keep only in the
    `last` one."""
    if last or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()


def clip(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """(norm of the gradient, whether it is not finite), tensors (). The optimizer gets both: it
    clips as it reads the gradients, and skips the step on the device if they are not finite.
    (scaler.step would make the host wait.)"""
    optimizer = trainer.optimizer
    trainer.scaler.unscale_(optimizer)
    norm = full_tensor(torch.nn.utils.get_total_norm(optimizer.gradients()))
    optimizer.found_inf = ~norm.isfinite()
    optimizer.grad_scale = None
    if trainer.grad_clip:
        # A divisor, named as in torch's fused kernels. It leaves gradients that are not finite as
        # they are.
        divisor = ((norm + 1e-6) / trainer.grad_clip).clamp(min=1.0)
        optimizer.grad_scale = divisor.masked_fill(optimizer.found_inf, 1.0)
    trainer.on_phase_end("clip")
    return norm, optimizer.found_inf


def update(trainer: Trainer) -> None:
    """Update the parameters, the loss scale, the estimates of σReparam, and rows of unit length."""
    trainer.optimizer.step()
    trainer.scaler.update()
    trainer.model.power_iteration()
    trainer.model.normalise_rows(trainer.optimizer.found_inf)
    trainer.on_phase_end("optimizer")


@torch.no_grad()
def evaluate(
    model: Transformer,
    task: Task,
    data: PreparedData,
    rows: np.ndarray,
    micro: int,
    env: Env,
    stop: Stop,
) -> dict[str, float] | None:
    """{"val_loss": mean loss in nats, and the task's other scores} over the validation rows that
    start at `rows`, split over ranks. None if the run is stopped meanwhile. All ranks must call it.
    The means depend on neither batch size nor ranks."""
    own_rows = rows[env.rank :: env.world_size]
    n_batches = math.ceil(len(rows) / (env.world_size * micro))  # the same on every rank
    totals = 0  # then a tensor: the sum of each score over the targets, and their count
    model.eval()
    with env.console.doing("evaluating, batch", n_batches) as progress:
        for i in range(n_batches):
            batch_rows = own_rows[i * micro : (i + 1) * micro]
            batch = env.put(*env.pin(*data.val_batch(batch_rows, micro)))
            logits, loss = model(*batch)
            count, sums = task.count_scores(logits, loss, batch[1])
            totals = totals + torch.stack((*sums.values(), count))
            progress.done = i + 1
            if stop.agreed(env):
                break
    model.train()
    *totals, count = env.sum(totals).tolist()
    if stop.stopped:
        return None
    means = {name: total / count for name, total in zip(sums, totals, strict=True)}
    return task.finish_scores(means, data.meta)
