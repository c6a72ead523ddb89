"""What the benchmarks measure with: a clock that waits for the device, memory, the load of the machine."""

import ctypes
import gc
import itertools
import os
import sys
import time
from collections import Counter

import numpy as np
import torch

clock = time.perf_counter


def wait_for(device: torch.device) -> None:
    """Wait until the accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run, n: int, device: torch.device) -> list:
    """Seconds of each of n calls. On CUDA the host waits only before the first and after the last call; the calls are
    timed by the device's own events."""
    wait_for(device)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
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


def read_bytes(path: str, name: str) -> int | None:
    """The line `name` of a file in /proc, in bytes; None if there is none."""
    try:
        with open(path) as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(name))
    except (OSError, StopIteration):
        return None


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int | None:
    """Memory held now: allocated on a GPU, resident on a CPU; None where that is unknown."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system
    return read_bytes("/proc/self/status", "VmRSS:")


def peak_bytes(run, device: torch.device) -> int | None:
    """Peak memory during `run()`, with everything that the process holds; None where that is unknown."""
    held = held_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif held is not None:
        try:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")  # resets the peak
        except OSError:
            held = None
    run()
    wait_for(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return None if held is None else read_bytes("/proc/self/status", "VmHWM:")


def busy_cores() -> float | None:
    """CPU cores that other processes keep busy while this one sleeps for a second; None where that is unknown. (The
    load average would still count the work of a minute ago.)"""
    ticks = []
    try:
        for pause in (1, 0):
            with open("/proc/stat") as f:
                ticks.append(np.array(f.readline().split()[1:9], float))
            time.sleep(pause)
    except (OSError, ValueError):
        return None
    passed = ticks[1] - ticks[0]
    return float(1 - passed[3:5].sum() / passed.sum()) * os.cpu_count()  # all but idle and waiting for a disk
