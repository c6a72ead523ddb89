"""Output of a benchmark: the machine, the figures of each variant, tables of them."""

import statistics
from typing import Any

import torch

from nanodnt.bench.measure import PARTS, speed_ratios
from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import Variant
from nanodnt.optim import state_tensors
from nanodnt.plan.memory import total_bytes
from nanodnt.run.hardware import attention_backend, device_name, peak_flops
from nanodnt.run.kernels import choose_kernels
from nanodnt.tables import count, table


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_ms(seconds: float) -> str:
    """Seconds as milliseconds, without the unit."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def header(setting: Setting) -> dict[str, Any]:
    """The machine, and the choices that all variants share: {name: fact}."""
    model_config = setting.model_config
    config = setting.config
    env = setting.env
    kernels = "none (not compiled)"
    if config.compile:
        _, kernels = choose_kernels(config.kernels, env.device, env.dtype)
    batch = "the whole batch_size"
    if setting.accumulation != setting.full_accumulation:
        batch = f"batch_size={config.batch_size} needs {setting.full_accumulation}"
    rows = f"{count(setting.micro, setting.task.row_noun)} of {model_config.block_size} tokens"
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


def figures(variant: Variant, reference: Variant) -> dict[str, Any]:
    """All measurements of a variant, in plain values."""
    setting = variant.setting
    seconds = statistics.median(variant.rounds)
    ratios = speed_ratios(variant, reference)
    flops = variant.model.flops_per_token() * variant.tokens / seconds
    peak = peak_flops(setting.env.device, variant.dtype, setting.config.peak_flops)
    counts = setting.task.step_counts(setting.rows)  # for images: {"images_per_s": images}
    return dict(
        name=variant.name,
        reference=reference.name,
        dtype=dtype_name(variant.dtype),
        parameters=sum(p.numel() for p in variant.model.parameters()),
        step_tokens=variant.tokens,
        batch_size=setting.config.batch_size,
        tokens_per_s=variant.tokens / seconds,
        **{name: n / seconds for name, n in counts.items()},
        step_s=seconds,
        rounds_s=variant.rounds,
        parts_s=variant.parts,
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        flops_per_s=flops,
        mfu=flops / peak if peak else None,
        state_bytes=total_bytes(state_tensors(variant.optimizer)),
        peak_mem_bytes=variant.memory,
        compile_s=variant.compile_s,
    )


def steps_row(row: dict[str, Any]) -> dict[str, str]:
    """A variant's row in the table of whole steps: {title: text}."""
    cells = {"": row["name"], "tokens/s": f"{row['tokens_per_s']:,.0f}"}
    if "images_per_s" in row:
        cells["images/s"] = f"{row['images_per_s']:,.0f}"
    rounds = row["rounds_s"]
    cells["ms/step"] = format_ms(row["step_s"])
    cells["rounds"] = f"{format_ms(min(rounds))}…{format_ms(max(rounds))}"
    mfu = row["mfu"]
    cells["MFU"] = "n/a" if mfu is None else f"{mfu:.1%}"
    memory = row["peak_mem_bytes"]
    cells["memory"] = "n/a" if memory is None else f"{memory / 1e9:.3g} GB"
    compile_s = row["compile_s"]
    cells["compile s"] = "n/a" if compile_s is None else f"{compile_s:.1f}"
    ratios = f"{row['ratio']:.3f} ({row['ratio_min']:.3f}…{row['ratio_max']:.3f})"
    cells[f"× {row['reference']} (rounds)"] = ratios
    return cells


def parts_row(row: dict[str, Any]) -> dict[str, str]:
    """A variant's row in the table of parts: {title: text}."""
    seconds = row["parts_s"]
    cells = {"": row["name"]}
    for part in PARTS:
        title = "forward+loss" if part == "forward" else part
        cells[title] = format_ms(seconds[part])
    cells["sum"] = format_ms(sum(seconds[part] for part in PARTS))
    return cells


def make_table(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a table of rows {title: text}."""
    titles = tuple(rows[0])
    return table([titles, *(tuple(row.values()) for row in rows)])


def describe_variants(rows: list[dict[str, Any]]) -> list[str]:
    """The figures of all variants as two tables: whole steps, and their parts."""
    return [
        *make_table([steps_row(row) for row in rows]),
        "",
        "ms, waiting after each part:",
        *make_table([parts_row(row) for row in rows]),
    ]
