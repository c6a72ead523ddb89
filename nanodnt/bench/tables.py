"""What a benchmark prints and writes: the machine, the figures of each variant, tables of them."""

import statistics

import torch

from nanodnt.bench.measure import PARTS, speed_ratios
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


def header(setting: Setting) -> dict:
    """What is measured, and on which machine."""
    model_config, config, env = setting.model_config, setting.config, setting.env
    kernels = (
        choose_kernels(config.kernels, env.device, env.dtype)[1]
        if config.compile
        else "none (not compiled)"
    )
    full = setting.full_accumulation
    batch = (
        "the whole batch_size"
        if setting.accumulation == full
        else f"batch_size={config.batch_size} needs {full}"
    )
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
    setting = variant.setting
    seconds = statistics.median(variant.rounds)
    ratios = speed_ratios(variant, reference)
    flops = variant.model.flops_per_token() * variant.tokens / seconds
    peak = peak_flops(setting.env.device, variant.dtype, setting.config.peak_flops)
    return dict(
        name=variant.name,
        reference=reference.name,
        dtype=dtype_name(variant.dtype),
        parameters=sum(p.numel() for p in variant.model.parameters()),
        step_tokens=variant.tokens,
        batch_size=setting.config.batch_size,
        tokens_per_s=variant.tokens / seconds,
        **{name: n / seconds for name, n in setting.task.step_counts(setting.rows).items()},
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


def steps_row(row: dict) -> dict:
    """A variant's row in the table of whole steps: {title: text}."""
    rounds = row["rounds_s"]
    images = {"images/s": f"{row['images_per_s']:,.0f}"} if "images_per_s" in row else {}
    return {
        "": row["name"],
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        **images,
        "ms/step": format_ms(row["step_s"]),
        "rounds": f"{format_ms(min(rounds))}…{format_ms(max(rounds))}",
        "MFU": "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "memory": "n/a"
        if row["peak_mem_bytes"] is None
        else f"{row['peak_mem_bytes'] / 1e9:.3g} GB",
        "compile s": "n/a" if row["compile_s"] is None else f"{row['compile_s']:.1f}",
        f"× {row['reference']} (rounds)": f"{row['ratio']:.3f} ({row['ratio_min']:.3f}…{row['ratio_max']:.3f})",
    }


def parts_row(row: dict) -> dict:
    """A variant's row in the table of parts: {title: text}."""
    parts = {part + ("+loss" if part == "forward" else ""): row["parts_s"][part] for part in PARTS}
    return {
        "": row["name"],
        **{title: format_ms(seconds) for title, seconds in parts.items()},
        "sum": format_ms(sum(parts.values())),
    }


def make_table(rows: list[dict]) -> list[str]:
    """Lines of a table of rows {title: text}."""
    return table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def describe_variants(rows: list[dict]) -> list[str]:
    """The figures of all variants as two tables: whole steps, and their parts."""
    return [
        *make_table([steps_row(row) for row in rows]),
        "",
        "ms, waiting after each part:",
        *make_table([parts_row(row) for row in rows]),
    ]
