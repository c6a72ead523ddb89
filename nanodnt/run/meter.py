"""Speed, loss and skipped steps of a run, read from the device at logged steps and checkpoints only."""

import time
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nanodnt.run.hardware import peak_flops, peak_memory_bytes


class Reading(NamedTuple):
    """What the host fetches at a logged step."""

    loss: float  # mean over all processes, nats per token, or image
    grad_norm: float
    skipped: float  # steps skipped in the whole run
    streak: float  # steps being skipped in a row now; not used on the host
    longest_streak: float  # since the last reading


class Meter:
    """Counts skipped steps on the device, and time on the host. Between readings nobody waits for the device."""

    def __init__(self, state, step_tokens: int, step_flops: float, config, env, step_rows: dict):
        self.env, self.step_tokens, self.step_flops = env, step_tokens, step_flops
        self.peak = peak_flops(env.device, env.dtype, config.peak_flops)
        self.counts = torch.tensor([state.skipped, 0.0, 0.0], device=env.device)  # skipped, streak, longest_streak
        self.last_step, self.clock = state.step, time.perf_counter()
        self.step_rows = step_rows  # {field of a row of metrics.jsonl: what a step has of it}

    def count(self, found_inf) -> None:
        """Note whether the step just made was skipped."""
        skipped, streak, longest = self.counts
        streak = (streak + 1) * found_inf
        self.counts = torch.stack((skipped + found_inf, streak, torch.maximum(longest, streak)))

    def skipped(self) -> int:
        """Steps skipped in the whole run. Waits for the device."""
        return int(self.counts[0])

    def read(self, result, step: int) -> tuple:
        """(Reading, seconds per step) since the last reading. Waits for the device. All ranks must call it."""
        loss = self.env.sum(result.loss.clone()) / self.env.world_size
        reading = Reading(*torch.stack((loss, result.grad_norm, *self.counts)).tolist())
        seconds = (time.perf_counter() - self.clock) / (step - self.last_step)
        self.last_step, self.clock, self.counts[2] = step, time.perf_counter(), 0.0
        return reading, seconds

    def row(self, reading: Reading, rates: dict, seconds: float) -> dict:
        """The logged step's fields of metrics.jsonl."""
        row = {"train_loss": reading.loss, **rates, "grad_norm": reading.grad_norm}
        row |= {"skipped_steps": int(reading.skipped), "tokens_per_s": self.step_tokens / seconds}
        row |= {name: count / seconds for name, count in self.step_rows.items()}
        row |= {"peak_mem_bytes": peak_memory_bytes(self.env.device), "mfu": None}
        if self.peak:
            row["mfu"] = self.step_flops / seconds / (self.peak * self.env.world_size)
        return row

    @contextmanager
    def paused(self, wait: bool):
        """Time inside does not count as training. `wait`: for the device first, whose work so far is training."""
        if wait:
            self.env.synchronize()
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start
