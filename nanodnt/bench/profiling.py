"""Where the time of a step goes: the costliest kernels, and the time by kind of kernel."""

import re
import time
from functools import partial
from pathlib import Path

import torch

from nanodnt.bench.measure import build, wait_for
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.bench.variants import make_variant
from nanodnt.files import make_folder

STEPS, PRINTED = 3, 25
KINDS = {  # of kernels, on a CPU of operators: the first pattern that is found in the name counts
    "optimizer": "multi_tensor|fused_adam|_foreach",
    "copies": "memcpy|memset|copy_kernel|fillfunctor|aten::(copy_|fill_|zero_)",
    "Triton, elementwise": "triton_(?!tem)|cpp_fused|elementwise|softmax|cross_entropy|reduce_kernel",
    "attention": "attention|sdpa|fmha|flash",
    "products": "gemm|nvjet|cutlass|xmma|splitk|cublas|mkldnn|::(add|b)?mm|triton_tem|product",
    "other": "",
}


def sum_by_kind(kernels: list, step_s: float, idle: bool) -> list:
    """A row for each kind. `kernels`: (name, seconds) in a step of `step_s` seconds. With `idle`
    also one for the time in which no kernel runs, as those of one stream do not overlap."""
    sums = dict.fromkeys(KINDS, 0.0)
    for name, seconds in kernels:
        kind = next(k for k, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
        sums[kind] += seconds
    if idle:
        sums["no kernel runs"] = step_s - sum(sums.values())
    return [
        dict(name=kind, seconds=seconds, share=seconds / step_s) for kind, seconds in sums.items()
    ]


def profile_steps(setting: Setting) -> dict:
    """Write a trace for chrome://tracing or Perfetto, and print what the kernels of a step cost.
    Returns the figures for --json. Under the profiler the host is slower, and so may be the
    step."""
    device = setting.env.device
    cuda = device.type == "cuda"
    kind, of_kernels = (
        ("cuda", "self_device_time_total") if cuda else ("cpu", "self_cpu_time_total")
    )
    variant = build("ours", partial(make_variant, "ours", setting.bench.only, setting), setting)
    activities = {getattr(torch.profiler.ProfilerActivity, name) for name in ("CPU", kind.upper())}
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
    setting.env.print(events.table(f"self_{kind}_time_total", PRINTED, max_name_column_width=70))
    if cuda:  # the calls that start the kernels would count twice
        on_gpu = torch.autograd.DeviceType.CUDA
        events = [e for e in events if e.device_type == on_gpu and not e.is_user_annotation]
    kernels = [(e.key, getattr(e, of_kernels) / 1e6 / STEPS) for e in events]
    kinds = sum_by_kind(kernels, step_s, idle=cuda)
    rows = [
        {"": k["name"], "ms/step": format_ms(k["seconds"]), "share": f"{k['share']:.1%}"}
        for k in kinds
    ]
    setting.env.print("\n".join([*make_table(rows), ""]))
    setting.env.print(f"{STEPS} steps, {format_ms(step_s)} ms each\nwritten: {path}")
    return dict(kinds=kinds, step_s=step_s, trace=str(path), steps=STEPS)
