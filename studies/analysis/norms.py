"""Norms of parameters, norm slots, DyT and scale vectors, measured and drawn: after Blockwise LR (arXiv 2502.19002),
DyT (2503.10622) and scale vectors (2605.26895). What the papers leave open, and what we chose: docs/analysis.md."""

import math
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from layers.ops import upcast
from model import Transformer
from nanodnt.run.tracking import gain_vectors, joint_gain, matrix_types, smallest_row
from studies.analysis.figure import TYPE_COLORS, NotApplicable, Panel, by_block, line, over_steps, register, shades
from studies.analysis.gradients import pool_by_type, trained_parameters
from studies.analysis.runs import WINDOW, pick_evenly
from studies.analysis.streams import joint_variance, moments, walk

LINES = {"FFN": ("mlp_gain", "w1", "w2"), "attention": ("attn_gain", "q", "k", "v", "o")}  # of measure_norms, as drawn


def norms_by_type(parameters: dict, types: dict) -> dict:
    """{type: L2 norm of all its parameters as one vector}; parameters: {name: tensor}, types: {name: type}."""
    return {kind: torch.linalg.vector_norm(v).item() for kind, v in pool_by_type(parameters, types).items()}


@torch.no_grad()
def measure_norms(model, batches=None, run=None):
    """{"types": `norms_by_type` of the block types; "blocks": {a type of `matrix_types`: ‖W‖ of a block's matrices as
    one; "attn_gain", "mlp_gain": ‖γ‖ of the branch}, lists [L] (Blockwise LR Fig. 6 a, b); "embedding": of
    `smallest_row`}."""
    types, blocks = matrix_types(model), []
    for i, block in enumerate(model.blocks):
        norms = norms_by_type(dict(block.named_parameters(prefix=f"blocks.{i}")), types)
        blocks.append(norms | {f"{of}_gain": float(joint_gain(getattr(block, of))) for of in ("attn", "mlp")})
    return {
        "types": norms_by_type(trained_parameters(model), model.block_types()),
        "blocks": {kind: [norms[kind] for norms in blocks] for kind in blocks[0]},
        "embedding": {key: float(value) for key, value in smallest_row(model).items()},
    }


@register("norms", measure_norms, over_training=True)
def draw_norms(measured):
    """Norms of the parameters: by block, of the embedding's rows, by type (Blockwise LR, Fig. 6)."""
    panels = []
    for branch, keys in LINES.items():
        lines = []
        for m, strength in zip(measured, np.linspace(1, 0.3, len(measured))[::-1], strict=True):
            for color, key in zip("kbgrm", keys, strict=False):
                how = dict(color=color, alpha=strength, label=key if strength == 1 else None)
                lines.append(by_block(m["blocks"][key], **how))
        panels.append(Panel(f"{branch}: ‖W‖, ‖γ‖\n(the last step: darkest)", "block", lines))
    types = [(kind, color) for kind, color in TYPE_COLORS.items() if kind in measured[-1]["types"]]
    lines = [over_steps(measured, [m["types"][k] for m in measured], color=color, label=k) for k, color in types]
    panels.append(Panel("all parameters of a type", "step", lines))
    if tables := [m["embedding"] for m in measured if m["embedding"]]:
        rows = over_steps(measured, [e["rows"] * e["smallest"] for e in tables], label="d · min ‖w̃‖²")
        gain = over_steps(measured, [e["gain"] ** 2 for e in tables], color="k", label="‖γ‖²")
        panels.append(Panel("smallest row of the embedding,\nand the norm after it", "step", [rows, gain], log="y"))
    return [panels]


def norm_slots(model: Transformer) -> dict:
    """{name: Slot} of every norm on the residual path, in the order of the forward; QK-norm and DNP are not on it."""
    places = product(range(len(model.blocks)), ("attn", "mlp"), ("pre", "mid", "post"))
    names = "input_norm", *(f"blocks.{i}.{branch}.{place}" for i, branch, place in places), "final_norm"
    slots = {name: model.get_submodule(name) for name in names}
    return {name: slot for name, slot in slots.items() if slot.norm != "none"}


def short_slot(slot: str, block: bool = True) -> str:
    """A slot's name for a legend: blocks.3.attn.f.q_norm → 4 attn q_norm. Without `block` it is the same in all."""
    parts = [part for part in slot.split(".") if part != "f"]
    if parts[0] != "blocks":
        return slot
    return " ".join([str(int(parts[1]) + 1), *parts[2:]] if block else parts[2:])


