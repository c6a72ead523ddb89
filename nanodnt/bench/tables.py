"""Figures of a benchmark: as plain values for --json, and as printed tables."""

import itertools

import numpy as np
import torch

from nanodnt.bench.settings import Setting
from nanodnt.bench.timing import PARTS, speed_ratio
from nanodnt.bench.variants import Variant
from nanodnt.run.hardware import attention_backend, device_name, peak_flops
from nanodnt.tables import table

SPEEDS = ("tokens/s", "images/s")


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def format_or_na(value, text) -> str:
    """text(value), or n/a for None."""
    return "n/a" if value is None else text(value)


def format_gb(value) -> str:
    """Bytes as GB with the unit, or n/a for None."""
    return format_or_na(value, lambda b: f"{b / 1e9:.3g} GB")


def print_table(setting: Setting, rows: list) -> None:
    """Print rows of texts as aligned columns."""
    setting.env.print("\n".join(table(rows)))


def header(setting: Setting) -> dict:
    """What is measured, and on which machine."""
    flags, config, env = setting.flags, setting.config, setting.env
    full = setting.full_accumulation
    batch = "the whole batch_size" if setting.accumulation == full else f"batch_size={config.batch_size} needs {full}"
    rows = f"{setting.micro} {'images of' if flags.patch_size else '×'} {flags.block_size} tokens"
    return {
        "device": f"{env.device}, {device_name(env.device)}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "attention": attention_backend(flags, env),
        "dtype": str(env.dtype).removeprefix("torch."),
        "compile": config.compile,
        "optimizer": config.optimizer,
        "data": setting.bench.data,
        "step": f"{rows} × {setting.accumulation} accumulation ({batch})",
    }


def figures(variant: Variant, reference: Variant, setting: Setting, ceilings: dict) -> dict:
    """Everything measured of a variant, in plain values."""
    v, flops_per_s = variant, variant.flops_per_token * variant.tokens_per_s
    peak = peak_flops(setting.env.device, v.dtype, setting.config.peak_flops)
    dtype, steps = str(v.dtype).removeprefix("torch."), list(itertools.chain(*v.rounds))
    low, high = np.percentile(steps, (10, 90)).tolist()
    median, least, largest = speed_ratio(v, reference)
    return dict(
        name=v.name,
        dtype=dtype,
        compiled=v.compiled,
        parameters=v.parameters,
        step_tokens=v.tokens,
        tokens_per_s=v.tokens_per_s,
        images_per_s=v.images_per_s,
        step_s=v.seconds,
        step_s_p10=low,
        step_s_p90=high,
        flops_per_s=flops_per_s,
        parts_s=v.parts,
        mfu=flops_per_s / peak if peak else None,
        of_ceiling=flops_per_s / ceilings[dtype]["ffn"],
        peak_mem_bytes=v.memory,
        compile_s=v.compile_s,
        recompilations=v.recompilations,
        rounds_s=v.rounds,
        ratio=median,
        ratio_min=least,
        ratio_max=largest,
        reference=reference.name,
    )


def describe_speed(row: dict) -> tuple:
    """Cells: tokens/s, and of images also images/s."""
    images = row.get("images_per_s")
    return (f"{row['tokens_per_s']:,.0f}", *([] if images is None else [f"{images:,.0f}"]))


def describe_variants(rows: list) -> list:
    """The figures of all variants as two tables: whole steps, and their parts."""
    reference, several = rows[0]["reference"], len(rows) > 1
    head = ("", *SPEEDS[: len(describe_speed(rows[0]))], "ms/step", "10%…90%", "MFU")
    head += ("of ceiling", "memory", "compile s", "recompiled")
    lines = [(*head, f"× {reference} (rounds)") if several else head]
    for r in rows:
        line = [r["name"], *describe_speed(r), format_ms(r["step_s"])]
        line += [f"{format_ms(r['step_s_p10'])}…{format_ms(r['step_s_p90'])}", format_or_na(r["mfu"], "{:.1%}".format)]
        line += [f"{r['of_ceiling']:.1%}", format_gb(r["peak_mem_bytes"])]
        line += [format_or_na(r["compile_s"], "{:.1f}".format), str(r["recompilations"])]
        line += [f"{r['ratio']:.3f} ({r['ratio_min']:.3f}…{r['ratio_max']:.3f})"] if several else []
        lines.append(tuple(line))
    parts = [("ms, waiting after each part", *("forward+loss" if p == "forward" else p for p in PARTS), "sum")]
    for r in rows:
        times = [r["parts_s"][p] for p in PARTS]
        parts.append((r["name"], *map(format_ms, times), format_ms(sum(times))))
    return [*table(lines), "", *table(parts)]


def describe_ceilings(ceilings: dict) -> str:
    """The ceilings as a line."""
    texts = []
    for dtype, parts in ceilings.items():
        texts.append(f"{dtype}: " + ", ".join(f"{part} {x / 1e12:.3g}" for part, x in parts.items()))
    head = "; head: tokens × d × vocabulary" * ("head" in next(iter(ceilings.values())))
    return f"ceiling, TFLOP/s of plain products (ffn: tokens × d × 4d, for “of ceiling”{head}): " + "; ".join(texts)
