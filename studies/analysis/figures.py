"""Drawing what was measured: draw_FIGURE({run name: [what measures.py returned, one per snapshot]}) → a figure.

Each dict of a snapshot also has its "step". A figure that is not over training shows the last snapshot alone."""

import math
from collections.abc import Callable
from itertools import zip_longest

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.ticker import MaxNLocator

from layers.roles import ROLES
from studies.analysis.measures import pick_evenly

MATRICES = {"q": "$W_Q$", "k": "$W_K$", "v": "$W_V$", "o": "$W_O$", "w1": "$W_1$ (up, gate)", "w2": "$W_2$ (down)"}
COLORS = {"emb": "C0", "pos": "C4", "head": "C5", "qk": "C1", "ffn": "C2", "router": "C6", "vo": "C3", "norm": "C7"}
COLORS |= {"patch": "C8"}
LOAD_COLORS = LogNorm(0.25, 4)  # of an expert's load over the mean
BRANCHES = {"attn": "attention", "mlp": "FFN"}
LINES = {"FFN": {"w1": "$W_1$", "w2": "$W_2$", "mlp_gain": "γ"}}  # of block_norms, in a panel of Fig. 6
LINES |= {"attention": {"q": "$W_Q$", "k": "$W_K$", "v": "$W_V$", "o": "$W_O$", "attn_gain": "γ"}}
JACOBIAN_LABELS = {"deviation": "‖J−I‖/√C", "off_diagonal": "off-diagonal share"}
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "figure.titlesize": 10, "axes.grid": True}
STYLE |= {"grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"legend.frameon": False, "lines.markersize": 3.5, "lines.linewidth": 1.3, "savefig.dpi": 130}


# ------------------------------------------------------------------------------------------------------ helpers


def make_panels(rows: int, columns: int, height: float = 2.2, **how) -> tuple:
    """(figure, array of axes (rows, columns)), of a width that can be read on a page."""
    return plt.subplots(rows, columns, figsize=(9.5, height * rows + 0.6), squeeze=False, layout="constrained", **how)


def plot_over_steps(ax, measured: list, value: Callable, **how) -> None:
    """A line of value(m) over the steps of the snapshots."""
    ax.plot([m["step"] for m in measured], [value(m) for m in measured], "o-", **how)


def plot_by_block(ax, values: list, *style, first: int = 1, **how) -> None:
    """A line with one value per block."""
    ax.plot(range(first, first + len(values)), values, *(style or ("o-",)), **how)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def dark_to_light(n: int) -> list:
    """n colors from dark to light, for depth or time."""
    return [plt.colormaps["viridis"](0.9 * i / max(1, n - 1)) for i in range(n)]


def label_rows(axes, results: dict) -> None:
    """Put each run's name at the left of its row."""
    for ax, name in zip(axes[:, 0], results, strict=True):
        ax.set_ylabel(f"{name}\n{ax.get_ylabel()}")


def slot_without_block(slot: str) -> str:
    """A slot's name, the same in every block: blocks.3.attn.f.q_norm → attn q_norm."""
    parts = slot.split(".")
    return " ".join(part for part in parts[2 * (parts[0] == "blocks") :] if part != "f")


def slot_with_block(slot: str) -> str:
    """blocks.3.attn.pre → 4 attn pre: blocks are counted from 1."""
    parts = slot.split(".")
    return f"{int(parts[1]) + 1} {slot_without_block(slot)}" if parts[0] == "blocks" else slot


# -------------------------------------------------------------------------------------- gradients and sharpness


def draw_gradients(results):
    figure, axes = make_panels(len(MATRICES), 4, 1.5, sharex="col", sharey="col")
    for row, kind in zip(axes, MATRICES, strict=True):
        for name, (*_, last) in results.items():
            found = last["types"][kind]
            h = found["histogram_of_g_over_rms"]
            edges = np.array(h["edges"])
            per_decade = np.array(h["density"]) * np.diff(edges) / np.diff(np.log10(edges))
            for i, scale in ((0, found["rms"]), (2, 1.0)):
                x, seen = edges * scale, per_decade > 0
                row[i].plot(np.sqrt(x[1:] * x[:-1])[seen], per_decade[seen], label=name)
                seen = np.array(h["ccdf"]) > 0
                row[i + 1].plot(x[seen], np.array(h["ccdf"])[seen], label=name)
        for ax in row:
            ax.set(xscale="log", yscale="log")
            ax.set_ylim(bottom=1e-6)
        row[2].set_xlim(1e-3, 1e3)
        row[3].set_xlim(1e-3, 1e3)
        row[0].set_ylabel(MATRICES[kind])
    titles = ("density per decade", "share ≥ |g|", "density per decade", "share ≥ |g|")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    for ax, label in zip(axes[-1], ("|g|", "|g|", "|g| / RMS", "|g| / RMS"), strict=True):
        ax.set_xlabel(label)
    axes[0, 0].legend()
    return figure


def draw_sharpness(results):
    figure, axes = make_panels(len(results), 4, 2.5, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        last = measured[-1]
        kinds = [kind for kind in COLORS if kind in last["types"]]
        for i, kind in enumerate(kinds):
            color, found = COLORS[kind], last["types"][kind]
            row[0].bar(i - 0.2, found["arithmetic"], 0.4, color=color)
            row[0].bar(i + 0.2, found["geometric"], 0.4, color=color, alpha=0.45, hatch="///")
            plot_over_steps(
                row[1], measured, lambda m, kind=kind: m["types"][kind]["arithmetic"], color=color, label=kind
            )
            density = last["log10_density"][kind]
            centres = (np.array(density["edges"][1:]) + density["edges"][:-1]) / 2
            row[2].plot(centres, density["density"], color=color)
            if kind in last["layers"]:
                plot_by_block(row[3], last["layers"][kind]["arithmetic"], color=color)
        for mean, style in (("arithmetic", "ko-"), ("geometric", "ko:")):
            plot_by_block(row[3], last["layers"]["all"][mean], style, label=f"whole block, {mean}")
        zeros = [100 * last["types"][kind]["zero_fraction"] for kind in kinds]
        names = [f"{kind}\n{share:.2g}% zeros" if share else kind for kind, share in zip(kinds, zeros, strict=True)]
        row[0].set_xticks(range(len(kinds)), names, rotation=60, ha="right", rotation_mode="anchor")
        for ax, label in zip(row, ("", "step", "log₁₀ h", "block"), strict=True):
            ax.set_xlabel(label)
        for ax in (row[0], row[1], row[3]):
            ax.set_yscale("log")
    titles = ("mean h: arithmetic, hatched:\ngeometric, without the zeros", "arithmetic mean h")
    titles += ("density of log₁₀ h\n(at the end)", "mean h by block (at the end)")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    axes[0, 1].legend(ncols=2)
    axes[0, 3].legend(fontsize=7)
    label_rows(axes, results)
    return figure


def draw_norms(results):
    figure, axes = make_panels(len(results), 4, 2.5, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        last = measured[-1]
        for ax, lines in zip(row, LINES.values(), strict=False):
            for i, (key, label) in enumerate(lines.items()):
                color = "k" if label == "γ" else f"C{i}"
                if len(measured) == 1:
                    plot_by_block(ax, last["blocks"][key], color=color, label=label)
                    continue
                for block, strength in enumerate(np.linspace(1, 0.3, len(last["blocks"][key]))[::-1]):
                    how = dict(color=color, alpha=strength, label=label if strength == 1 else None)
                    plot_over_steps(ax, measured, lambda m, k=key, b=block: m["blocks"][k][b], **how)
            ax.set_xlabel("step" if measured[1:] else "block")
        if last["embedding"]:
            embedding = {"d · min ‖w̃‖²": lambda e: e["rows"] * e["smallest"], "‖γ‖²": lambda e: e["gain"] ** 2}
            for (label, value), color in zip(embedding.items(), ("C0", "k"), strict=True):
                plot_over_steps(row[2], measured, lambda m, v=value: v(m["embedding"]), label=label, color=color)
        for kind in [kind for kind in COLORS if kind in last["types"]]:
            plot_over_steps(row[3], measured, lambda m, k=kind: m["types"][k], color=COLORS[kind], label=kind)
        row[2].set(xlabel="step", yscale="log", visible=bool(last["embedding"]))
        row[3].set_xlabel("step")
    titles = [f"{part}: ‖W‖, ‖γ‖\n(last block: darkest)" for part in LINES]
    titles += ["smallest row of the embedding,\nand the norm after it", "all parameters of a type"]
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
        if linear := ax.get_yscale() == "linear":
            ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # the legend has the room above
        if ax.lines:
            ax.legend(ncols=3, fontsize=7, loc="upper center" if linear else "best", columnspacing=1, handlelength=1)
    label_rows(axes, results)
    return figure


# ------------------------------------------------------------------------------------------------ DyT and norms


def draw_alpha(results):
    figure, axes = make_panels(len(results), 3, 2.7)
    for row, measured in zip(axes, results.values(), strict=True):
        slots = measured[-1]["slots"]
        for i, (slot, color) in enumerate(zip(slots, dark_to_light(len(slots)), strict=True)):
            how = dict(color=color, label=slot_with_block(slot["slot"]))
            plot_over_steps(row[0], measured, lambda m, i=i: m["slots"][i]["alpha"], **how)
            plot_over_steps(row[1], measured, lambda m, i=i: m["slots"][i]["inv_std"], **how)
            row[2].plot(slot["inv_std"], slot["alpha"], "o", markersize=6, **how)
        row[0].set(xlabel="step", ylabel="α", title="α over training")
        row[1].set(xlabel="step", ylabel="1 / std of the input", title="1/std over training")
        title = f"at the end: Pearson r = {measured[-1]['pearson_r']:.2f}"
        row[2].set(xlabel="1 / std of the input", ylabel="α", title=title)
        chosen = pick_evenly(list(range(len(slots))), 5)
        handles, labels = row[2].get_legend_handles_labels()
        row[2].legend([handles[i] for i in chosen], [labels[i] for i in chosen])
    label_rows(axes, results)
    return figure


def draw_scatter(results):
    most = max(len(m[-1]["slots"]) for m in results.values())
    figure, axes = make_panels(2 * len(results), most, 2.4)
    for i, (name, (*_, last)) in enumerate(results.items()):
        for column, (slot, p) in enumerate(last["slots"].items()):
            x = np.linspace(min(p["x"]), max(p["x"]), 200)
            fit = f"{p['amplitude']:.3g} tanh({p['slope']:.3g} x), R² {p['r2']:.3f}; line {p['linear_r2']:.3f}"
            for row, by in ((2 * i, "token"), (2 * i + 1, "channel")):
                ax = axes[row, column]
                ax.scatter(p["x"], p["y"], c=p[by], cmap="turbo", s=3, linewidths=0, rasterized=True)
                ax.plot(x, p["amplitude"] * np.tanh(p["slope"] * x), "k--", lw=1)
                ax.set_title(f"{slot_with_block(slot)} ({p['norm']})\n{fit}" if by == "token" else "", fontsize=8)
                ax.set_xlabel("input x" if by == "channel" else "")
                if column == 0:
                    ax.set_ylabel(f"{name}, by {by}\noutput y")
        for ax in axes[2 * i : 2 * i + 2, len(last["slots"]) :].flat:
            ax.set_visible(False)
    return figure


def draw_gains(results):
    any_cosines = any(m[-1]["cosines"] for m in results.values())
    figure, axes = make_panels(len(results), 2 + any_cosines, 2.7, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        slots = list(measured[-1]["slots"])
        kinds = {slot: slot_without_block(slot) for slot in slots}
        order = list(dict.fromkeys(kinds.values()))
        for slot, kind in kinds.items():
            first = slot == next(s for s in slots if kinds[s] == kind)
            how = dict(color=f"C{order.index(kind) % 10}", label=kind if first else None, alpha=0.75)
            plot_over_steps(row[0], measured, lambda m, s=slot: m["slots"][s]["rms"], **how)
            plot_over_steps(row[1], measured, lambda m, s=slot: m["slots"][s]["std"] / m["slots"][s]["rms"], **how)
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
        shown = [ax.get_legend_handles_labels() for ax in (row[0], *row[2:])]
        handles, labels = (sum(parts, []) for parts in zip(*shown, strict=True))
        row[-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1, 0.5))
    label_rows(axes, results)
    return figure


# ------------------------------------------------------------------------------------------ the residual stream


def draw_variance(results):
    figure, axes = make_panels(len(results), 2, 2.5, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        for m, color in zip(measured, dark_to_light(len(measured)), strict=True):
            plot_by_block(row[0], m["stream"], first=0, color=color, label=f"step {m['step']}")
        plot_by_block(row[0], m["stream_global"], "k:", first=0, label="over all elements")
        for branch, label in BRANCHES.items():
            plot_by_block(row[1], m[branch], label=label)
        row[0].set(xlabel="after block (0: what enters the first)", ylabel="variance", yscale="log")
        row[1].set(xlabel="block", ylabel="variance", yscale="log")
    axes[0, 0].set_title("residual stream")
    axes[0, 1].set_title("branch outputs, as they are added (at the end)")
    axes[0, 0].legend(ncols=2)
    axes[0, 1].legend()
    label_rows(axes, results)
    return figure


def draw_angular(results):
    columns = min(3, len(results))
    figure, axes = make_panels(-(-len(results) // columns), columns, 3.0)
    for ax, (name, (*_, last)) in zip(axes.flat, results.items(), strict=False):
        d = np.array(last["distance"])
        blocks, edges = len(d) - 1, (0.5, len(d) - 0.5)
        shown = [[d[i, i + n] if i + n <= blocks else math.nan for i in range(blocks)] for n in range(1, blocks + 1)]
        image = ax.imshow(shown, cmap="viridis_r", vmin=0, vmax=1, origin="lower", extent=edges * 2, aspect="auto")
        ax.grid(False)
        ax.set(title=name, xlabel="ℓ", ylabel="n")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    for ax in axes.flat[len(results) :]:
        ax.set_visible(False)
    figure.colorbar(image, ax=axes, label="d(ℓ, ℓ + n) = arccos(cosine) / π", shrink=0.8)
    return figure


def draw_removal(results):
    panels = [("drop", "loss", "loss above the full model's, nats", "{:.3f}")]
    if any("top1" in m[-1] for m in results.values()):
        panels.append(("top1_drop", "top1", "top-1 below the full model's", "{:.1%}"))
    figure, (axes,) = make_panels(1, len(panels), 3.0)
    for ax, (key, whole, label, text) in zip(axes, panels, strict=True):
        for i, (name, (*_, last)) in enumerate(results.items()):
            if key in last:
                x = np.arange(1, len(last[key]) + 1) + 0.8 * ((i + 0.5) / len(results) - 0.5)
                how = dict(color=f"C{i}", label=f"{name}, full {text.format(last[whole])}")
                ax.bar(x, last[key], 0.8 / len(results), **how)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(xlabel="deleted block", ylabel=label)
        ax.legend()
    return figure


def draw_jacobian(results):
    most = max(len(m[-1]["maps"]["attn"]) for m in results.values())
    figure, axes = make_panels(2 * len(results), most + 1, 1.9)
    for i, (name, (*_, last)) in enumerate(results.items()):
        for row, (branch, label) in zip(axes[2 * i : 2 * i + 2], BRANCHES.items(), strict=True):
            statistics = last["layers"][branch]
            for ax, shown in zip(row, last["maps"][branch], strict=False):
                image = ax.imshow(shown["map"], cmap="RdBu_r", norm=SymLogNorm(0.01, vmin=-1, vmax=1))
                ax.grid(False)
                deviation = statistics[shown["block"] - 1]["deviation"]
                ax.set_title(f"block {shown['block']}: ‖J−I‖/√C {deviation:.2f}", fontsize=8)
                ax.set(xticks=[], yticks=[])
            row[0].set_ylabel(f"{name}\n{label}")
            for key, style in (("deviation", "o-"), ("off_diagonal", "s--")):
                plot_by_block(row[-1], [s[key] for s in statistics], style, label=JACOBIAN_LABELS[key])
            row[-1].set_ylim(bottom=0)
            row[-1].set_xlabel("block")
            for ax in row[len(last["maps"][branch]) : -1]:
                ax.set_visible(False)
    axes[0, -1].legend()
    figure.colorbar(image, ax=axes[:, :-1], label="∂y/∂x", shrink=0.5, aspect=40)
    return figure


# ---------------------------------------------------------------------------------- attention logits, tracked rows


def draw_logits(results):
    figure, ((left, right),) = make_panels(1, 2, 2.8)
    for i, (name, measured) in enumerate(results.items()):
        plot_by_block(left, measured[-1]["layers"], label=name)
        plot_over_steps(right, measured, lambda m: max(m["layers"]), label=name, color=f"C{i}")
    left.set(xlabel="block", ylabel="largest |q·k| / √head_dim", title="at the end", yscale="log")
    right.set(xlabel="step", title="over training, the largest of all blocks", yscale="log")
    left.legend()
    return figure


def draw_tracking(results):
    by_role = {"grad_norm": "gradient norm", "grad_kurtosis": "gradient kurtosis"}
    by_role |= {"update_ratio": "update / weight norm"}
    by_depth = {"stream_var": "variance of the stream", "logit_max": "largest attention logit"}
    figure, axes = make_panels(2 * len(results), 3, 2.4)
    for (upper, lower), (name, (*_, last)) in zip(axes.reshape(-1, 2, 3), results.items(), strict=True):
        for ax, (key, title) in zip(upper, by_role.items(), strict=True):
            for role in [role for role in ROLES if any(role in values for values in last[key])]:
                values = nan_for_none(v.get(role) for v in last[key])
                ax.plot(last["steps"], values, color=f"C{ROLES.index(role) % 10}", label=role)
            ax.set(title=title, yscale="log")
        for ax, (key, title) in zip(lower, by_depth.items(), strict=False):
            depths = list(zip_longest(*last[key]))
            for depth, (values, color) in enumerate(zip(depths, dark_to_light(len(depths)), strict=True)):
                label = str(depth + (key == "logit_max")) if depth in (0, len(depths) - 1) else None
                ax.plot(last["steps"], nan_for_none(values), color=color, label=label)
            ax.set(title=f"{title}, by block", yscale="log", xlabel="step")
            if depths:
                ax.legend()
        for slot in last["gain_range"][-1]:
            values = [found.get(slot, math.nan) for found in last["gain_range"]]
            lower[2].plot(last["steps"], values, color="C7" if slot == "final_norm" else "C0", alpha=0.6)
        lower[2].set(title="gains: largest − smallest, each slot", xlabel="step")
        upper[0].legend(ncols=2)
        upper[0].set_ylabel(name)
        lower[0].set_ylabel(name)
    return figure


def draw_experts(results):
    figure, axes = make_panels(2 * len(results), 3, 2.4)
    most = np.nanmax([1, *(load for *_, last in results.values() for row in last["largest"] for load in row)])
    for (upper, lower), (name, (*_, last)) in zip(axes.reshape(-1, 2, 3), results.items(), strict=True):
        steps, experts = last["steps"], last["experts"]
        for ax, (block, load) in zip(upper, last["load"].items(), strict=False):
            values = np.maximum(np.array(load, float).T, 1e-9)  # a load of 0 has a color: the lowest
            rows = np.arange(experts + 1) + 0.5
            image = ax.pcolormesh(cell_edges(steps), rows, values, norm=LOAD_COLORS, cmap="RdBu_r")
            ax.grid(False)
            ax.set(title=f"load / mean, block {block}", ylabel="expert", xlabel="step")
            ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        for ax in upper[len(last["load"]) :]:
            ax.set_visible(False)
        bar = figure.colorbar(image, ax=upper, extend="both", ticks=(0.25, 0.5, 1, 2, 4), format="%g", pad=0.01)
        bar.ax.minorticks_off()
        lines = ("largest", "largest load / mean", 1, "even"), ("smallest", "smallest load / mean", 1, "even")
        lines += (("entropy", "entropy of the scores, nats", math.log(experts), f"ln {experts}"),)
        for ax, (key, title, limit, label) in zip(lower, lines, strict=True):
            depths = list(zip_longest(*last[key]))
            for depth, (values, color) in enumerate(zip(depths, dark_to_light(len(depths)), strict=True), 1):
                ax.plot(steps, nan_for_none(values), ".-", color=color, label=f"block {depth}")
            ax.axhline(limit, color="k", linestyle=":", linewidth=1, label=label)
            ax.set(title=title, xlabel="step")
            ax.set_ylim(bottom=0)
            handles, labels = ax.get_legend_handles_labels()  # a line for each block, then the limit
            few = range(len(depths)) if len(depths) <= 6 else (0, len(depths) - 1)
            chosen = [*few, -1] if ax is lower[0] else [-1]
            ax.legend([handles[i] for i in chosen], [labels[i] for i in chosen], fontsize="x-small", loc="best")
        lower[0].set_ylim(0, 1.05 * most)  # one scale for all runs
        lower[0].set_ylabel(name)
    label_rows(axes[::2], results)
    return figure


def cell_edges(steps: list) -> list:
    """The borders of one cell for each step, half-way to the next."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    between = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    return [2 * steps[0] - between[0], *between, 2 * steps[-1] - between[-1]]


def nan_for_none(values) -> list:
    """The values for matplotlib, which leaves out nan."""
    return [math.nan if value is None else value for value in values]
