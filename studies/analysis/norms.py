"""Norms of parameters, norm slots, DyT and scale vectors, measured and drawn: after Blockwise LR (arXiv 2502.19002),
DyT (2503.10622) and scale vectors (2605.26895). What the papers leave open, and what we chose: docs/analysis.md."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from layers.ops import upcast
from layers.slot import Slot
from model import Transformer
from nanodnt.run.tracking import watch
from studies.analysis.figure import (
    BRANCHES,
    TYPE_COLORS,
    NotApplicable,
    dark_to_light,
    make_panels,
    plot_by_block,
    plot_over_steps,
    register,
    rows_of,
    slot_with_block,
    slot_without_block,
)
from studies.analysis.gradients import MATRICES, matrix_types, trained_parameters
from studies.analysis.runs import WINDOW, pick_evenly
from studies.analysis.streams import Moments

SCATTER_POINTS = 3000
LINES = {"FFN": {"w1": "$W_1$", "w2": "$W_2$", "mlp_gain": "γ"}}  # of block_norms, in a panel of Fig. 6
LINES |= {"attention": {"q": "$W_Q$", "k": "$W_K$", "v": "$W_V$", "o": "$W_O$", "attn_gain": "γ"}}
PLACES = ("pre", "mid", "post")  # of norms in a sub-layer
TANH_SLOPES = 1e-3, 1e2  # the tanh fit searches slope · rms(x) in this range


# -------------------------------------------------------------------------------------------- norms of parameters


def norms_by_type(parameters: dict, types: dict) -> dict:
    """{type: L2 norm of all its parameters as one vector}; parameters: {name: tensor}, types: {name: type}."""
    squares = {}
    for name, p in parameters.items():
        if name in types:
            squares[types[name]] = squares.get(types[name], 0.0) + torch.linalg.vector_norm(p).item() ** 2
    return {kind: square**0.5 for kind, square in squares.items()}


def gain_vectors(module: torch.nn.Module) -> dict:
    """{slot name: its gain, as it acts} of every slot with more than one entry: norms of all kinds, LayerScale, Admin,
    HG, DP, DNP."""
    gains = {name: slot.gain_vector() for name, slot in module.named_modules() if isinstance(slot, Slot)}
    return {name: gain for name, gain in gains.items() if gain is not None and gain.numel() > 1}


def joint_gain(module: torch.nn.Module) -> float:
    """‖γ‖: the L2 norm of all gains in `module` as one vector; nan for none."""
    gains = gain_vectors(module)
    return norms_by_type(gains, dict.fromkeys(gains, "gain")).get("gain", math.nan)


@torch.no_grad()
def block_norms(model: Transformer) -> dict:
    """{"q", "k", "v", "o", "w1", "w2": ‖W‖, the Frobenius norm of a block's matrices of that type (`matrix_types`) as
    one; "attn_gain", "mlp_gain": ‖γ‖ of the branch}: lists [L] (Blockwise LR Fig. 6 a, b)."""
    types, blocks = matrix_types(model), []
    for i, block in enumerate(model.blocks):
        norms = norms_by_type(dict(block.named_parameters(prefix=f"blocks.{i}")), types)
        blocks.append(norms | {f"{branch}_gain": joint_gain(getattr(block, branch)) for branch in BRANCHES})
    return {kind: [norms[kind] for norms in blocks] for kind in (*MATRICES, "attn_gain", "mlp_gain")}


@torch.no_grad()
def smallest_row(model: Transformer) -> dict:
    """{"rows": d, the size of the vocabulary; "smallest": min ‖w̃‖² over the rows w of the embedding, w̃ = w − mean(w);
    "gain": ‖γ‖ of the norm that comes next: the input norm, else block 1's first, else all gains of its attention [I]}.
    The paper sets d · smallest against ‖γ‖² (Blockwise LR Theorem 4.3, Fig. 6 c). {} for images, which have no such
    table."""
    if getattr(model, "wte", None) is None:
        return {}
    rows = model.wte.weight[: model.config.vocab_size]
    smallest = (rows - rows.mean(1, keepdim=True)).square().sum(1).min().item()
    first = model.blocks[0].attn
    gains = (joint_gain(module) for module in (model.input_norm, first.pre, first))
    gain = next((gain for gain in gains if not math.isnan(gain)), math.nan)
    return {"rows": len(rows), "smallest": smallest, "gain": gain}


def measure_norms(model, batches, run):
    types = norms_by_type(trained_parameters(model), model.block_types())
    return {"types": types, "blocks": block_norms(model), "embedding": smallest_row(model)}


@register("norms", measure_norms, over_training=True)
def draw_norms(results):
    """Norms of the parameters: by block, of the embedding's rows, by type (Blockwise LR, Fig. 6)."""
    figure, axes = make_panels(len(results), 4, 2.5, sharey="col")
    for (*branches, rows, types), measured in rows_of(axes, results):
        last = measured[-1]
        for ax, lines in zip(branches, LINES.values(), strict=True):
            for i, (key, label) in enumerate(lines.items()):
                color = "k" if label == "γ" else f"C{i}"
                if len(measured) == 1:
                    plot_by_block(ax, last["blocks"][key], color=color, label=label)
                    continue
                for block, strength in enumerate(np.linspace(1, 0.3, len(last["blocks"][key]))[::-1]):
                    how = dict(color=color, alpha=strength, label=label if strength == 1 else None)
                    plot_over_steps(ax, measured, [m["blocks"][key][block] for m in measured], **how)
            ax.set_xlabel("step" if measured[1:] else "block")
        if last["embedding"]:
            tables = [m["embedding"] for m in measured]
            plot_over_steps(rows, measured, [e["rows"] * e["smallest"] for e in tables], label="d · min ‖w̃‖²")
            plot_over_steps(rows, measured, [e["gain"] ** 2 for e in tables], label="‖γ‖²", color="k")
        for kind in [kind for kind in TYPE_COLORS if kind in last["types"]]:
            plot_over_steps(types, measured, [m["types"][kind] for m in measured], color=TYPE_COLORS[kind], label=kind)
        rows.set(xlabel="step", yscale="log", visible=bool(last["embedding"]))
        types.set_xlabel("step")
    titles = [f"{part}: ‖W‖, ‖γ‖\n(last block: darkest)" for part in LINES]
    titles += ["smallest row of the embedding,\nand the norm after it", "all parameters of a type"]
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
        if linear := ax.get_yscale() == "linear":
            ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # the legend has the room above
        if ax.lines:
            ax.legend(ncols=3, fontsize=7, loc="upper center" if linear else "best", columnspacing=1, handlelength=1)
    return figure


# ----------------------------------------------------------------------------------------------- norms and DyT


def norm_slots(model: Transformer) -> dict:
    """{name: Slot} of every norm on the residual path, in the order of the forward; QK-norm and DNP are not on it."""
    places = [f"blocks.{i}.{branch}.{p}" for i in range(len(model.blocks)) for branch in BRANCHES for p in PLACES]
    slots = {name: model.get_submodule(name) for name in ("input_norm", *places, "final_norm")}
    return {name: slot for name, slot in slots.items() if slot.norm != "none"}


@torch.no_grad()
def dyt_alphas(model: Transformer, batches) -> list:
    """[{"slot": name, "alpha": α, "inv_std": 1 / std over all elements of the slot's input}] of every DyT, in the order
    of the forward (DyT Fig. 8)."""
    slots = {name: slot for name, slot in norm_slots(model).items() if slot.norm == "dyt"}
    seen = {name: Moments() for name in slots}
    with watch([(slot, lambda args, y, name=name: seen[name].add(args[0])) for name, slot in slots.items()]):
        for inputs, _ in batches if slots else ():
            model.final_norm(model.stream(inputs))
    found = []
    for name, slot in slots.items():
        std = seen[name].variance ** 0.5
        found.append({"slot": name, "alpha": float(slot.alpha), "inv_std": 1 / std if std else math.inf})
    return found


def measure_alpha(model, batches, run):
    slots = dyt_alphas(model, batches)
    if not slots:
        raise NotApplicable("no DyT")
    alpha, inv_std = ([slot[key] for slot in slots] for key in ("alpha", "inv_std"))
    spread = min(np.ptp(alpha), np.ptp(inv_std)) if len(slots) > 2 else 0
    return {"slots": slots, "pearson_r": float(np.corrcoef(alpha, inv_std)[0, 1]) if spread else math.nan}


@register("alpha", measure_alpha, tokens=8192, over_training=True)
def draw_alpha(results):
    """DyT's α and 1/std of its input, over training and over the layers (DyT, Fig. 8)."""
    figure, axes = make_panels(len(results), 3, 2.7)
    for row, measured in rows_of(axes, results):
        slots, chosen = measured[-1]["slots"], pick_evenly(range(len(measured[-1]["slots"])), 5)
        for i, (slot, color) in enumerate(zip(slots, dark_to_light(len(slots)), strict=True)):
            how = dict(color=color, label=slot_with_block(slot["slot"]) if i in chosen else None)
            plot_over_steps(row[0], measured, [m["slots"][i]["alpha"] for m in measured], **how)
            plot_over_steps(row[1], measured, [m["slots"][i]["inv_std"] for m in measured], **how)
            row[2].plot(slot["inv_std"], slot["alpha"], "o", markersize=6, **how)
        row[0].set(xlabel="step", ylabel="α", title="α over training")
        row[1].set(xlabel="step", ylabel="1 / std of the input", title="1/std over training")
        title = f"at the end: Pearson r = {measured[-1]['pearson_r']:.2f}"
        row[2].set(xlabel="1 / std of the input", ylabel="α", title=title)
        row[2].legend()
    return figure


@torch.no_grad()
def norm_scatter(model: Transformer, batches, slot_name: str, n: int, generator: torch.Generator) -> dict:
    """What norm slot `slot_name` (a name of `norm_slots`) does to the elements of its input (DyT Figs. 2, 4).

    {"x", "y", "token", "channel": input, output before the affine part, index of the token in all inputs, and channel
    of at most n elements, drawn without replacement, of each batch in proportion; "amplitude", "slope", "r2": their
    least-squares fit y ≈ A tanh(a x), a > 0; "linear_r2": of the line y ≈ c x; "token_rms_cv": standard deviation over
    mean of the RMS of all tokens' inputs}."""
    slot, seen, rms, points, done = norm_slots(model)[slot_name], [], Moments(), [], 0
    rows = sum(len(inputs) for inputs, _ in batches)
    for inputs, _ in batches:
        with watch([(slot, lambda args, y: seen.append(upcast(args[0])))]):
            model.final_norm(model.stream(inputs))
        x = seen.pop().flatten(0, 1)  # (tokens, C)
        y = slot.normalise(x if slot.const_in == 1.0 else slot.const_in * x)
        most = n * (done + len(inputs)) // rows - n * done // rows
        chosen = torch.randperm(x.numel(), generator=generator, device=generator.device)[:most].sort().values
        token, channel = (i.to(x.device) for i in (chosen // x.shape[1], chosen % x.shape[1]))
        points.append([t.cpu() for t in (x[token, channel], y[token, channel], token + rms.n, channel)])
        rms.add(x.square().mean(-1).sqrt())
        done += len(inputs)
    xs, ys, token, channel = map(torch.cat, zip(*points, strict=True))
    found = {"x": xs.tolist(), "y": ys.tolist(), "token": token.tolist(), "channel": channel.tolist()}
    spread = rms.variance**0.5 / rms.mean if rms.mean else math.nan
    return {**found, **fit_tanh(xs.double().numpy(), ys.double().numpy()), "token_rms_cv": spread}


def fit_tanh(x: np.ndarray, y: np.ndarray) -> dict:
    """The least-squares fit y ≈ A tanh(a x), as "amplitude", "slope", "r2", and "linear_r2" of y ≈ c x.

    For each a the best A has a closed form; a is searched on a grid that narrows, within TANH_SLOPES / rms(x)."""
    size, spread = np.square(x).mean() ** 0.5, np.square(y - y.mean()).sum()
    if not size or not spread:
        return dict.fromkeys(("amplitude", "slope", "r2", "linear_r2"), math.nan)

    def fit(basis):
        factor = (basis @ y) / (basis @ basis)
        return np.square(y - factor * basis).sum(), factor

    low, high = np.log(np.array(TANH_SLOPES) / size)
    for _ in range(6):
        grid = np.linspace(low, high, 33)
        errors = [fit(np.tanh(np.exp(a) * x))[0] for a in grid]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    slope = math.exp(grid[best])
    error, amplitude = fit(np.tanh(slope * x))
    r2, linear_r2 = (float(1 - e / spread) for e in (error, fit(x)[0]))
    return {"amplitude": float(amplitude), "slope": slope, "r2": r2, "linear_r2": linear_r2}


def measure_scatter(model, batches, run):
    slots, found = norm_slots(model), {}
    for name in pick_evenly(list(slots), 3):
        points = norm_scatter(model, batches, name, SCATTER_POINTS, run.generator())
        found[name] = {"norm": slots[name].norm, **points}
    if not found:
        raise NotApplicable("no norm on the residual path")
    return {"slots": found}


@register("scatter", measure_scatter, tokens=128, window=WINDOW)
def draw_scatter(results):
    """Inputs and outputs of norms, element by element (DyT, Figs. 2, 4)."""
    most = max(len(m[-1]["slots"]) for m in results.values())
    figure, axes = make_panels(2 * len(results), most, 2.4)
    for rows, (name, (*_, last)) in zip(axes.reshape(-1, 2, most), results.items(), strict=True):
        for column, (slot, p) in zip(rows.T, last["slots"].items(), strict=False):
            x = np.linspace(min(p["x"]), max(p["x"]), 200)
            for ax, by in zip(column, ("token", "channel"), strict=True):
                ax.scatter(p["x"], p["y"], c=p[by], cmap="turbo", s=3, linewidths=0, rasterized=True)
                ax.plot(x, p["amplitude"] * np.tanh(p["slope"] * x), "k--", lw=1)
            fit = f"{p['amplitude']:.3g} tanh({p['slope']:.3g} x), R² {p['r2']:.3f}; line {p['linear_r2']:.3f}"
            column[0].set_title(f"{slot_with_block(slot)} ({p['norm']})\n{fit}", fontsize=8)
            column[1].set_xlabel("input x")
        for row, by in zip(rows, ("token", "channel"), strict=True):
            row[0].set_ylabel(f"{name}, by {by}\noutput y")
        for ax in rows[:, len(last["slots"]) :].flat:
            ax.set_visible(False)
    return figure


# ----------------------------------------------------------------------------------------------- scale vectors


@torch.no_grad()
def gain_statistics(model: Transformer) -> dict:
    """{slot name: {"rms", "std"}} of the `gain_vectors` (scale vectors, Fig. 4)."""
    return {
        name: {"rms": gain.square().mean().sqrt().item(), "std": gain.std(correction=0).item()}
        for name, gain in gain_vectors(model).items()
    }


@torch.no_grad()
def qkv_cosines(model: Transformer) -> list:
    """[{"qk", "qv", "kv": cosine between the gains that HG gives q, k and v}] by block; nan in a block without a pre
    norm (Mix-LN's first blocks); [] without HG (scale vectors, Fig. 4)."""
    found = []
    for block in model.blocks:
        gains = {part: getattr(block.attn.f, part).pre.gain_vector() for part in "qkv"}
        pairs = {a + b: (gains[a], gains[b]) for a, b in ("qk", "qv", "kv")}
        cosine = {ab: F.cosine_similarity(*pair, dim=0).item() for ab, pair in pairs.items() if pair[0] is not None}
        found.append({ab: cosine.get(ab, math.nan) for ab in pairs})
    return found if any(not math.isnan(cosines["qk"]) for cosines in found) else []


def measure_gains(model, batches, run):
    slots = gain_statistics(model)
    if not slots:
        raise NotApplicable("no scale vector")
    return {"slots": slots, "cosines": qkv_cosines(model)}


@register("gains", measure_gains, over_training=True)
def draw_gains(results):
    """Scale vectors over training (scale vectors, Fig. 4)."""
    any_cosines = any(m[-1]["cosines"] for m in results.values())
    figure, axes = make_panels(len(results), 2 + any_cosines, 2.7, sharey="col")
    for row, measured in rows_of(axes, results):
        kinds = [slot_without_block(slot) for slot in measured[-1]["slots"]]
        order = list(dict.fromkeys(kinds))
        for i, (slot, kind) in enumerate(zip(measured[-1]["slots"], kinds, strict=True)):
            label = kind if kind not in kinds[:i] else None
            how = dict(color=f"C{order.index(kind) % 10}", label=label, alpha=0.75)
            gains = [m["slots"][slot] for m in measured]
            plot_over_steps(row[0], measured, [gain["rms"] for gain in gains], **how)
            plot_over_steps(row[1], measured, [gain["std"] / gain["rms"] for gain in gains], **how)
        row[0].set(xlabel="step", ylabel="RMS of the gain")
        row[1].set(xlabel="step", ylabel="spread: std / RMS")
        cosines = measured[-1]["cosines"]
        for pair, style in (("qk", "ko-"), ("qv", "ko--"), ("kv", "ko:")) if cosines else ():
            for block in range(len(cosines)):
                values = [m["cosines"][block][pair] for m in measured]
                label = None if block else f"cosine of {pair[0]}, {pair[1]}"
                row[2].plot([m["step"] for m in measured], values, style, alpha=0.6, label=label)
                row[2].set(xlabel="step", ylabel="cosine of the gains of q, k, v")
        if any_cosines and not cosines:
            row[2].set_axis_off()
        lines = [line for ax in (row[0], *row[2:]) for line in ax.lines if not line.get_label().startswith("_")]
        row[-1].legend(handles=lines, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
