"""What each optimizer costs: its part of a step, its state, its share of an iteration of the whole batch_size."""

from functools import partial

import torch

from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import figures, format_ms
from nanodnt.bench.timing import build, bytes_at_start, measure_ceilings, time_variants
from nanodnt.bench.variants import our_variant
from nanodnt.optim import OPTIMIZERS, RATIOS
from nanodnt.tables import table


def other_optimizer(setting: Setting, name: str) -> Setting:
    """The setting with another optimizer, at that optimizer's defaults."""
    if name == setting.config.optimizer:
        return setting
    unset = dict.fromkeys({knob for optimizer in OPTIMIZERS.values() for knob in optimizer.defaults})
    unset |= dict.fromkeys(["min_lr", *(f"lr_ratio_{block}" for block in RATIOS)])
    return setting.replace(**unset, optimizer=name)


def time_optimizers(setting: Setting) -> dict:
    """Time the step of every optimizer. All train the weights of the first one, so the model is compiled once."""
    variants, models, start = [], (), bytes_at_start(setting)
    for name in OPTIMIZERS:
        other = other_optimizer(setting, name)
        variants.append(build(partial(our_variant, name, other, models), other, start))
        models = variants[-1].models
    time_variants(variants, setting)
    ceilings = measure_ceilings(setting, [setting.env.dtype])
    rows = []
    for v in variants:
        part = v.parts["optimizer"]
        repeated = v.parts["forward"] + v.parts["backward"] + v.parts["data"]  # for every micro batch
        iteration = setting.full_accumulation / setting.accumulation * repeated + v.parts["clip"] + part
        tensors = [t for state in v.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        state_bytes = sum(t.numel() * t.element_size() for t in tensors)
        row = figures(v, variants[0], setting, ceilings)
        row.pop("peak_mem_bytes")  # would count the shared weights only for the first one
        rows.append(row | dict(optimizer_s=part, share=part / iteration, state_bytes=state_bytes))
    found = dict(optimizers=rows, batch_size=setting.config.batch_size, ceilings_flops_per_s=ceilings)
    setting.env.print("\n".join(describe_optimizers(found)))
    return found


def describe_optimizers(found: dict) -> list:
    """A table of the optimizers."""
    head = ("optimizer", "optimizer ms", "step ms", f"share at batch_size={found['batch_size']}", "state", "× adamw")
    lines = [head]
    for r in found["optimizers"]:
        line = (r["name"], format_ms(r["optimizer_s"]), format_ms(r["step_s"]), f"{r['share']:.1%}")
        size = f"{r['state_bytes'] / 1e6:,.1f} MB, {r['state_bytes'] / r['parameters']:.2f}/parameter"
        lines.append((*line, size, f"{r['ratio']:.3f}"))
    return table(lines)
