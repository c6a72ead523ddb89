"""The micro batch of a run: on a GPU the largest whose memory, as counted, fits."""

from dataclasses import replace

import torch

from model import GPTConfig
from nanodnt.engine import prepare_model
from nanodnt.optim import make_optimizer
from nanodnt.plan.memory import Timeline
from nanodnt.plan.strategies import Strategy, make_strategy
from nanodnt.run.hardware import available_bytes, memory_bytes
from nanodnt.tasks import task_of


def largest_micro_batch(timeline: Timeline, strategy: Strategy, share: int, limit: float) -> int:
    """The largest divisor of `share`, the rows of one process, whose peak is within `limit` bytes; else 1."""
    valid = [micro for micro in range(share, 0, -1) if share % micro == 0]
    return next((micro for micro in valid if timeline.peak(micro, micro < share, strategy).total <= limit), 1)


def choose_micro_batch(flags: GPTConfig, config, env, share: int) -> tuple:
    """(micro batch, accumulation steps) on a GPU: the largest divisor of `share`, the rows of one process, that fits;
    it is printed. All ranks must call this, with `env.parallel` set.

    The count is that of `--plan`, of the eager step. Compiled steps take less, so for them it is an upper bound. If not
    even one row fits, it is 1 all the same."""
    limit = env.minimum(available_bytes(env.device))  # so all ranks choose the same
    model = task_of(flags).network().empty(flags)
    prepare_model(model, config, replace(env, device=torch.device("meta")))
    optimizer = make_optimizer(model, config)
    total = env.minimum(memory_bytes(env.device))  # by which FSDP chose what to keep
    held = make_strategy(env.parallel, model, optimizer, config, env.world_size, total)
    timeline = Timeline(model, optimizer, config, config.activation_checkpointing)
    micro = largest_micro_batch(timeline, held, share, limit)
    peak = timeline.peak(micro, micro < share, held).total
    why, advice = "the largest that fits", ""
    if peak > limit:
        why = "none fits, memory may run out"
        advice = "; try --activation_checkpointing=True, or --parallel=fsdp on more GPUs"
    memory = f"{peak / 1e9:.1f} GB counted, not compiled, of {limit / 1e9:.1f} GB"
    env.print(f"micro_batch_size {micro} (auto: {why}; {memory}){advice}")
    return micro, share // micro
