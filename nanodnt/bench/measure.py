"""How variants are timed: built and warmed up, then in turns, so that a slow moment of the machine
slows all alike."""

import gc
import os
import re
import statistics
import time
from collections import Counter

import torch

from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant

clock = time.perf_counter
PARTS = ("data", "forward", "backward", "clip", "optimizer")  # of a step; forward includes the loss


def wait_for(device: torch.device) -> None:
    """Wait until the accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_per_call(run, n: int, device: torch.device) -> float:
    """Mean seconds of n calls after an untimed one, which fills the caches. A GPU's queue is not
    empty when the timed calls begin, so launches by the host add nothing to their time."""
    wait_for(device)
    run()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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


def seconds_of_phases(run, device: torch.device) -> Counter:
    """{phase: its seconds} of run(on_phase_end), which calls that with the name of each phase at
    its end."""
    wait_for(device)
    seconds, last = Counter(), clock()

    def on_phase_end(phase: str) -> None:
        nonlocal last
        wait_for(device)
        now = clock()
        seconds[phase] += now - last
        last = now

    run(on_phase_end)
    return seconds


def take_turns(runs: dict, setting: Setting) -> dict:
    """{name: seconds of a call, by round}. In a round all take turns, in every second one in
    reverse order."""
    seconds = {name: [] for name in runs}
    for i in range(setting.bench.repeats):
        order = list(runs) if i % 2 == 0 else list(reversed(runs))
        for name in order:
            seconds[name].append(seconds_per_call(runs[name], setting.steps, setting.env.device))
    return seconds


def build(name: str, make, setting: Setting) -> Variant:
    """The Variant that make() returns, compiled and warm; on CUDA with its peak memory. ValueError,
    which names it, if the memory is too small."""
    device = setting.env.device
    cuda = device.type == "cuda"
    gc.collect()
    held = torch.cuda.memory_allocated(device) if cuda else 0  # by other variants
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
        if isinstance(e, RuntimeError) and not re.search(
            "out of memory|can't allocate memory", str(e)
        ):
            raise
        fix = "time it alone, or with a lower --micro_batch_size"
        raise ValueError(f"{name}: out of memory, which variants share: {fix}") from None
    if cuda:
        variant.memory = torch.cuda.max_memory_allocated(device) - held
    if variant.compile_s is not None:  # the first call may compile, too
        variant.compile_s += max(0.0, first - warm)
    return variant


def time_variants(variants: list[Variant], setting: Setting) -> None:
    """Time whole steps, the variants taking turns; then the parts of their steps. Fills `rounds`
    and `parts`."""
    seconds = take_turns({i: variant.run for i, variant in enumerate(variants)}, setting)
    for i, variant in enumerate(variants):
        phases = [seconds_of_phases(variant.run, setting.env.device) for _ in range(setting.steps)]
        variant.parts = {part: statistics.median(one[part] for one in phases) for part in PARTS}
        variant.rounds = seconds[i]


def speed_ratios(variant: Variant, reference: Variant) -> list[float]:
    """tokens/s over the reference's, round by round."""
    scale = variant.tokens / reference.tokens
    return [scale * b / a for a, b in zip(variant.rounds, reference.rounds, strict=True)]


def check_load(setting: Setting) -> list[str]:
    """A warning if programs that run now keep more than a quarter of a core busy, beside a GPU half
    of all cores."""
    allowed = 0.5 * (os.cpu_count() or 1) if setting.env.device.type == "cuda" else 0.25
    try:
        busy = os.getloadavg()[0]
    except OSError:  # unknown here
        return []
    if busy <= allowed:
        return []
    return [
        f"warning: {busy:.1f} CPU cores were busy in the last minute: if they still are, figures mean little"
    ]