@torch.no_grad()
def measure_alpha(model, batches, run=None):
    """{"slots": [{"slot": name, "alpha": α, "inv_std": 1 / std over all elements of its input}] of every DyT, in the
    order of the forward, "pearson_r": between the two, nan where it has no meaning} (DyT Fig. 8)."""
    slots = {name: slot for name, slot in norm_slots(model).items() if slot.norm == "dyt"}
    if not slots:
        raise NotApplicable("no DyT")
    variances = map(joint_variance, zip(*walk(model, batches, slots.values(), moments), strict=True))
    inv_std, alpha = [v**-0.5 if v else math.inf for v in variances], [float(slot.alpha) for slot in slots.values()]
    spread = min(np.ptp(alpha), np.ptp(inv_std)) if len(slots) > 2 else 0
    found = [dict(slot=name, alpha=a, inv_std=s) for name, a, s in zip(slots, alpha, inv_std, strict=True)]
    return {"slots": found, "pearson_r": float(np.corrcoef(alpha, inv_std)[0, 1]) if spread else math.nan}


@register("alpha", measure_alpha, tokens=8192, over_training=True)
def draw_alpha(measured):
    """DyT's α and 1/std of its input, over training and over the layers (DyT, Fig. 8)."""
    slots, alphas, inverse, ends = measured[-1]["slots"], [], [], []
    for i, (slot, color) in enumerate(zip(slots, shades(len(slots)), strict=True)):
        label = short_slot(slot["slot"]) if i in pick_evenly(range(len(slots)), 5) else None
        alphas.append(over_steps(measured, [m["slots"][i]["alpha"] for m in measured], color=color))
        inverse.append(over_steps(measured, [m["slots"][i]["inv_std"] for m in measured], color=color))
        ends.append(line(slot["inv_std"], slot["alpha"], "o", markersize=6, color=color, label=label))
    label, title = "1 / std of the input", f"at the end: Pearson r = {measured[-1]['pearson_r']:.2f}"
    panels = [Panel("α over training", "step", alphas, "α"), Panel("1/std over training", "step", inverse, label)]
    return [[*panels, Panel(title, label, ends, "α")]]


