"""A trace of a few steps, and the kernels that cost the most."""

from functools import partial
from pathlib import Path

import torch

from nanodnt.bench.measure import clock, wait_for
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, print_table
from nanodnt.bench.timing import build
from nanodnt.bench.variants import our_variant

STEPS, PRINTED = 3, 25  # steps profiled; kernels printed


def profile_steps(setting: Setting) -> dict:
    """Write a trace for chrome://tracing or Perfetto, and print the kernels that cost the most."""
    device, cuda = setting.env.device, setting.env.device.type == "cuda"
    variant = build(partial(our_variant, "ours", setting), setting, None)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profiler:
        wait_for(device)
        start = clock()
        for _ in range(STEPS):
            variant.run()
        wait_for(device)
        elapsed = clock() - start
    path = Path(setting.bench.trace or Path(setting.config.out_dir) / "bench" / "trace.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    rows, total = kernel_rows(profiler, cuda)
    lines = [("kernel", "calls/step", "ms/step", "share")]
    for r in rows[:PRINTED]:
        lines.append((r["name"][:70], f"{r['calls']:.0f}", format_ms(r["seconds"]), f"{r['share']:.1%}"))
    print_table(setting, lines)
    idle = 1 - total / elapsed if cuda else None  # kernels of one stream do not overlap
    if idle is not None:
        setting.env.print(f"GPU idle {idle:.1%} of the time, under the profiler")
    setting.env.print(f"written: {path}")
    return dict(kernels=rows, gpu_idle=idle, trace=str(path), steps=STEPS)


def kernel_rows(profiler, cuda: bool) -> tuple:
    """(figures per step of each kernel, the costliest first; seconds of all kernels in all steps)."""
    events = profiler.key_averages()
    if cuda:  # only the kernels: the calls that started them would be counted twice
        events = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    cost = {e: (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e6 for e in events}
    total, rows = sum(cost.values()), []
    for e in sorted(cost, key=cost.get, reverse=True):
        rows.append(dict(name=e.key, calls=e.count / STEPS, seconds=cost[e] / STEPS, share=cost[e] / total))
    return rows, total
