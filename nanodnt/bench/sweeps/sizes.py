"""Speed and memory against size: micro batches, width, depth, context."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from nanodnt.bench.measure import available_bytes, free_memory, held_bytes
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import SPEEDS, describe_speed, format_gb, format_ms, format_or_na, print_table
from nanodnt.bench.timing import build, bytes_at_start, measure_ceilings, time_variants
from nanodnt.bench.variants import Variant, our_variant
from nanodnt.engine import prepare_model
from nanodnt.optim import make_optimizer
from nanodnt.plan.memory import Timeline
from nanodnt.plan.strategies import batch_bytes, strategies
from nanodnt.run.hardware import peak_flops
from nanodnt.tables import table
from nanodnt.tasks import task_of


class Limits:
    """Whether a next size may be tried, extrapolated from the sizes so far: (size, step seconds, peak bytes)."""

    def __init__(self, setting: Setting):
        self.setting, self.seen = setting, []

    def refuse(self, size: float) -> str:
        """Why `size` must not be tried, or an empty string."""
        if not self.seen:
            return ""
        (a, t_a, m_a), (b, t_b, m_b) = self.seen[-2:] if len(self.seen) > 1 else [(0, 0.0, None), self.seen[-1]]
        t = t_b * max(size / b, (t_b / t_a) if t_a else 0)
        if t > self.setting.bench.max_step_s:
            return f"a step would take about {t:.0f} s, above max_step_s={self.setting.bench.max_step_s:g}"
        room = self.room()
        if None in (m_a, m_b, room):
            return ""
        peak = m_b + max(0, (m_b - m_a) / (b - a)) * (size - b)
        return f"it would take about {format_gb(peak)} of {format_gb(room)}" if peak > room else ""

    def room(self) -> float | None:
        """Bytes that this process may come to hold; None where that is unknown. An allocation that fails on a GPU does
        no harm, one on a CPU may: a tenth is left."""
        device = self.setting.env.device
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory
        free = available_bytes() if device.type == "cpu" else None
        return None if free is None else 0.9 * (free + held_bytes(device))


def time_alone(setting: Setting, name: str, start: int | None) -> Variant:
    """One variant, built and timed by itself."""
    variant = build(partial(our_variant, name, setting), setting, start)
    time_variants([variant], setting)
    return variant


def try_size(setting: Setting, name: str, size: float, limits: Limits, start: int | None) -> tuple:
    """(the variant, "") of one size of a sweep, or (None, why the sweep ends here)."""
    reason = limits.refuse(size)
    if reason:
        return None, reason
    try:
        variant = time_alone(setting, name, start)
    except (torch.OutOfMemoryError, MemoryError):
        return None, "out of memory"
    except (ValueError, RuntimeError) as e:  # a context longer than the dataset, or the CPU's allocator out of memory
        if isinstance(e, RuntimeError) and "allocate" not in str(e):
            raise
        return None, str(e).splitlines()[0]
    limits.seen.append((size, variant.seconds, variant.memory))
    return variant, ""


def plan_memory(setting: Setting) -> Callable:
    """f(micro batch) → peak bytes of a step, as `model.py --plan` counts them: not compiled."""
    model = task_of(setting.flags).network().empty(setting.flags)
    meta = replace(setting.env, device=torch.device("meta"))
    optimizer = make_optimizer(prepare_model(model, setting.config, meta), setting.config)
    timeline = Timeline(model, optimizer, setting.config, setting.config.activation_checkpointing)
    (strategy,) = strategies(model, optimizer, setting.config, gpus=1)

    def planned(micro):  # the timed step is of one micro batch
        return timeline.peak(micro, False, strategy._replace(batch=batch_bytes(model, micro))).total

    return planned


def time_micro_batches(setting: Setting) -> dict:
    """Time micro batches that divide batch_size, each at least twice the one before, as long as they fit."""
    batch, env, rows, limits = setting.config.batch_size, setting.env, [], Limits(setting)
    first = setting.bench.first_micro_batch
    start, size, reason, planned = bytes_at_start(setting), first, "", plan_memory(setting)
    if batch % first:
        raise ValueError(f"first_micro_batch={first} does not divide batch_size={batch}: change one of them")
    while size and not reason:
        one = setting.replace(micro_batch_size=size, accumulation=1)
        variant, reason = try_size(one, str(size), size, limits, start)
        if variant:
            peak = peak_flops(env.device, variant.dtype, setting.config.peak_flops)
            mfu = variant.flops_per_token * variant.tokens_per_s / peak if peak else None
            row = dict(micro_batch_size=size, tokens_per_s=variant.tokens_per_s, step_s=variant.seconds, mfu=mfu)
            row |= dict(images_per_s=variant.images_per_s)
            row |= dict(peak_mem_bytes=variant.memory, planned_bytes=planned(size), compile_s=variant.compile_s)
            rows.append(row | dict(rounds_s=variant.rounds))
            size = next((m for m in range(2 * size, batch + 1) if batch % m == 0), None)
        del variant
        free_memory(env.device)
    best = max(rows, key=lambda row: row["tokens_per_s"])["micro_batch_size"] if rows else None
    found = dict(micro_batches=rows, fastest=best, not_timed=size, ended_by=reason or "batch_size")
    env.print("\n".join(describe_micro_batches(found)))
    return found


def describe_micro_batches(found: dict) -> list:
    """A table of the micro batches; what ended the sweep; the fastest."""
    rows = found["micro_batches"]
    speeds = SPEEDS[: len(describe_speed(rows[0]))] if rows else SPEEDS[:1]
    lines = [("micro batch", *speeds, "MFU", "ms/step", "memory", "--plan, eager", "memory/plan")]
    for r in rows:
        line = (str(r["micro_batch_size"]), *describe_speed(r), format_or_na(r["mfu"], "{:.1%}".format))
        line += (format_ms(r["step_s"]), format_gb(r["peak_mem_bytes"]), format_gb(r["planned_bytes"]))
        share = None if r["peak_mem_bytes"] is None else r["peak_mem_bytes"] / r["planned_bytes"]
        lines.append((*line, format_or_na(share, "{:.3f}".format)))
    ended = [f"{found['not_timed']} not timed: {found['ended_by']}"] if found["not_timed"] else []
    return [*table(lines), *ended, f"fastest that fits: --micro_batch_size={found['fastest']}"]


def time_sizes(setting: Setting) -> dict:
    """Time a step while width, depth, context (not of images) or micro batch is doubled and the others stay as they
    are. The expected speed is the measured ceiling of matrix products over FLOPs per token."""
    flags, rows = setting.flags, []
    heads = {"n_head": flags.n_head, "n_kv_head": flags.n_kv_head}  # a wider model has more heads of the same size
    axes = {
        "n_embd": {"n_embd": flags.n_embd, "n_ff": flags.n_ff} | heads,
        "n_layer": {"n_layer": flags.n_layer},
        "block_size": {"block_size": flags.block_size},
        "micro_batch_size": {"micro_batch_size": setting.micro, "batch_size": setting.micro},
    }
    if flags.patch_size:
        del axes["block_size"]
    start, fixed = bytes_at_start(setting), dict(micro_batch_size=setting.micro, batch_size=setting.micro)
    lines = [("axis", "value", "tokens/s", "expected", "of expected", "ms/step", "memory", "FLOPs/token")]
    for axis, sizes in axes.items():
        limits = Limits(setting)
        for k in range(setting.bench.doublings + 1):
            changes = {name: value << k for name, value in sizes.items()}
            one = setting.replace(accumulation=1, **fixed | changes)
            variant, reason = try_size(one, axis, changes[axis], limits, start)
            if not variant:
                setting.env.print(f"{axis}={changes[axis]} not timed: {reason}")
                break
            row, line = size_row(variant, one, axis, changes[axis])
            rows.append(row)
            lines.append(line)
            del variant
            free_memory(setting.env.device)
    print_table(setting, lines)
    return dict(scaling=rows)


def size_row(variant: Variant, setting: Setting, axis: str, value: int) -> tuple:
    """(figures, cells of the table) of one size."""
    dtype = setting.env.dtype
    ceiling = measure_ceilings(setting, [dtype])[str(dtype).removeprefix("torch.")]["ffn"]
    expected = ceiling / variant.flops_per_token
    row = dict(
        axis=axis,
        value=value,
        tokens_per_s=variant.tokens_per_s,
        step_s=variant.seconds,
        parameters=variant.parameters,
        flops_per_token=variant.flops_per_token,
        ceiling_flops_per_s=ceiling,
        expected_tokens_per_s=expected,
        of_expected=variant.tokens_per_s / expected,
        peak_mem_bytes=variant.memory,
        rounds_s=variant.rounds,
    )
    line = (axis, str(value), f"{variant.tokens_per_s:,.0f}", f"{expected:,.0f}", f"{row['of_expected']:.1%}")
    line += (format_ms(variant.seconds), format_gb(variant.memory), f"{variant.flops_per_token:,}")
    return row, line
