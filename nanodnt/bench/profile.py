"""A trace of a few steps, and the kernels that cost the most."""

from functools import partial
from pathlib import Path

import torch

from nanodnt.bench.measure import clock, wait_for
from nanodnt.bench.settings import Setting
from nanodnt.bench.timing import build
from nanodnt.bench.variants import our_variant

STEPS, PRINTED = 3, 25  # steps profiled; kernels printed


def profile_steps(setting: Setting) -> dict:
    """Write a trace for chrome://tracing or Perfetto, and print the kernels that cost the most."""
    device, kind = setting.env.device, "cuda" if setting.env.device.type == "cuda" else "cpu"
    variant = build(partial(our_variant, "ours", setting), setting, None)
    activities = {torch.profiler.ProfilerActivity.CPU, getattr(torch.profiler.ProfilerActivity, kind.upper())}
    with torch.profiler.profile(activities=activities) as profiler:
        wait_for(device)
        start = clock()
        for _ in range(STEPS):
            variant.run()
        wait_for(device)
        elapsed = clock() - start
    path = Path(setting.config.out_dir) / "bench" / "trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    events, idle = profiler.key_averages(), None
    setting.env.print(f"{STEPS} steps\n{events.table(f'self_{kind}_time_total', PRINTED, max_name_column_width=70)}")
    if kind == "cuda":  # kernels of one stream do not overlap; the calls that started them would count twice
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
        idle = 1 - sum(e.self_device_time_total for e in kernels) / 1e6 / elapsed
        setting.env.print(f"GPU idle {idle:.1%} of the time, under the profiler")
    setting.env.print(f"written: {path}")
    return dict(gpu_idle=idle, trace=str(path), steps=STEPS)
