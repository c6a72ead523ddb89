"""Norms of parameters, norm slots, DyT and scale vectors, measured and drawn: after Blockwise LR
(arXiv 2502.19002), DyT (2503.10622) and scale vectors (2605.26895). Questions that the papers leave
open, and our choices: docs/analysis.md."""

import math
from collections.abc import Iterable
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from layers.ops import upcast
from layers.slot import Slot
from model import Transformer
from nanodnt.run.tracking import gain_vectors, joint_gain, matrix_types, smallest_row
from studies.analysis.figure import (
    TYPE_COLORS,
    Measured,
    NotApplicable,
    Panel,
    PanelRows,
    by_block,
    line,
    over_steps,
    register,
    shades,
)
from studies.analysis.gradients import Tensors, Types, pool_by_type, trained_parameters
from studies.analysis.runs import WINDOW, Batch, Batches, CheckpointedRun, pick_evenly
from studies.analysis.streams import walk

# the numbers of measure_norms in each panel
LINES = {"FFN": ("mlp_gain", "w1", "w2"), "attention": ("attn_gain", "q", "k", "v", "o")}
SMALLEST_ROW = "smallest row of the embedding,\nand the norm after it"  # title of a panel


def norms_by_type(parameters: Tensors, types: Types) -> dict[str, float]:
    """{type: L2 norm of all its parameters as one vector}."""
    pooled = pool_by_type(parameters, types)
    return {kind: torch.linalg.vector_norm(v).item() for kind, v in pooled.items()}


@torch.no_grad()
def measure_norms(
    model: Transformer, batches: None = None, run: CheckpointedRun | None = None
) -> Measured:
    """{"types": `norms_by_type` of the block types; "blocks": {a type of `matrix_types`: ‖W‖ of a
    block's matrices as one; "attn_gain", "mlp_gain": ‖γ‖ of the branch}, lists [L] (Blockwise LR
    Fig. 6 a, b); "embedding": the numbers of `smallest_row`}."""
    types = matrix_types(model)
    blocks = []
    for i, block in enumerate(model.blocks):
        norms = norms_by_type(dict(block.named_parameters(prefix=f"blocks.{i}")), types)
        norms["attn_gain"] = float(joint_gain(block.attn))
        norms["mlp_gain"] = float(joint_gain(block.mlp))
        blocks.append(norms)
    return {
        "types": norms_by_type(trained_parameters(model), model.block_types()),
        "blocks": {kind: [norms[kind] for norms in blocks] for kind in blocks[0]},
        "embedding": {key: float(value) for key, value in smallest_row(model).items()},
    }


@register("norms", measure_norms, over_training=True)
def draw_norms(measured: list[Measured]) -> PanelRows:
    """Norms of the parameters: by block, of the embedding's rows, by type (Blockwise LR, Fig.
    6)."""
    last = measured[-1]
    panels = []
    for branch, keys in LINES.items():
        lines = [by_block(last["blocks"][key], label=key) for key in keys]
        panels.append(Panel(f"{branch}, at the end", "block", lines, "‖W‖, ‖γ‖", by_run=True))
    types = []
    for kind in TYPE_COLORS:
        if kind in last["types"]:
            types.append(over_steps(measured, [m["types"][kind] for m in measured], label=kind))
    panels.append(Panel("all parameters of a type", "step", types, by_run=True))
    if last["embedding"]:  # images have none
        rows = [m["embedding"]["rows"] * m["embedding"]["smallest"] for m in measured]
        gains = [m["embedding"]["gain"] ** 2 for m in measured]
        lines = [
            over_steps(measured, rows, label="d · min ‖w̃‖²"),
            over_steps(measured, gains, label="‖γ‖²"),
        ]
        panels.append(Panel(SMALLEST_ROW, "step", lines, log="y", by_run=True))
    return [panels]


