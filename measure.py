"""What bench.py measures with: a clock that waits for the device, the process's memory, and figures as text."""

import ctypes
import gc
import itertools
import os
import platform
import statistics
import sys
import time

import torch
from torch._dynamo.utils import counters

clock = time.perf_counter

# ------------------------------------------------------------------------------------------------ clock and memory


def wait(device: torch.device) -> None:
    """Until the accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(run, n: int, device: torch.device) -> list:
    """Seconds of each of n calls. A CUDA device is waited for at the ends alone; its own events lie in between."""
    wait(device)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        wait(device)
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    times = [clock()]
    for _ in range(n):
        run()
        wait(device)
        times.append(clock())
    return [b - a for a, b in itertools.pairwise(times)]


def median_seconds(run, device: torch.device, budget_s: float = 0.5, least: int = 5) -> float:
    """Median seconds of a call, after two untimed ones: at least `least` calls, more within `budget_s`."""
    run()
    (once,) = seconds_of(run, 1, device)
    return statistics.median(seconds_of(run, max(least, min(200, int(budget_s / max(once, 1e-9)))), device))


class Laps:
    """Adds up the seconds between calls by the name of the part that ends, and waits for the device at each."""

    def __init__(self, device: torch.device, parts: tuple):
        self.device, self.seconds = device, dict.fromkeys(parts, 0.0)
        wait(device)
        self.last = clock()

    def __call__(self, part: str) -> None:
        wait(self.device)
        now = clock()
        self.seconds[part], self.last = self.seconds[part] + now - self.last, now


def _line(path: str, name: str) -> int | None:
    """A line of a file in /proc, in bytes; None where there is none."""
    try:
        with open(path) as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(name))
    except (OSError, StopIteration):
        return None


def held_bytes(device: torch.device) -> int | None:
    """Memory held now: allocated on a GPU, resident on a CPU; None where that cannot be known."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        except (OSError, AttributeError):
            pass  # not with this C library
    return _line("/proc/self/status", "VmRSS:")


def peak_bytes(run, device: torch.device) -> int | None:
    """Peak memory while `run()` runs, all that the process holds included; None where that cannot be known."""
    held = held_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif held is not None:
        try:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # the peak counts from here on
        except OSError:
            held = None
    run()
    wait(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return None if held is None else _line("/proc/self/status", "VmHWM:")


def available_bytes() -> int | None:
    """Memory that processes can still have; None where that cannot be known."""
    return _line("/proc/meminfo", "MemAvailable:")


def busy_cores(sample_s: float = 1.0) -> float | None:
    """CPU cores that other processes keep busy, while this one sleeps for a moment; None where that cannot be known.

    (The load average would still count what this machine did a minute ago.)"""

    def spent():
        with open("/proc/stat") as f:
            ticks = [int(t) for t in f.readline().split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all, idle

    try:
        before = spent()
        time.sleep(sample_s)
        total, idle = (b - a for a, b in zip(before, spent(), strict=True))
    except (OSError, ValueError, IndexError):
        return None
    return (1 - idle / total) * (os.cpu_count() or 1) if total else None


def compilations() -> int:
    """Pieces of code that torch.compile has taken up so far in this process."""
    return counters["frames"]["total"]


# ------------------------------------------------------------------------------------------------------------ text


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def or_na(value, text) -> str:
    """text(value), or n/a for None."""
    return "n/a" if value is None else text(value)


def gigabytes(value) -> str:
    return or_na(value, lambda b: f"{b / 1e9:.3g} GB")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
