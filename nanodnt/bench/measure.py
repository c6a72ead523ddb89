"""Timing of variants. They are built and warmed up, then timed in turns, so that a slow moment of
the machine slows all of them."""

import gc
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant

clock = time.perf_counter
PARTS = ("data", "forward", "backward", "clip", "optimizer")  # parts of a step; forward: with loss


def wait_for(device: torch.device) -> None:
    """Wait until the accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_per_call(run: Callable[[], None], n: int, device: torch.device) -> float:
    """Mean seconds of n calls after an untimed one, which fills the caches. A GPU's queue is not
    empty when the timed calls begin, so launches by the host add nothing to their time."""
    wait_for(device)
    run()
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(n):
            run()
        end.record()
        wait_for(device)
        return start.elapsed_time(end) / 1e3 / n
    wait_for(device)
    began = clock()
    for _ in range(n):
        run()
    wait_for(device)
    return (clock() - began) / n


def seconds_of_phases(
    run: Callable[[Callable[[str], None]], None], device: torch.device
) -> Counter[str]:
    """{phase: seconds} of run(on_phase_end), which calls on_phase_end with the name of each phase
    at its end."""
    wait_for(device)
    seconds = Counter()
    last = clock()

    def on_phase_end(phase: str) -> None:
        nonlocal last
        wait_for(device)
        now = clock()
        seconds[phase] += now - last
        last = now

    run(on_phase_end)
    return seconds


def take_turns(runs: dict[str, Callable[[], None]], setting: Setting) -> dict[str, list[float]]:
    """{name: seconds of a call in each round}. In a round all take turns, in every second round in
    reverse order."""
    seconds = {name: [] for name in runs}
    for i in range(setting.bench.repeats):
        order = list(runs)
        if i % 2 == 1:
            order.reverse()
        for name in order:
            seconds[name].append(seconds_per_call(runs[name], setting.steps, setting.env.device))
    return seconds


def build(name: str, make: Callable[[], Variant], setting: Setting) -> Variant:
    """The Variant that make() returns, compiled and warm; on CUDA with its peak memory. Raises
    ValueError, which names it, if the memory is too small."""
    device = setting.env.device
    cuda = device.type == "cuda"
    gc.collect()
    held_by_others = torch.cuda.memory_allocated(device) if cuda else 0
    try:
        variant = make()
        began = clock()
        variant.run()
        wait_for(device)
        first = clock() - began
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        warm = seconds_per_call(variant.run, setting.bench.warmup, device)
    except (MemoryError, RuntimeError) as e:
        if not is_out_of_memory(e):
            raise
        fix = "time it alone, or with a lower --micro_batch_size"
        raise ValueError(f"{name}: out of memory, which variants share: {fix}") from None
    if cuda:
        variant.memory = torch.cuda.max_memory_allocated(device) - held_by_others
    if variant.compile_s is not None:  # the first call may compile, too
        variant.compile_s += max(0.0, first - warm)
    return variant


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    return bool(re.search("out of memory|can't allocate memory", str(error)))


def time_variants(variants: list[Variant], setting: Setting) -> None:
    """Time whole steps, the variants taking turns; then the parts of their steps. Fills `rounds`
    and `parts`."""
    rounds = take_turns({variant.name: variant.run for variant in variants}, setting)
    for variant in variants:
        variant.rounds = rounds[variant.name]
        steps = [seconds_of_phases(variant.run, setting.env.device) for _ in range(setting.steps)]
        for part in PARTS:
            variant.parts[part] = statistics.median(step[part] for step in steps)


def speed_ratios(variant: Variant, reference: Variant) -> list[float]:
    """tokens/s over the reference's, round by round."""
    scale = variant.tokens / reference.tokens
    return [scale * b / a for a, b in zip(variant.rounds, reference.rounds, strict=True)]


def check_load(setting: Setting) -> list[str]:
    """A warning, if running programs keep more than a quarter of a core busy; on a machine with a
    GPU, half of all cores."""
    allowed = 0.25
    if setting.env.device.type == "cuda":
        allowed = 0.5 * (os.cpu_count() or 1)
    try:
        busy, _, _ = os.getloadavg()
    except OSError:  # unknown on this machine
        return []
    if busy <= allowed:
        return []
    warning = f"warning: {busy:.1f} CPU cores were busy in the last minute"
    return [f"{warning}: if they still are, figures mean little"]