def norm_slots(model: Transformer) -> dict[str, Slot]:
    """{name: slot} of every norm on the residual path, in the order of the forward; QK-norm and DNP
    are not on it."""
    names = ["input_norm"]
    for i, branch in product(range(len(model.blocks)), ("attn", "mlp")):
        names += [f"blocks.{i}.{branch}.{place}" for place in ("pre", "mid", "post")]
    names.append("final_norm")
    slots = {name: model.get_submodule(name) for name in names}
    return {name: slot for name, slot in slots.items() if slot.norm_kind != "none"}


def short_slot(slot: str, block: bool = True) -> str:
    """A slot's name for a legend: blocks.3.attn.f.q_norm → 4 attn q_norm, or without `block` attn
    q_norm, which is the same in all blocks."""
    parts = [part for part in slot.split(".") if part != "f"]
    if parts[0] != "blocks":
        return slot
    words = parts[2:]
    if block:
        words.insert(0, str(int(parts[1]) + 1))
    return " ".join(words)


@torch.no_grad()
def measure_alpha(
    model: Transformer, batches: Iterable[Batch], run: CheckpointedRun | None = None
) -> Measured:
    """{"slots": [{"slot": name, "alpha": α, "inv_std": 1 / std over all elements of its input}] of
    every DyT, in the order of the forward, "pearson_r": correlation of the two, nan where all α are
    the same} (DyT Fig. 8)."""
    slots = {name: slot for name, slot in norm_slots(model).items() if slot.norm_kind == "dyt"}
    if not slots:
        raise NotApplicable("no DyT")

    def sums(x: Tensor, *_: object) -> tuple[int, float, float]:
        """Number of the elements, their sum, the sum of their squares."""
        x = x.cpu().double()
        return x.numel(), x.sum().item(), x.square().sum().item()

    by_batch = walk(model, batches, slots.values(), sums)
    n, total, squares = sum(np.array(batch) for batch in by_batch).T
    inv_std = (squares / n - (total / n) ** 2) ** -0.5
    alpha = [float(slot.alpha) for slot in slots.values()]
    rows = []
    for name, a, s in zip(slots, alpha, inv_std.tolist(), strict=True):
        rows.append({"slot": name, "alpha": a, "inv_std": s})
    pearson_r = math.nan
    if np.ptp(alpha):
        pearson_r = float(np.corrcoef(alpha, inv_std)[0, 1])
    return {"slots": rows, "pearson_r": pearson_r}


@register("alpha", measure_alpha, tokens=8192, over_training=True)
def draw_alpha(measured: list[Measured]) -> PanelRows:
    """DyT's α and 1/std of its input, over training and over the layers (DyT, Fig. 8)."""
    slots = measured[-1]["slots"]
    alphas = []
    inverse = []
    ends = []
    for i, (slot, color) in enumerate(zip(slots, shades(len(slots)), strict=True)):
        history = [m["slots"][i] for m in measured]
        alphas.append(over_steps(measured, [m["alpha"] for m in history], color=color))
        inverse.append(over_steps(measured, [m["inv_std"] for m in history], color=color))
        label = short_slot(slot["slot"]) if i in (0, len(slots) - 1) else None
        ends.append(line(slot["inv_std"], slot["alpha"], color=color, label=label))
    label = "1 / std of the input"
    title = f"at the end: Pearson r = {measured[-1]['pearson_r']:.2f}"
    return [
        [
            Panel("α over training", "step", alphas, "α"),
            Panel("1/std over training", "step", inverse, label),
            Panel(title, label, ends, "α"),
        ]
    ]


@torch.no_grad()
def norm_scatter(
    model: Transformer,
    batches: Iterable[Batch],
    slot_name: str,
    n: int,
    generator: torch.Generator,
) -> dict[str, list]:
    """{"x", "y", "token", "channel": input of norm slot `slot_name`, output before the affine part,
    index of the token in all inputs, and channel of at most n elements, drawn without replacement
    (DyT Figs. 2, 4)}."""
    slot = norm_slots(model)[slot_name]
    x = torch.cat([x.flatten(0, 1) for (x,) in walk(model, batches, [slot], upcast)])  # (tokens, C)
    y = slot.normalise(slot.const_in * x)
    chosen = torch.randperm(x.numel(), generator=generator)[:n].sort().values
    token = chosen // x.shape[1]
    channel = chosen % x.shape[1]
    return {
        "x": x.cpu()[token, channel].tolist(),
        "y": y.cpu()[token, channel].tolist(),
        "token": token.tolist(),
        "channel": channel.tolist(),
    }


