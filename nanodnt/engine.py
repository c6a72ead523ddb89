"""One optimizer step, one evaluation, and how a batch is split over processes and micro batches."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from layers.scaling import multiplier
from layers.sharding import full_tensor
from model import Transformer
from nanodnt.optim import Optimizer, lr_at
from nanodnt.run.kernels import choose_kernels


class StepResult(NamedTuple):
    """What a training step returns: tensors on the device, which the host has not waited for."""

    loss: torch.Tensor  # (), nats; its mean over the processes is the loss of the step
    grad_norm: torch.Tensor  # (), before clipping
    found_inf: torch.Tensor  # (), bool: the gradient was not finite, and the step changed nothing


def split_batch(batch_size: int, micro_batch_size: int, world_size: int) -> tuple:
    """(micro batch, accumulation steps) of a process; 0 is the largest up to 16. ValueError with
    valid ones nearby."""
    sequences, rest = divmod(batch_size, world_size)
    if rest:
        low = sequences * world_size
        near = f"{low} or {low + world_size}" if low else str(world_size)
        raise ValueError(
            f"batch_size={batch_size} cannot be split over {world_size} processes: use {near}"
        )
    valid = [m for m in range(1, sequences + 1) if sequences % m == 0]
    micro = micro_batch_size or max(m for m in valid if m <= 16)
    if micro not in valid:
        near = sorted(sorted(valid, key=lambda m: abs(m - micro))[:2])
        share = (
            f"the {sequences} sequences of each process (batch_size={batch_size} over {world_size})"
        )
        raise ValueError(
            f"micro_batch_size={micro} does not divide {share}: use {' or '.join(map(str, near))}"
        )
    return micro, sequences // micro


def choose_stream_dtype(setting: str, env) -> torch.dtype | None:
    """The dtype of the residual stream, None for fp32. auto: bf16 on a GPU, where products are in
    bf16 too. A network on the meta device is planned for a GPU."""
    on_gpu = env.device.type in ("cuda", "meta")
    if setting == "bfloat16" or (setting == "auto" and on_gpu and env.dtype == torch.bfloat16):
        return torch.bfloat16
    return None


def prepare_model(model, config, env, device: torch.device | None = None):
    """`model` on this device (None: that of `env`), computing as configured for the device of
    `env`."""
    device = device or env.device
    # by which the gradients of the routers' weights shrink
    follow = multiplier(model.config, "branch") or 1.0
    return model.to(device).set_runtime(
        compute_dtype=env.dtype,
        stream_dtype=choose_stream_dtype(config.stream_dtype, env),
        # eager code has none
        kernels=choose_kernels(config.kernels, device, env.dtype)[0] if config.compile else (),
        checkpointing=config.activation_checkpointing,
        loss_chunks=config.loss_chunks,
        label_smoothing=config.label_smoothing,
        balance_coef=config.balance_coef * follow,
        z_coef=config.z_coef * follow,
        loss_scale=torch.ones((), device=device),
    )


def set_learning_rates(optimizer, step: int, config) -> dict:
    """Give every group its LR for the update after `step` steps. Returns {"lr": the base LR,
    "lr_LABEL": a group's}."""
    rates = {"lr": lr_at(step, config)}
    for group in optimizer.param_groups:
        group["lr"] = rates[f"lr_{group['label']}"] = lr_at(step, config, group)
    return rates


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout as a function of (seed, step, rank): resuming needs no saved state of random
    number generators."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


@dataclass
class Trainer:
    """What a training step uses."""

    model: Transformer  # whose parameters are trained
    optimizer: Optimizer
    scaler: torch.amp.GradScaler  # of the loss, for fp16
    micro: int  # sequences, or images, of a micro batch
    grad_clip: float  # limit on the gradient norm; 0 = none
    step_model: Callable | None = None  # what is called: the model compiled, wrapped for several
    #   processes; None: model
    on_phase_end: Callable = lambda phase: None  # called after forward and backward of micro
    #   batches, clip, optimizer
    average_gradients: Callable = lambda: None  # called after the last micro batch, where
    #   step_model does not average


def training_step(trainer: Trainer, batch, targets_per_rank: float | None = None) -> StepResult:
    """One optimizer step on this process's part of a batch, tensors (rows, …), the second one the
    targets.

    `targets_per_rank`: how many targets of the whole batch count (are not −1), divided by the
    number of processes, so that the loss is their mean however the batch is split; None: all do."""
    loss = accumulate(trainer, batch, targets_per_rank)
    return StepResult(loss, *update(trainer))


def accumulate(trainer: Trainer, batch, targets_per_rank: float | None) -> torch.Tensor:
    """Sum the gradients of all micro batches into p.grad, times the scaler's factor. Returns the
    loss of the batch, (). The model's loss is a mean over the targets of its micro batch; here it
    is weighted by their share of all targets that count. The routers' losses have no targets: each
    micro batch weighs 1/n, by `loss_scale`."""
    micro_batches = list(zip(*(t.split(trainer.micro) for t in batch), strict=True))
    n = len(micro_batches)
    step_model = trainer.model if trainer.step_model is None else trainer.step_model
    loss = torch.zeros((), device=batch[0].device)
    trainer.model.runtime.loss_scale = trainer.scaler.scale(torch.ones_like(loss)) / n
    # DDP's buckets hold the gradients of earlier micro batches; dropped, these would be held twice
    in_buckets = isinstance(step_model, DistributedDataParallel) and n > 1
    trainer.optimizer.zero_grad(set_to_none=not in_buckets)
    for i, micro_batch in enumerate(micro_batches):
        with sync_gradients(step_model, i == n - 1):
            divisor = (
                n if targets_per_rank is None else targets_per_rank / (micro_batch[1] != -1).sum()
            )
            micro_loss = step_model(*micro_batch)[1] / divisor
            trainer.on_phase_end("forward")
            trainer.scaler.scale(micro_loss).backward()
            trainer.on_phase_end("backward")
        loss += micro_loss.detach()
    trainer.average_gradients()
    return loss


def sync_gradients(model, last: bool):
    """Context of one micro batch. DDP and FSDP average the gradients that they keep only in the
    `last` one."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def update(trainer: Trainer) -> tuple:
    """Update the parameters, the loss scale, and the estimates of σReparam. Returns (norm of the
    gradient, whether it is not finite), tensors (). The optimizer gets both: it clips as it reads
    the gradients, and skips the step on the device if they are not finite. (scaler.step would make
    the host wait.)"""
    optimizer = trainer.optimizer
    trainer.scaler.unscale_(optimizer)
    norm = full_tensor(torch.nn.utils.get_total_norm(optimizer.gradients()))
    found_inf = ~norm.isfinite()
    optimizer.found_inf, optimizer.grad_scale = found_inf, None
    if trainer.grad_clip:
        # a divisor, named as in torch's fused kernels; gradients that are not finite stay as they
        # are
        optimizer.grad_scale = (
            ((norm + 1e-6) / trainer.grad_clip).clamp(min=1.0).masked_fill(found_inf, 1.0)
        )
    trainer.on_phase_end("clip")
    optimizer.step()
    trainer.scaler.update()
    trainer.model.power_iteration()
    trainer.on_phase_end("optimizer")
    return norm, found_inf


@torch.no_grad()
def evaluate(model, task, data, config, micro: int, env, stop) -> dict | None:
    """{"val_loss": mean loss in nats, and what else the task scores} over the fixed validation
    rows, split over ranks. None if the run is stopped meanwhile. All ranks must call it. The means
    depend on neither batch size nor ranks."""
    rows = data.validation(config.eval_tokens)
    own_rows = rows[env.rank :: env.world_size]
    totals, stopped = 0, False
    model.eval()
    for i in range(math.ceil(len(rows) / (env.world_size * micro))):  # as often on every rank
        batch = env.put(*env.pin(*data.val_batch(own_rows[i * micro : (i + 1) * micro], micro)))
        count, sums = task.count_scores(*model(*batch), batch[1])
        totals = totals + torch.stack((*sums.values(), count))
        if stopped := stop.agreed(env):
            break
    model.train()
    *totals, count = env.sum(totals).tolist()
    if stopped:
        return None
    return task.finish_scores(
        {name: total / count for name, total in zip(sums, totals, strict=True)}, data.meta
    )
