"""Profile of a step: the costliest kernels, and the time by kind of kernel."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from nanodnt.bench.measure import build, wait_for
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.bench.variants import make_variant
from nanodnt.files import make_folder

STEPS = 3
PRINTED = 25  # kernels in the table
# {kind of kernels, or on a CPU of operators: pattern of their names}; the first that matches counts
KINDS = {
    "optimizer": "multi_tensor|fused_adam|_foreach",
    "copies": "memcpy|memset|copy_kernel|fillfunctor|aten::(copy_|fill_|zero_)",
    "Triton, elementwise": "triton_(?!tem)|cpp_fused|elementwise|softmax|cross_entropy|"
    "reduce_kernel",
    "attention": "attention|sdpa|fmha|flash",
    "products": "gemm|nvjet|cutlass|xmma|splitk|cublas|mkldnn|::(add|b)?mm|triton_tem|product",
    "other": "",
}


def kind_of_kernel(name: str) -> str:
    matching = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(matching)


def sum_by_kind(
    kernels: list[tuple[str, float]], step_s: float, idle: bool
) -> list[dict[str, Any]]:
    """A row for each kind. `kernels`: (name, seconds) in a step of `step_s` seconds. With `idle`
    also a row for the time in which no kernel runs, since kernels of one stream do not overlap."""
    sums = dict.fromkeys(KINDS, 0.0)
    for name, seconds in kernels:
        sums[kind_of_kernel(name)] += seconds
    if idle:
        sums["no kernel runs"] = step_s - sum(sums.values())
    return [
        dict(name=kind, seconds=seconds, share=seconds / step_s) for kind, seconds in sums.items()
    ]


def profile_steps(setting: Setting) -> dict[str, Any]:
    """Write a trace for chrome://tracing or Perfetto, and print the time of the kernels of a step.
    Returns the figures for --json. Under the profiler the host is slower, and so may be the
    step."""
    device = setting.env.device
    cuda = device.type == "cuda"
    if cuda:
        sort_by = "self_cuda_time_total"
        time_of_kernel = "self_device_time_total"  # an attribute of events
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    else:
        sort_by = "self_cpu_time_total"
        time_of_kernel = sort_by
        activities = [ProfilerActivity.CPU]
    make = partial(make_variant, "ours", setting.bench.only, setting)
    variant = build("ours", make, setting)
    wait_for(device)
    with torch.profiler.profile(activities=activities) as profiler:
        began = time.perf_counter()
        for _ in range(STEPS):
            variant.run()
        wait_for(device)
        step_s = (time.perf_counter() - began) / STEPS
    path = Path(setting.config.out_dir) / "bench" / "trace.json"
    make_folder(path.parent, "--out_dir")
    profiler.export_chrome_trace(str(path))

    events = profiler.key_averages()
    setting.env.print(events.table(sort_by, PRINTED, max_name_column_width=70))
    if cuda:  # the calls that start the kernels would count twice
        on_gpu = torch.autograd.DeviceType.CUDA
        events = [e for e in events if e.device_type == on_gpu and not e.is_user_annotation]
    kernels = [(e.key, getattr(e, time_of_kernel) / 1e6 / STEPS) for e in events]
    kinds = sum_by_kind(kernels, step_s, idle=cuda)
    rows = []
    for kind in kinds:
        ms = format_ms(kind["seconds"])
        rows.append({"": kind["name"], "ms/step": ms, "share": f"{kind['share']:.1%}"})
    setting.env.print("\n".join([*make_table(rows), ""]))
    setting.env.print(f"{STEPS} steps, {format_ms(step_s)} ms each\nwritten: {path}")
    return dict(kinds=kinds, step_s=step_s, trace=str(path), steps=STEPS)
