"""Variants of a step, timed side by side."""

import torch

from nanodnt.bench import measure
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import describe_variants, dtype_name, figures, format_gb
from nanodnt.plan.memory import count_step


def compare_variants(makes: dict, setting: Setting, turns: str = "together") -> dict:
    """Build, time and print variants. `makes`: {name: function that returns the Variant}, the first is the reference;
    `turns`: "together", or what `time_in_turn` takes. Returns the figures for --json."""
    start = measure.bytes_at_start(setting)
    if turns == "together":  # they share the memory
        variants, not_timed = [measure.build(make, setting, start) for make in makes.values()], {}
        measure.time_variants(variants, setting)
        rows = [figures(variant, variants[0]) for variant in variants]
    else:
        rows, not_timed = time_in_turn(makes, setting, start, turns == "pairs")
    dtypes = dict.fromkeys([*(row["dtype"] for row in rows), dtype_name(setting.env.dtype), "float32"])
    ceilings = {name: measure.ceilings_of(setting, getattr(torch, name)) for name in dtypes}
    texts = [f"{dtype} {part} {x / 1e12:.3g}" for dtype, parts in ceilings.items() for part, x in parts.items()]
    what = "ffn: tokens × d × 4d, for “of ceiling”" + "; head: tokens × d × vocabulary" * ("head" in texts[-1])
    ceiling = f"ceiling, TFLOP/s of plain products ({what}): {', '.join(texts)}"
    setting.env.print("\n".join([*describe_variants(rows), "", ceiling]))
    return dict(variants=rows, not_timed=not_timed, ceilings_flops_per_s=ceilings)


def time_in_turn(makes: dict, setting: Setting, start: int | None, in_pairs: bool) -> tuple:
    """(rows of figures, {name: why it was not timed}) of one variant after the other. In pairs each takes turns with
    the first, and one that this configuration cannot have is left out; else they are sizes, FLAG=NUMBER, each by
    itself, until memory or max_step_s ends them."""
    makes, rows, not_timed = dict(makes), [], {}
    reference = measure.build(makes.pop(next(iter(makes))), setting, start) if in_pairs else None
    for name, make in makes.items():
        reason = "" if in_pairs else refuse_size(name, rows, setting)
        try:
            if not reason:
                variant = measure.build(make, setting, start)
                measure.time_variants([reference, variant] if in_pairs else [variant], setting)
        except (torch.OutOfMemoryError, MemoryError):
            reason = "out of memory"
        except (ValueError, RuntimeError) as e:  # Mix-LN of one block, a context longer than the data, the CPU's memory
            if isinstance(e, RuntimeError) and "allocate" not in str(e):
                raise
            reason = str(e).splitlines()[0]
        if reason:
            setting.env.print(f"{name} not timed: {reason}")
            not_timed[name] = reason
            if in_pairs:
                continue
            break
        rows.append(figures(variant, reference or variant))
        if not in_pairs:
            s = variant.setting
            timeline, strategy = count_step(s.model_config, s.config, s.env)
            rows[-1]["planned_bytes"] = timeline.peak(s.micro, s.rows, strategy).total  # not compiled
        setting.env.print(f"{name}: {rows[-1]['tokens_per_s']:,.0f} tokens/s")
        del variant
        measure.free_memory(setting.env.device)
    return rows, not_timed


def refuse_size(name: str, rows: list, setting: Setting) -> str:
    """Why FLAG=NUMBER must not be tried, or an empty string: extrapolated from the rows of figures so far."""
    if not rows:
        return ""
    seen = [("=0", 0.0, None), *((row["name"], row["step_s"], row["peak_mem_bytes"]) for row in rows)]
    (a, t_a, m_a), (b, t_b, m_b) = seen[-2:]
    a, b, size = (float(name.partition("=")[2]) for name in (a, b, name))
    t = t_b * max(size / b, (t_b / t_a) if t_a else 0)
    if t > setting.bench.max_step_s:
        return f"a step would take about {t:.0f} s, above max_step_s={setting.bench.max_step_s:g}"
    room = memory_room(setting.env.device)
    if None in (m_a, m_b, room):
        return ""
    peak = m_b + max(0, (m_b - m_a) / (b - a)) * (size - b)
    return f"it would take about {format_gb(peak)} of {format_gb(room)}" if peak > room else ""


def memory_room(device: torch.device) -> float | None:
    """Bytes that this process may come to hold; None where that is unknown. On a CPU a tenth is left: failing harms."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = measure.read_bytes("/proc/meminfo", "MemAvailable:") if device.type == "cpu" else None
    return None if free is None else 0.9 * (free + measure.held_bytes(device))