def measure_scatter(model: Transformer, batches: Batches, run: CheckpointedRun) -> Measured:
    slots = norm_slots(model)
    if not slots:
        raise NotApplicable("no norm on the residual path")
    scatters = {}
    for name in pick_evenly(list(slots), 3):
        points = norm_scatter(model, batches, name, 3000, run.generator())
        scatters[name] = {"norm": slots[name].norm_kind, **points}
    return {"slots": scatters}


@register("scatter", measure_scatter, tokens=128, window=WINDOW)
def draw_scatter(measured: list[Measured]) -> PanelRows:
    """Inputs and outputs of norms, element by element (DyT, Figs. 2, 4)."""

    rows = [[], []]
    for slot, points in measured[-1]["slots"].items():
        title = f"{short_slot(slot)} ({points['norm']})"
        for row, by in zip(rows, ("token", "channel"), strict=True):
            paint = partial(paint_points, points, by)
            row.append(Panel(title, "input x", ylabel=f"output y, by {by}", paint=paint))
    return rows


def paint_points(points: dict[str, list], by: str, ax: Axes) -> None:
    ax.scatter(points["x"], points["y"], c=points[by], cmap="turbo", s=3, rasterized=True)


@torch.no_grad()
def measure_gains(
    model: Transformer, batches: None = None, run: CheckpointedRun | None = None
) -> Measured:
    """{"slots": {slot name: {"rms", "std"}}, "cosines": [{"qk", "qv", "kv": cosine of two gains of
    HG}] by block, nan without a pre norm (Mix-LN's first blocks), [] without HG} (scale vectors,
    Fig. 4)."""
    gains = gain_vectors(model)
    if not gains:
        raise NotApplicable("no scale vector")
    slots = {}
    for name, g in gains.items():
        slots[name] = {"rms": g.square().mean().sqrt().item(), "std": g.std(correction=0).item()}
    if not any(name.endswith("attn.f.q.pre") for name in gains):
        return {"slots": slots, "cosines": []}
    missing = torch.tensor([math.nan])
    cosines = []
    for i in range(len(model.blocks)):
        by_part = {part: gains.get(f"blocks.{i}.attn.f.{part}.pre", missing) for part in "qkv"}
        pairs = {}
        for a, b in ("qk", "qv", "kv"):
            pairs[a + b] = F.cosine_similarity(by_part[a], by_part[b], dim=0).item()
        cosines.append(pairs)
    return {"slots": slots, "cosines": cosines}


@register("gains", measure_gains, over_training=True)
def draw_gains(measured: list[Measured]) -> PanelRows:
    """Scale vectors over training (scale vectors, Fig. 4)."""
    last = measured[-1]
    sizes = []
    spreads = []
    cosines = []
    for slot in last["slots"]:
        kind = short_slot(slot, block=False)
        history = [m["slots"][slot] for m in measured]
        rms = [gain["rms"] for gain in history]
        spread = [gain["std"] / gain["rms"] for gain in history]
        sizes.append(over_steps(measured, rms, label=kind))
        spreads.append(over_steps(measured, spread, label=kind))
    for block in range(len(last["cosines"])):
        for pair in ("qk", "qv", "kv"):
            values = [m["cosines"][block][pair] for m in measured]
            cosines.append(over_steps(measured, values, label=f"{pair[0]}, {pair[1]}"))
    panels = [Panel("RMS of the gain", "step", sizes), Panel("spread: std / RMS", "step", spreads)]
    if cosines:
        panels.append(Panel("cosine of the gains of q, k, v", "step", cosines))
    return [panels]
