"""Variants of a step, timed side by side."""

import gc
import re

import torch

from nanodnt.bench import measure
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import describe_variants, dtype_name, figures
from nanodnt.bench.variants import Variant


def compare_variants(makes: dict, setting: Setting, in_pairs: bool = False) -> dict:
    """Build, time and print variants. `makes`: {name: function that returns the Variant}, the first is the reference.
    They share the memory; `in_pairs` only two at a time. Returns the figures for --json."""
    gc.collect()
    gc.freeze()  # as train.py does: the collector need not walk through what is alive now
    if in_pairs:
        rows, not_timed = time_in_pairs(makes, setting)
    else:
        variants, not_timed = [build(name, make, setting) for name, make in makes.items()], {}
        measure.time_variants(variants, setting)
        rows = [figures(variant, variants[0]) for variant in variants]
    dtypes = dict.fromkeys([*(row["dtype"] for row in rows), dtype_name(setting.env.dtype), "float32"])
    ceilings = {name: measure.ceilings_of(setting, getattr(torch, name)) for name in dtypes}
    texts = [f"{dtype} {part} {x / 1e12:.3g}" for dtype, parts in ceilings.items() for part, x in parts.items()]
    what = "ffn: tokens × d × 4d, for “of ceiling”" + "; head: tokens × d × vocabulary" * ("head" in texts[-1])
    ceiling = f"ceiling, TFLOP/s of plain products ({what}): {', '.join(texts)}"
    setting.env.print("\n".join([*describe_variants(rows), "", ceiling]))
    return dict(variants=rows, not_timed=not_timed, ceilings_flops_per_s=ceilings)


def time_in_pairs(makes: dict, setting: Setting) -> tuple:
    """(rows of figures, {name: why it was not timed}): each variant takes turns with the first. One that this
    configuration cannot have, or for which the memory is too small, is left out."""
    (first, make_reference), *others = makes.items()
    reference = build(first, make_reference, setting)
    rows, not_timed = [], {}
    for name, make in others:
        try:
            variant = build(name, make, setting)
        except ValueError as e:  # Mix-LN of one block, for example
            not_timed[name] = str(e)
            setting.env.print(f"{name} not timed: {e}")
            continue
        measure.time_variants([reference, variant], setting)
        rows.append(figures(variant, reference))
        setting.env.print(f"{name}: {rows[-1]['tokens_per_s']:,.0f} tokens/s")
        del variant
        measure.free_memory(setting.env.device)
    return rows, not_timed


def build(name: str, make, setting: Setting) -> Variant:
    """`measure.build`, with a ValueError that names the variant if the memory is too small."""
    try:
        return measure.build(make, setting)
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RuntimeError) and not re.search("out of memory|can't allocate memory", str(e)):
            raise
        raise ValueError(
            f"{name}: out of memory, which variants share: time it alone, or with a lower --micro_batch_size"
        ) from None