@torch.no_grad()
def norm_scatter(model: Transformer, batches, slot_name: str, n: int, generator: torch.Generator) -> dict:
    """{"x", "y", "token", "channel": input of norm slot `slot_name`, output before the affine part, index of the token
    in all inputs, and channel of at most n elements, drawn without replacement, of each batch in proportion (DyT Figs.
    2, 4); `fit_tanh`; "token_rms_cv": standard deviation over mean of the RMS of all tokens' inputs}."""
    slot, points, rms, done = norm_slots(model)[slot_name], [], [], 0
    rows = sum(len(inputs) for inputs, _ in batches)
    for (x,) in walk(model, batches, [slot], upcast):
        done, before, x = done + len(x), done, x.flatten(0, 1)  # (tokens, C)
        y = slot.normalise(x if slot.const_in == 1.0 else slot.const_in * x)
        most = n * done // rows - n * before // rows
        chosen = torch.randperm(x.numel(), generator=generator, device=generator.device)[:most].sort().values
        token, channel = (i.to(x.device) for i in (chosen // x.shape[1], chosen % x.shape[1]))
        points.append([t.cpu() for t in (x[token, channel], y[token, channel], token + sum(map(len, rms)), channel)])
        rms.append(x.square().mean(-1).sqrt().cpu())
    (xs, ys, token, channel), rms = map(torch.cat, zip(*points, strict=True)), torch.cat(rms)
    found = {"x": xs.tolist(), "y": ys.tolist(), "token": token.tolist(), "channel": channel.tolist()}
    spread = (rms.std(correction=0) / rms.mean()).item()
    return {**found, **fit_tanh(xs.double().numpy(), ys.double().numpy()), "token_rms_cv": spread}


def fit_tanh(x: np.ndarray, y: np.ndarray) -> dict:
    """The least-squares fit y ≈ A tanh(a x), a > 0, as "amplitude", "slope", "r2", and "linear_r2" of y ≈ c x. For each
    a the best A has a closed form; log a is searched on a grid, a from 1e-3 to 1e2 over rms(x), which is refined."""
    size, spread = np.square(x).mean() ** 0.5, np.square(y - y.mean()).sum()
    if not size or not spread:
        return dict.fromkeys(("amplitude", "slope", "r2", "linear_r2"), math.nan)

    def fit(basis):
        factor = (basis @ y) / (basis @ basis)
        return np.square(y - factor * basis).sum(), factor

    low, high = np.log(np.array([1e-3, 1e2]) / size)
    for _ in range(8):  # each time between the neighbours of the best: 16 times finer
        grid = np.linspace(low, high, 33)
        best = int(np.argmin([fit(np.tanh(np.exp(log_a) * x))[0] for log_a in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    slope = math.exp(grid[best])
    error, amplitude = fit(np.tanh(slope * x))
    r2, linear_r2 = (float(1 - e / spread) for e in (error, fit(x)[0]))
    return {"amplitude": float(amplitude), "slope": slope, "r2": r2, "linear_r2": linear_r2}


def measure_scatter(model, batches, run):
    slots = norm_slots(model)
    if not slots:
        raise NotApplicable("no norm on the residual path")
    chosen = pick_evenly(list(slots), 3)
    points = {name: norm_scatter(model, batches, name, 3000, run.generator()) for name in chosen}
    return {"slots": {name: {"norm": slots[name].norm, **found} for name, found in points.items()}}


@register("scatter", measure_scatter, tokens=128, window=WINDOW)
def draw_scatter(measured):
    """Inputs and outputs of norms, element by element (DyT, Figs. 2, 4)."""

    def draw_points(ax, by, p):
        ax.scatter(p["x"], p["y"], c=p[by], cmap="turbo", s=3, linewidths=0, rasterized=True)
        x = np.linspace(min(p["x"]), max(p["x"]), 200)
        ax.plot(x, p["amplitude"] * np.tanh(p["slope"] * x), "k--", lw=1)

    rows = [[], []]
    for slot, p in measured[-1]["slots"].items():
        fit = f"{p['amplitude']:.3g} tanh({p['slope']:.3g} x), R² {p['r2']:.3f}; line {p['linear_r2']:.3f}"
        titles = f"{short_slot(slot)} ({p['norm']})\n{fit}", ""
        for row, by, title in zip(rows, ("token", "channel"), titles, strict=True):
            row.append(Panel(title, "input x", ylabel=f"output y, by {by}", paint=partial(draw_points, by=by, p=p)))
    return rows


@torch.no_grad()
def measure_gains(model, batches=None, run=None):
    """{"slots": {slot name: {"rms", "std"}}, "cosines": by block [{"qk", "qv", "kv": between the gains of HG}], nan
    without a pre norm (Mix-LN's first blocks), [] without HG} (scale vectors, Fig. 4)."""
    gains, slots, cosines, missing = gain_vectors(model), {}, [], torch.tensor([math.nan])
    if not gains:
        raise NotApplicable("no scale vector")
    for name, g in gains.items():
        slots[name] = {"rms": g.square().mean().sqrt().item(), "std": g.std(correction=0).item()}
    for i in range(len(model.blocks)):
        of = {part: gains.get(f"blocks.{i}.attn.f.{part}.pre", missing) for part in "qkv"}
        cosines.append({a + b: F.cosine_similarity(of[a], of[b], dim=0).item() for a, b in ("qk", "qv", "kv")})
    return {"slots": slots, "cosines": cosines if any(name.endswith("attn.f.q.pre") for name in gains) else []}


@register("gains", measure_gains, over_training=True)
def draw_gains(measured):
    """Scale vectors over training (scale vectors, Fig. 4)."""
    last, colors, sizes, spreads, cosines = measured[-1], {}, [], [], []
    for slot in last["slots"]:
        kind = short_slot(slot, block=False)
        label = kind if kind not in colors else None
        how = dict(color=colors.setdefault(kind, f"C{len(colors) % 10}"), alpha=0.75)
        gains = [m["slots"][slot] for m in measured]
        sizes.append(over_steps(measured, [gain["rms"] for gain in gains], label=label, **how))
        spreads.append(over_steps(measured, [gain["std"] / gain["rms"] for gain in gains], **how))
    for block in range(len(last["cosines"])):
        for pair, style in (("qk", "ko-"), ("qv", "ko--"), ("kv", "ko:")):
            values = [m["cosines"][block][pair] for m in measured]
            cosines.append(over_steps(measured, values, style, alpha=0.6, label=None if block else " and ".join(pair)))
    panels = [Panel("RMS of the gain", "step", sizes), Panel("spread: std / RMS", "step", spreads)]
    return [panels + ([Panel("cosine of the gains of q, k, v", "step", cosines)] if cosines else [])]
