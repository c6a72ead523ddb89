"""Figures of a benchmark: as plain values for --json, and as printed tables."""

import itertools

import numpy as np
import torch

from nanodnt.bench.measure import PARTS, ceilings_of, speed_ratio
from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant
from nanodnt.plan.memory import state_tensors, total_bytes
from nanodnt.run.hardware import attention_backend, device_name, peak_flops
from nanodnt.run.kernels import choose_kernels
from nanodnt.tables import table


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def format_or_na(value, form: str = "{:.1%}") -> str:
    """The value as the form says, or n/a for None."""
    return "n/a" if value is None else form.format(value)


def format_gb(value) -> str:
    return format_or_na(value and value / 1e9, "{:.3g} GB")


def header(setting: Setting) -> dict:
    """What is measured, and on which machine."""
    model_config, config, env = setting.model_config, setting.config, setting.env
    kernels = choose_kernels(config.kernels, env.device, env.dtype)[1] if config.compile else "none (not compiled)"
    full = setting.full_accumulation
    batch = "the whole batch_size" if setting.accumulation == full else f"batch_size={config.batch_size} needs {full}"
    rows = f"{setting.micro} {setting.task.row_noun} of {model_config.block_size} tokens"
    return {
        "device": f"{env.device}, {device_name(env.device)}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "attention": attention_backend(model_config, env),
        "dtype": dtype_name(env.dtype),
        "compile": config.compile,
        "kernels": kernels,
        "optimizer": config.optimizer,
        "data": setting.bench.data,
        "step": f"{rows} × {setting.accumulation} accumulation ({batch})",
    }


def figures(variant: Variant, reference: Variant) -> dict:
    """Everything measured of a variant, in plain values."""
    v, setting, parts = variant, variant.setting, variant.parts
    row = dict(name=v.name, dtype=dtype_name(v.dtype), compiled=v.compile_s is not None)
    flops_per_token = v.model.flops_per_token()
    row |= dict(parameters=v.model.num_params(), flops_per_token=flops_per_token)
    row |= dict(step_tokens=v.tokens, batch_size=setting.config.batch_size)

    low, seconds, high = np.percentile(list(itertools.chain(*v.rounds)), (10, 50, 90)).tolist()
    row |= dict(tokens_per_s=v.tokens / seconds, images_per_s=None)
    row |= {name: n / seconds for name, n in setting.task.step_counts(setting.rows).items()}
    row |= dict(step_s=seconds, step_s_p10=low, step_s_p90=high, rounds_s=v.rounds, parts_s=parts)
    median, least, largest = speed_ratio(v, reference)
    row |= dict(ratio=median, ratio_min=least, ratio_max=largest, reference=reference.name)

    clock, power = np.median(v.readings, axis=0).tolist() if v.readings else (None, None)
    row |= dict(sm_clock_mhz=clock, power_w=power)

    flops, ceiling = flops_per_token * row["tokens_per_s"], ceilings_of(setting, v.dtype)["ffn"]
    peak = peak_flops(setting.env.device, v.dtype, setting.config.peak_flops)
    row |= dict(flops_per_s=flops, ceiling_flops_per_s=ceiling, of_ceiling=flops / ceiling)
    row |= dict(mfu=flops / peak if peak else None)

    micro_batches = setting.full_accumulation / setting.accumulation  # of an iteration, for each that was timed
    iteration = micro_batches * (parts["data"] + parts["forward"] + parts["backward"])
    share = parts["optimizer"] / (iteration + parts["clip"] + parts["optimizer"])
    row |= dict(optimizer_share=share, state_bytes=total_bytes(state_tensors(v.optimizer)))
    return row | dict(peak_mem_bytes=v.memory, compile_s=v.compile_s, recompilations=v.recompilations)


COLUMNS = {  # of the table of whole steps: title: text of a row of figures
    "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
    "images/s": lambda r: f"{r['images_per_s']:,.0f}",
    "ms/step": lambda r: format_ms(r["step_s"]),
    "10%…90%": lambda r: f"{format_ms(r['step_s_p10'])}…{format_ms(r['step_s_p90'])}",
    "MFU": lambda r: format_or_na(r["mfu"]),
    "SM clock": lambda r: format_or_na(r["sm_clock_mhz"], "{:,.0f} MHz"),
    "power": lambda r: format_or_na(r["power_w"], "{:.0f} W"),
    "of ceiling": lambda r: f"{r['of_ceiling']:.1%}",
    "memory": lambda r: format_gb(r["peak_mem_bytes"]),
    "tokens/step": lambda r: f"{r['step_tokens']:,}",
    "FLOPs/token": lambda r: f"{r['flops_per_token']:,}",
    "compile s": lambda r: format_or_na(r["compile_s"], "{:.1f}"),
    "recompiled": lambda r: str(r["recompilations"]),
}


def make_table(rows: list, columns: dict) -> list:
    """Lines: a row for each of `rows`, its name first. `columns`: {title: text of a row}."""
    return table([("", *columns)] + [(r["name"], *(text(r) for text in columns.values())) for r in rows])


def describe_variants(rows: list) -> list:
    """The figures of all variants as two tables: whole steps, and their parts."""
    if not rows:
        return ["nothing was timed"]
    first = rows[0]
    absent = {"images/s": first["images_per_s"] is None}
    absent |= dict.fromkeys(["SM clock", "power"], not torch.cuda.is_available())
    for title, name in (("tokens/step", "step_tokens"), ("FLOPs/token", "flops_per_token")):
        absent[title] = len({r[name] for r in rows}) == 1
    columns = {title: text for title, text in COLUMNS.items() if not absent.get(title)}
    if any(r["name"] != r["reference"] for r in rows):
        title = f"× {first['reference']} (rounds)"
        columns[title] = lambda r: f"{r['ratio']:.3f} ({r['ratio_min']:.3f}…{r['ratio_max']:.3f})"
    parts = {p + "+loss" * (p == "forward"): lambda r, p=p: format_ms(r["parts_s"][p]) for p in PARTS}
    parts["sum"] = lambda r: format_ms(sum(r["parts_s"].values()))
    parts[f"optimizer's share at batch_size={first['batch_size']}"] = lambda r: f"{r['optimizer_share']:.2%}"
    parts["its state"] = lambda r: f"{r['state_bytes'] / 1e6:,.1f} MB"
    return [*make_table(rows, columns), "", "ms, waiting after each part:", *make_table(rows, parts)]
