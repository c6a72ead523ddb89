"""How variants are timed: built and warmed up, then in turns, so that a slow moment of the machine slows all alike. And
what that measures with: a clock that waits for the device, memory, the load of the machine."""

import gc
import itertools
import os
import statistics
import time
from collections import Counter
from functools import lru_cache

import numpy as np
import torch

from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant

clock = time.perf_counter
PARTS = ("data", "forward", "backward", "clip", "optimizer")  # of a step; forward includes the loss


def wait_for(device: torch.device) -> None:
    """Wait until the accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def read_sensors(device: torch.device) -> list[tuple[float, float]]:
    """[(SM clock in MHz, power in W)] of a GPU now; [] where NVML cannot be read."""
    try:
        return [(torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1e3)]
    except Exception:  # any error of the driver's library, which may be missing
        return []


def seconds_of(run, n: int, device: torch.device, readings: list | None = None) -> list:
    """Seconds of each of n calls. On CUDA the host waits before the first and after the last; events time them.
    `readings` gets results of `read_sensors` there."""
    wait_for(device)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        if readings is not None:  # the host has launched everything, so reading delays no step
            readings += read_sensors(device)
        wait_for(device)
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    times = [clock()]
    for _ in range(n):
        run()
        wait_for(device)
        times.append(clock())
    return [b - a for a, b in itertools.pairwise(times)]


def seconds_of_phases(run, device: torch.device) -> Counter:
    """{phase: its seconds} of run(on_phase_end), which calls that with the name of each phase at its end."""
    wait_for(device)
    seconds, last = Counter(), clock()

    def on_phase_end(phase: str) -> None:
        nonlocal last
        wait_for(device)
        now = clock()
        seconds[phase], last = seconds[phase] + now - last, now

    run(on_phase_end)
    return seconds


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def busy_cores() -> float | None:
    """CPU cores that other processes keep busy while this one sleeps for a second; None where that is unknown. (The
    load average would still count the work of a minute ago.)"""
    ticks = []
    try:
        for pause in (1, 0):
            with open("/proc/stat", encoding="utf-8") as f:
                ticks.append(np.array(f.readline().split()[1:9], float))
            time.sleep(pause)
    except (OSError, ValueError):
        return None
    passed = ticks[1] - ticks[0]
    return float(1 - passed[3:5].sum() / passed.sum()) * os.cpu_count()  # all but idle and waiting for a disk


def build(make, setting: Setting) -> Variant:
    """The Variant that make() returns, compiled and warm; on CUDA with its peak memory."""
    device, cuda = setting.env.device, setting.env.device.type == "cuda"
    gc.collect()
    held = torch.cuda.memory_allocated(device) if cuda else 0  # by other variants
    variant = make()
    (first,) = seconds_of(variant.run, 1, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    warm = seconds_of(variant.run, setting.bench.warmup, device)
    if cuda:
        variant.memory = torch.cuda.max_memory_allocated(device) - held
    if variant.compile_s is not None:  # the first call may compile, too
        variant.compile_s += max(0.0, first - statistics.median(warm))
    variant.recompilations = 0
    return variant


def take_turns(runs: dict, setting: Setting) -> tuple:
    """({name: seconds of each timed call, one list per round}, {name: results of `read_sensors` in its rounds}). In a
    round all take turns: a warm call, `steps` timed."""
    seconds, readings, device = {name: [] for name in runs}, {name: [] for name in runs}, setting.env.device
    # On a GPU one more is left out. It starts with an empty queue, so launches by the host add to
    # its time, and to a faster step they add a larger share: it would look slower than it is.
    dropped = 1 if device.type == "cuda" else 0
    for i in range(setting.bench.repeats):
        for name, run in list(runs.items())[:: -1 if i % 2 else 1]:  # every second round in reverse order
            run()  # fills the caches with its own data
            timed = seconds_of(run, dropped + setting.steps, device, readings[name])
            seconds[name].append(timed[dropped:])
    return seconds, readings


def time_variants(variants: list, setting: Setting) -> None:
    """Time whole steps, the variants taking turns; then the parts of their steps. Fills `rounds`,
    `readings` and `parts`."""
    seconds, readings = take_turns({i: variant.run for i, variant in enumerate(variants)}, setting)
    for i, variant in enumerate(variants):
        phases = [seconds_of_phases(variant.run, setting.env.device) for _ in range(setting.steps)]
        variant.parts = {part: statistics.median(one[part] for one in phases) for part in PARTS}
        variant.rounds, variant.readings = seconds[i], readings[i]


def speed_ratio(variant: Variant, reference: Variant) -> tuple:
    """tokens/s over the reference's: (median of the rounds, least, largest)."""
    pairs = zip(variant.rounds, reference.rounds, strict=True)
    scale = variant.tokens / reference.tokens
    ratios = sorted(scale * statistics.median(b) / statistics.median(a) for a, b in pairs)
    return statistics.median(ratios), ratios[0], ratios[-1]


@lru_cache
def measure_ceiling(rows: int, d: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Median FLOP/s of plain products of (rows, d) with (d, width): of at least 5, more within half a second."""
    x, w = (torch.randn(n, d, device=device).to(dtype) for n in (rows, width))
    *_, once = seconds_of(lambda: x @ w.T, 2, device)
    seconds = seconds_of(lambda: x @ w.T, max(5, min(200, int(0.5 / max(once, 1e-9)))), device)
    return 2 * rows * d * width / statistics.median(seconds)


def ceilings_of(setting: Setting, dtype: torch.dtype) -> dict:
    """FLOP/s of plain products at the config's shapes: ffn, tokens × d × 4d; of text also head, tokens × d ×
    vocabulary. The tokens are those of a micro batch, up to 16384."""
    c, rows = setting.model_config, min(setting.micro * setting.model_config.block_size, 16384)  # more change nothing
    widths = dict(ffn=4 * c.n_embd, head=c.padded_vocab_size)
    return {part: measure_ceiling(rows, c.n_embd, n, dtype, setting.env.device) for part, n in widths.items() if n}


def check_load(setting: Setting) -> list:
    """Warnings about other work on the machine: more than a quarter of a core, beside a GPU more than half of all."""
    cuda, cores, problems = setting.env.device.type == "cuda", busy_cores(), []
    if cores is not None and cores > (0.5 * (os.cpu_count() or 1) if cuda else 0.25):
        problems.append(f"other processes keep {cores:.1f} CPU cores busy: figures mean little")
    try:
        if cuda and (use := torch.cuda.utilization(setting.env.device)) > 10:
            problems.append(f"the GPU is busy ({use}% used by others): figures mean little")
    except Exception:  # any error of the driver's library, which may be missing
        problems.append("whether others use the GPU is unknown (pip install nvidia-ml-py)")
    return [f"warning: {problem}" for problem in problems]
