"""Variants side by side: several configurations, or nanoGPT's step and ours."""

from functools import partial

import torch

from nanodnt.bench import nanogpt
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import describe_ceilings, describe_variants, figures
from nanodnt.bench.timing import build, bytes_at_start, measure_ceilings, time_variants
from nanodnt.bench.variants import nanogpt_variant, our_variant


def compare_variants(makes: list, setting: Setting) -> dict:
    """Build, time and print the variants that `makes`, functions without arguments, return. The first variant is the
    reference. Returns the figures for --json."""
    start = bytes_at_start(setting)
    variants = [build(make, setting, start) for make in makes]
    time_variants(variants, setting)
    ceilings = measure_ceilings(setting, [*(v.dtype for v in variants), setting.env.dtype, torch.float32])
    rows = [figures(v, variants[0], setting, ceilings) for v in variants]
    work = [v.flops_per_token for v in variants]
    if max(work) > 1.01 * min(work):
        texts = ", ".join(sorted({f"{flops / 1e9:.3g} GFLOPs" for flops in work}))
        setting.env.print(f"note: the variants differ in work per token ({texts}): ratios say little")
    setting.env.print("\n".join([*describe_variants(rows), "", describe_ceilings(ceilings)]))
    return dict(variants=rows, ceilings_flops_per_s=ceilings)


def variants_beside_nanogpt(setting: Setting) -> list:
    """What to time for --variant, as functions: nanoGPT's step, the reference, and ours."""
    kinds = list(nanogpt.KINDS) if setting.bench.variant == "nanogpt-all" else [setting.bench.variant]
    if setting.env.device.type == "cuda" and "nanogpt-bf16" in kinds:
        setting.env.print("nanogpt-bf16 is the same as nanogpt on a GPU: left out")
        kinds = [kind for kind in kinds if kind != "nanogpt-bf16"] or ["nanogpt"]
    return [*(partial(nanogpt_variant, kind, setting) for kind in kinds), partial(our_variant, "ours", setting)]
