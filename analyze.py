"""The papers' figures from runs, and runs compared.

python analyze.py out/dnt_small                                # every figure that applies, in out/dnt_small/analysis
python analyze.py out/gpt2_small out/dnt_small --figures=gradients,sharpness  # side by side, and a page, report.html
python analyze.py out/dnt_small/step_2000.pt --figures=gradients   # one checkpoint: DNT's Fig. 1 is of an early one

Every figure is a PNG and a JSON, which holds all that is drawn and how it was measured; diagnostics.py has the
definitions. The data are validation windows, the same every time. What is over training is of the checkpoints that a
run kept (train.py --keep_every), and of its rows.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import SymLogNorm
from matplotlib.ticker import MaxNLocator

import diagnostics as d
import report
import rundir
import runtime
from configurator import configure
from loader import Dataset
from model import GPT, ROLES


@dataclass
class AnalyzeConfig:
    # --- what to draw ---
    figures: str = "all"  # all, or a comma list of gradients, sharpness, norms, alpha, scatter, variance, angular,
    #   removal, jacobian, gains, logits, tracking
    out: str = ""  # the folder for the results; empty = RUN/analysis, for several runs out/analysis
    report: bool = False  # also for one run: its losses and all figures in one page, report.html
    baseline: str = ""  # the run that others are compared with, by name; empty = the first
    smooth: float = 0.05  # training losses are means over a window of this share of the run
    # --- what to measure on ---
    dataset: str = ""  # its validation windows are read; empty = the run's own
    tokens: int = 65536  # of them at most; costly figures take fewer, and each says how many it took
    draws: int = 8  # sampled gradients that sharpness is the mean of
    snapshots: int = 6  # checkpoints that figures over training use at most, evenly spread
    seed: int = 1337  # of sampled labels, positions and points
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps

    def __post_init__(self):
        unknown = [name for name in self.wanted() if name not in FIGURES]
        if unknown or not self.wanted():
            raise ValueError(f"figures={self.figures!r} has {unknown or 'none'}: allowed are all, {', '.join(FIGURES)}")
        for name in ("tokens", "draws", "snapshots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative")

    def wanted(self) -> list:
        names = [name.strip() for name in self.figures.split(",") if name.strip()]
        return list(FIGURES) if names == ["all"] else list(dict.fromkeys(names))


class LeftOut(Exception):
    """A figure does not apply to a run, for this reason."""


# -------------------------------------------------------------------------------------------------------- runs


class Run:
    """A run directory, or one checkpoint file in it: its snapshots and the batch that they are measured on."""

    def __init__(self, path: Path, name: str, config: AnalyzeConfig, device: torch.device):
        self.name, self.config, self.device, self.folder = name, config, device, path if path.is_dir() else path.parent
        kept = kept_checkpoints(path) if path.is_dir() else [path]
        self.snapshots = spread(kept, config.snapshots)
        checkpoint = rundir.load_checkpoint(kept[-1])
        self.block_size, saved = checkpoint["model_config"]["block_size"], checkpoint["meta"]
        dataset = config.dataset or checkpoint["train_config"]["dataset"]
        self.data, vocabulary = Dataset(dataset, self.block_size), ("tokenizer", "vocab_size", "chars")
        if any(self.data.meta.get(key) != saved.get(key) for key in vocabulary):
            here, there = (f"{meta['tokenizer']}, {meta['vocab_size']} tokens" for meta in (self.data.meta, saved))
            raise ValueError(
                f"dataset {dataset!r} ({here}) is not what {path} reads ({there}): choose another --dataset"
            )
        if self.data.meta["splits"]["val"] != saved.get("splits", {}).get("val"):
            print(f"note: {name}: the validation text of {dataset!r} is not the one of its training")
        if len(kept) == 1 and path.is_dir():
            print(f"note: {name} has kept one checkpoint, so nothing is over training: train with --keep_every=N")

    def load(self, path: Path) -> tuple:
        """(model in eval mode, fp32, on the device; step)."""
        checkpoint = rundir.load_checkpoint(path)
        return GPT.from_checkpoint(checkpoint).eval().to(self.device), checkpoint["step"]

    def taken(self, most: int) -> int:
        """How many tokens `batch` gives."""
        return len(self.data.validation(min(most, self.config.tokens))) * self.block_size

    def batch(self, most: int) -> tuple:
        """Inputs and targets (B, T) of at most `most` tokens, as many as config.tokens allows, at least one window."""
        starts = self.data.validation(min(most, self.config.tokens))
        return tuple(torch.from_numpy(a).to(self.device) for a in self.data.val_batch(starts, len(starts)))

    def micro_batches(self, most: int) -> list:
        rows = max(1, d.MICRO_TOKENS // self.block_size)
        return list(zip(*(a.split(rows) for a in self.batch(most)), strict=True))

    def generator(self, device="cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.config.seed)


def kept_checkpoints(folder: Path) -> list:
    """step_N.pt and last.pt, by step. ValueError where there is none."""
    steps = {int(p.stem[5:]): p for p in folder.glob("step_*.pt") if p.stem[5:].isdigit()}
    if (folder / "last.pt").exists():
        steps[rundir.load_checkpoint(folder / "last.pt")["step"]] = folder / "last.pt"
    if not steps:
        there = ", ".join(sorted(p.name for p in folder.glob("*.pt"))) or "no checkpoint at all"
        raise ValueError(
            f"{folder} holds neither last.pt nor step_N.pt ({there}): name a run directory or a checkpoint"
        )
    return [steps[step] for step in sorted(steps)]


def spread(items: list, most: int) -> list:
    """At most so many of them, evenly spread, the last always and the first where there is room."""
    if len(items) <= most:
        return items
    return [items[-1]] if most == 1 else [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# ------------------------------------------------------------------------- measuring: (run, model, tokens) → a dict

SCATTER_TOKENS, SCATTER_POINTS = 128, 3000  # few tokens, so that the line of each can be seen
JACOBIAN_SEQUENCES, JACOBIAN_TOKENS = 16, 128  # one position of each [I]


def measure_gradients(run, model, tokens):
    found, types = d.gradients(model, run.micro_batches(tokens)), d.matrix_types(model)
    pooled = {}
    for kind in MATRICES:
        g = torch.cat([found[name].flatten() for name, its in types.items() if its == kind])
        statistics = d.tail_statistics(g)
        pooled[kind] = {
            **statistics,
            "histogram_of_g_over_rms": d.log_histogram(g / (statistics["rms"] or 1), 80, 1e-6, 1e4),
        }
    return {"tokens": run.taken(tokens), "types": pooled}


def measure_sharpness(run, model, tokens):
    idx, types = run.batch(tokens)[0], d.block_types(model)
    h = d.sharpness(model, idx, run.config.draws, run.generator(run.device))
    h = d.without_padding(model, h)
    density = {
        kind: d.log10_density(torch.cat([t.flatten() for name, t in h.items() if types[name] == kind]), 60)
        for kind in dict.fromkeys(types.values())
    }
    found = {"types": d.sharpness_by(h, types), "layers": d.sharpness_by_layer(model, h), "log10_density": density}
    return {"tokens": idx.numel(), "draws": run.config.draws, **found}


def measure_norms(run, model, tokens):
    return {"types": d.parameter_norms(model)}


def measure_alpha(run, model, tokens):
    slots = d.dyt_alphas(model, run.batch(tokens)[0])
    if not slots:
        raise LeftOut("no DyT")
    alpha, inv_std = ([slot[key] for slot in slots] for key in ("alpha", "inv_std"))
    spread = min(np.ptp(alpha), np.ptp(inv_std)) if len(slots) > 2 else 0
    return {
        "tokens": run.taken(tokens),
        "slots": slots,
        "pearson_r": float(np.corrcoef(alpha, inv_std)[0, 1]) if spread else math.nan,
    }


def measure_scatter(run, model, tokens):
    names = spread(list(d.norm_slots(model)), 3)
    if not names:
        raise LeftOut("no norm on the residual path")
    idx = run.batch(tokens)[0][:, :SCATTER_TOKENS]
    points = {name: d.norm_scatter(model, idx, name, SCATTER_POINTS, run.generator()) for name in names}
    kinds = {name: slot.norm for name, slot in d.norm_slots(model).items()}
    return {"tokens": idx.numel(), "slots": {name: {"norm": kinds[name], **points[name]} for name in names}}


def measure_variance(run, model, tokens):
    return {"tokens": run.taken(tokens), **d.stream_variance(model, run.batch(tokens)[0])}


def measure_angular(run, model, tokens):
    return {"tokens": run.taken(tokens), "distance": d.angular_distance(d.streams(model, run.batch(tokens)[0]))}


def measure_removal(run, model, tokens):
    return {"tokens": run.taken(tokens), **d.removal_drop(model, run.micro_batches(tokens))}


def measure_jacobian(run, model, tokens):
    idx = run.batch(JACOBIAN_SEQUENCES * run.block_size)[0][:JACOBIAN_SEQUENCES, :JACOBIAN_TOKENS]
    positions = torch.randint(idx.shape[1], (len(idx),), generator=run.generator()).tolist()
    width, blocks = model.config.n_embd, len(model.blocks)
    channels = [i * width // min(64, width) for i in range(min(64, width))]
    shown, maps, by_layer = spread(list(range(blocks)), 3), {}, {"attn": [], "mlp": []}
    for branch, statistics in by_layer.items():
        for block in range(blocks):
            jacobian = d.residual_jacobian(model, idx, positions, block, branch)
            statistics.append(d.jacobian_statistics(jacobian))
            if block in shown:
                maps.setdefault(branch, []).append(
                    {"block": block + 1, "map": jacobian[channels][:, channels].tolist()}
                )
    return {"tokens": len(positions), "positions": positions, "channels": channels, "maps": maps, "layers": by_layer}


def measure_gains(run, model, tokens):
    slots = d.gain_statistics(model)
    if not slots:
        raise LeftOut("no scale vector")
    return {"slots": slots, "cosines": d.qkv_cosines(model)}


def measure_logits(run, model, tokens):
    return {"tokens": run.taken(tokens), "layers": d.logit_max(model, run.batch(tokens)[0])}


def measure_tracking(run, model, tokens):
    rows = [row for row in rundir.read_metrics(run.folder) if isinstance(row.get("track"), dict)]
    if not rows:
        raise LeftOut("metrics.jsonl has no tracked rows (train.py --track_interval)")
    tracks = [row["track"] for row in rows]
    by_role = {key: [t.get(key) or {} for t in tracks] for key in ("grad_norm", "grad_kurtosis", "update_ratio")}
    by_depth = {key: [t.get(key) or [] for t in tracks] for key in ("stream_var", "logit_max")}
    gains = [(t.get("gain") or {}).items() for t in tracks]
    spread = [{slot: g[2] - g[1] for slot, g in found if None not in g} for found in gains]
    return {"steps": [row["step"] for row in rows], **by_role, **by_depth, "gain_range": spread}


# ------------------------------------------------------- drawing: {run name: [what was measured, by snapshot]} → figure

MATRICES = {"q": "$W_Q$", "k": "$W_K$", "v": "$W_V$", "o": "$W_O$", "w1": "$W_1$ (up, gate)", "w2": "$W_2$ (down)"}
KINDS = dict(
    zip(("emb", "pos", "head", "qk", "ffn", "vo", "norm"), (f"C{i}" for i in (0, 4, 5, 1, 2, 3, 7)), strict=True)
)
BRANCHES = {"attn": "attention", "mlp": "FFN"}
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "figure.titlesize": 10, "axes.grid": True}
STYLE |= {"grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"legend.frameon": False, "lines.markersize": 3.5, "lines.linewidth": 1.3, "savefig.dpi": 130}


def panels(rows: int, columns: int, height: float = 2.2, **how) -> tuple:
    """(figure, array of axes (rows, columns)), of a width that can be read on a page."""
    return plt.subplots(rows, columns, figsize=(9.5, height * rows + 0.6), squeeze=False, layout="constrained", **how)


def over_steps(ax, measured: list, value: Callable, **how) -> None:
    """A line of value(m) over the steps of the snapshots."""
    ax.plot([m["step"] for m in measured], [value(m) for m in measured], "o-", **how)


def by_block(ax, values: list, *style, first: int = 1, **how) -> None:
    """A line of one value a block."""
    ax.plot(range(first, first + len(values)), values, *(style or ("o-",)), **how)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def shades(n: int) -> list:
    """n colours from dark to light: depth, or time."""
    return [plt.colormaps["viridis"](0.9 * i / max(1, n - 1)) for i in range(n)]


def title_rows(axes, results: dict) -> None:
    """Each run's name at the left of its row."""
    for ax, name in zip(axes[:, 0], results, strict=True):
        ax.set_ylabel(f"{name}\n{ax.get_ylabel()}")


def draw_gradients(results):
    figure, axes = panels(len(MATRICES), 4, 1.5, sharex="col", sharey="col")
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
    for ax, title in zip(
        axes[0], ("density per decade", "share ≥ |g|", "density per decade", "share ≥ |g|"), strict=True
    ):
        ax.set_title(title)
    for ax, label in zip(axes[-1], ("|g|", "|g|", "|g| / RMS", "|g| / RMS"), strict=True):
        ax.set_xlabel(label)
    axes[0, 0].legend()
    return figure


def draw_sharpness(results):
    figure, axes = panels(len(results), 4, 2.5, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        last = measured[-1]
        kinds = [kind for kind in KINDS if kind in last["types"]]
        for i, kind in enumerate(kinds):
            color, found = KINDS[kind], last["types"][kind]
            row[0].bar(i - 0.2, found["arithmetic"], 0.4, color=color)
            row[0].bar(i + 0.2, found["geometric"], 0.4, color=color, alpha=0.45, hatch="///")
            over_steps(row[1], measured, lambda m, kind=kind: m["types"][kind]["arithmetic"], color=color, label=kind)
            density = last["log10_density"][kind]
            centres = (np.array(density["edges"][1:]) + density["edges"][:-1]) / 2
            row[2].plot(centres, density["density"], color=color)
            if kind in last["layers"]:
                by_block(row[3], last["layers"][kind], color=color)
        row[0].set_xticks(range(len(kinds)), kinds, rotation=60)
        for ax, label in zip(row, ("type", "step", "log₁₀ h", "block"), strict=True):
            ax.set_xlabel(label if label != "type" else "")
        for ax in (row[0], row[1], row[3]):
            ax.set_yscale("log")
    for ax, title in zip(
        axes[0],
        (
            "mean h: arithmetic,\nhatched: geometric",
            "arithmetic mean h",
            "density of log₁₀ h\n(at the end)",
            "by block (at the end)",
        ),
        strict=True,
    ):
        ax.set_title(title)
    axes[0, 1].legend(ncols=2)
    title_rows(axes, results)
    return figure


def draw_norms(results):
    kinds = [kind for kind in KINDS if any(kind in m[-1]["types"] for m in results.values())]
    figure, axes = panels(-(-len(kinds) // 4), 4, 2.2)
    for ax, kind in zip(axes.flat, kinds, strict=False):
        for i, (name, measured) in enumerate(results.items()):
            if kind in measured[-1]["types"]:
                over_steps(ax, measured, lambda m, kind=kind: m["types"][kind], label=name, color=f"C{i}")
        ax.set(title=kind, xlabel="step")
    for ax in axes.flat[len(kinds) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("L2 norm")
    axes[0, 0].legend()
    return figure


def draw_alpha(results):
    figure, axes = panels(len(results), 3, 2.7)
    for row, measured in zip(axes, results.values(), strict=True):
        slots = measured[-1]["slots"]
        for i, (slot, color) in enumerate(zip(slots, shades(len(slots)), strict=True)):
            how = dict(color=color, label=short(slot["slot"]))
            over_steps(row[0], measured, lambda m, i=i: m["slots"][i]["alpha"], **how)
            over_steps(row[1], measured, lambda m, i=i: m["slots"][i]["inv_std"], **how)
            row[2].plot(slot["inv_std"], slot["alpha"], "o", markersize=6, **how)
        row[0].set(xlabel="step", ylabel="α", title="α over training")
        row[1].set(xlabel="step", ylabel="1 / std of the input", title="1/std over training")
        row[2].set(
            xlabel="1 / std of the input", ylabel="α", title=f"at the end: Pearson r = {measured[-1]['pearson_r']:.2f}"
        )
        chosen = spread(list(range(len(slots))), 5)
        handles, labels = row[2].get_legend_handles_labels()
        row[2].legend([handles[i] for i in chosen], [labels[i] for i in chosen])
    title_rows(axes, results)
    return figure


def draw_scatter(results):
    most = max(len(m[-1]["slots"]) for m in results.values())
    figure, axes = panels(2 * len(results), most, 2.4)
    for i, (name, (*_, last)) in enumerate(results.items()):
        for column, (slot, p) in enumerate(last["slots"].items()):
            x = np.linspace(min(p["x"]), max(p["x"]), 200)
            fit = f"{p['amplitude']:.3g} tanh({p['slope']:.3g} x), R² {p['r2']:.3f}; line {p['linear_r2']:.3f}"
            for row, by in ((2 * i, "token"), (2 * i + 1, "channel")):
                ax = axes[row, column]
                ax.scatter(p["x"], p["y"], c=p[by], cmap="turbo", s=3, linewidths=0, rasterized=True)
                ax.plot(x, p["amplitude"] * np.tanh(p["slope"] * x), "k--", lw=1)
                ax.set_title(f"{short(slot)} ({p['norm']})\n{fit}" if by == "token" else "", fontsize=8)
                ax.set_xlabel("input x" if by == "channel" else "")
                if column == 0:
                    ax.set_ylabel(f"{name}, by {by}\noutput y")
        for ax in axes[2 * i : 2 * i + 2, len(last["slots"]) :].flat:
            ax.set_visible(False)
    return figure


def draw_variance(results):
    figure, axes = panels(len(results), 2, 2.5, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        for m, color in zip(measured, shades(len(measured)), strict=True):
            by_block(row[0], m["stream"], first=0, color=color, label=f"step {m['step']}")
        by_block(row[0], m["stream_global"], "k:", first=0, label="over all elements")
        for branch, label in BRANCHES.items():
            by_block(row[1], m[branch], label=label)
        row[0].set(xlabel="after block (0: what enters the first)", ylabel="variance", yscale="log")
        row[1].set(xlabel="block", ylabel="variance", yscale="log")
    axes[0, 0].set_title("residual stream")
    axes[0, 1].set_title("branch outputs, as they are added (at the end)")
    axes[0, 0].legend(ncols=2)
    axes[0, 1].legend()
    title_rows(axes, results)
    return figure


def draw_angular(results):
    columns = min(3, len(results))
    figure, axes = panels(-(-len(results) // columns), columns, 3.0)
    top = max(max(map(max, m[-1]["distance"])) for m in results.values())
    for ax, (name, (*_, last)) in zip(axes.flat, results.items(), strict=False):
        image = ax.imshow(last["distance"], cmap="magma", vmin=0, vmax=top, origin="lower")
        ax.grid(False)
        ax.set(title=name, xlabel="after block", ylabel="after block")
    for ax in axes.flat[len(results) :]:
        ax.set_visible(False)
    figure.colorbar(image, ax=axes, label="arccos(cosine) / π", shrink=0.8)
    return figure


def draw_removal(results):
    figure, ((ax,),) = panels(1, 1, 3.0)
    for i, (name, (*_, last)) in enumerate(results.items()):
        layers = np.arange(1, len(last["drop"]) + 1)
        ax.bar(
            layers + 0.8 * ((i + 0.5) / len(results) - 0.5),
            last["drop"],
            0.8 / len(results),
            label=f"{name}, full {last['loss']:.3f}",
        )
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="deleted block", ylabel="loss above the full model's, nats")
    ax.legend()
    return figure


def draw_jacobian(results):
    most = max(len(m[-1]["maps"]["attn"]) for m in results.values())
    figure, axes = panels(2 * len(results), most + 1, 1.9)
    for i, (name, (*_, last)) in enumerate(results.items()):
        for row, (branch, label) in zip(axes[2 * i : 2 * i + 2], BRANCHES.items(), strict=True):
            statistics = last["layers"][branch]
            for ax, shown in zip(row, last["maps"][branch], strict=False):
                image = ax.imshow(shown["map"], cmap="RdBu_r", norm=SymLogNorm(0.01, vmin=-1, vmax=1))
                ax.grid(False)
                ax.set_title(
                    f"block {shown['block']}: ‖J−I‖/√C {statistics[shown['block'] - 1]['deviation']:.2f}", fontsize=8
                )
                ax.set(xticks=[], yticks=[])
            row[0].set_ylabel(f"{name}\n{label}")
            for key, style in (("deviation", "o-"), ("off_diagonal", "s--")):
                by_block(row[-1], [s[key] for s in statistics], style, label=LABELS[key])
            row[-1].set_ylim(bottom=0)
            row[-1].set_xlabel("block")
            for ax in row[len(last["maps"][branch]) : -1]:
                ax.set_visible(False)
    axes[0, -1].legend()
    figure.colorbar(image, ax=axes[:, :-1], label="∂y/∂x", shrink=0.5, aspect=40)
    return figure


LABELS = {"deviation": "‖J−I‖/√C", "off_diagonal": "off-diagonal share"}


def draw_gains(results):
    any_cosines = any(m[-1]["cosines"] for m in results.values())
    figure, axes = panels(len(results), 2 + any_cosines, 2.7, sharey="col")
    for row, measured in zip(axes, results.values(), strict=True):
        slots = list(measured[-1]["slots"])
        places = list(dict.fromkeys(map(place, slots)))
        for slot in slots:
            first = slot == next(s for s in slots if place(s) == place(slot))
            how = dict(color=f"C{places.index(place(slot)) % 10}", label=place(slot) if first else None, alpha=0.75)
            over_steps(row[0], measured, lambda m, s=slot: m["slots"][s]["rms"], **how)
            over_steps(row[1], measured, lambda m, s=slot: m["slots"][s]["std"] / m["slots"][s]["rms"], **how)
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
    title_rows(axes, results)
    return figure


def draw_logits(results):
    figure, ((left, right),) = panels(1, 2, 2.8)
    for i, (name, measured) in enumerate(results.items()):
        by_block(left, measured[-1]["layers"], label=name)
        over_steps(right, measured, lambda m: max(m["layers"]), label=name, color=f"C{i}")
    left.set(xlabel="block", ylabel="largest |q·k| / √head_dim", title="at the end", yscale="log")
    right.set(xlabel="step", title="over training, the largest of all blocks", yscale="log")
    left.legend()
    return figure


def draw_tracking(results):
    by_role = {
        "grad_norm": "gradient norm",
        "grad_kurtosis": "gradient kurtosis",
        "update_ratio": "update / weight norm",
    }
    by_depth = {"stream_var": "variance of the stream", "logit_max": "largest attention logit"}
    figure, axes = panels(2 * len(results), 3, 2.4)
    for (upper, lower), (name, (*_, last)) in zip(axes.reshape(-1, 2, 3), results.items(), strict=True):
        for ax, (key, title) in zip(upper, by_role.items(), strict=True):
            for role in [role for role in ROLES if any(role in values for values in last[key])]:
                values = [v.get(role) for v in last[key]]
                values = [math.nan if v is None else v for v in values]
                ax.plot(last["steps"], values, color=f"C{ROLES.index(role) % 10}", label=role)
            ax.set(title=title, yscale="log")
        for ax, (key, title) in zip(lower, by_depth.items(), strict=False):
            depths = list(zip_longest(*last[key]))
            for depth, (values, color) in enumerate(zip(depths, shades(len(depths)), strict=True)):
                values = [math.nan if v is None else v for v in values]
                label = str(depth + (key == "logit_max")) if depth in (0, len(depths) - 1) else None
                ax.plot(last["steps"], values, color=color, label=label)
            ax.set(title=f"{title}, by block", yscale="log", xlabel="step")
            if depths:
                ax.legend()
        for slot in last["gain_range"][-1]:
            values = [found.get(slot, math.nan) for found in last["gain_range"]]
            lower[2].plot(last["steps"], values, color="C7" if slot == "final_norm" else "C0", alpha=0.6)
        lower[2].set(title="gains: largest − least, each slot", xlabel="step")
        upper[0].legend(ncols=2)
        upper[0].set_ylabel(name)
        lower[0].set_ylabel(name)
    return figure


def place(slot: str) -> str:
    """Where a slot stands, whatever its block: blocks.3.attn.f.q_norm → attn q_norm."""
    parts = slot.split(".")
    return " ".join(part for part in parts[2 * (parts[0] == "blocks") :] if part != "f")


def short(slot: str) -> str:
    """blocks.3.attn.pre → 4 attn pre: blocks are counted from 1."""
    parts = slot.split(".")
    return f"{int(parts[1]) + 1} {place(slot)}" if parts[0] == "blocks" else slot


# ----------------------------------------------------------------------------------------------------- figures


class Figure(NamedTuple):
    measure: Callable
    draw: Callable
    every: bool  # whether of every snapshot, or of the last alone
    tokens: int = 0  # to measure on at most, if any


FIGURES = {  # report.CAPTIONS says what they show
    "gradients": Figure(measure_gradients, draw_gradients, False, 2**20),
    "sharpness": Figure(measure_sharpness, draw_sharpness, True, 4096),
    "norms": Figure(measure_norms, draw_norms, True),
    "alpha": Figure(measure_alpha, draw_alpha, True, 8192),
    "scatter": Figure(measure_scatter, draw_scatter, False, SCATTER_TOKENS),
    "variance": Figure(measure_variance, draw_variance, True, 8192),
    "angular": Figure(measure_angular, draw_angular, False, 8192),
    "removal": Figure(measure_removal, draw_removal, False, 32768),
    "jacobian": Figure(measure_jacobian, draw_jacobian, False, JACOBIAN_SEQUENCES * JACOBIAN_TOKENS),
    "gains": Figure(measure_gains, draw_gains, True),
    "logits": Figure(measure_logits, draw_logits, True, 8192),
    "tracking": Figure(measure_tracking, draw_tracking, False),
}


def measure(runs: list, names: list) -> dict:
    """{figure: {run: [{"checkpoint", "step", and what was measured}, one of each snapshot it is of]}}; each checkpoint
    is read once. ValueError where no figure applies to any run."""
    results, reasons = {name: {} for name in names}, []
    for run in runs:
        left = list(names)
        for i, path in enumerate(run.snapshots, 1):
            model, step = run.load(path)
            for name in [n for n in left if FIGURES[n].every or i == len(run.snapshots)]:
                start = time.perf_counter()
                try:
                    found = FIGURES[name].measure(run, model, FIGURES[name].tokens)
                except LeftOut as e:
                    left.remove(name)
                    reasons.append(f"{run.name}: {name} is left out: {e}")
                    print(reasons[-1])
                    continue
                results[name].setdefault(run.name, []).append({"checkpoint": path.name, "step": step, **found})
                which = f" {i}/{len(run.snapshots)} checkpoints" if FIGURES[name].every else ""
                print(f"{run.name}: {name}{which}, {time.perf_counter() - start:.1f} s")
    if not any(results.values()):
        raise ValueError(f"nothing to draw: {'; '.join(reasons)}")
    return {name: found for name, found in results.items() if found}


def write(name: str, results: dict, config: AnalyzeConfig, folder: Path) -> Path:
    """Draw figure `name` of what was measured, and write it beside its numbers: name.png, name.json."""
    shows, source = report.CAPTIONS[name]
    used = [(m.get("tokens"), m.get("draws")) for measured in results.values() for m in measured]
    tokens, draws = used[0]
    how = (f"; {tokens:,} tokens" if tokens else "") + (f", {draws} draws" if draws else "")
    with plt.rc_context(STYLE):
        figure = FIGURES[name].draw(
            {run.replace("$", r"\$"): found for run, found in results.items()}
        )  # else mathematics
        figure.suptitle(f"{shows}{f' ({source})' if source else ''}{how}")
        rundir.write_file(folder / f"{name}.png", lambda f: figure.savefig(f, format="png"))
        plt.close(figure)
    record = {"figure": name, "shows": shows, "source": source, "settings": asdict(config), "runs": plain(results)}
    rundir.write_file(folder / f"{name}.json", lambda f: f.write(json.dumps(record).encode()))
    return folder / f"{name}.png"


def plain(value):
    """`value` for JSON: floats to 6 digits, and null for nan and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


TAILS = ("kurtosis", "max_over_rms", "p999_over_p50", "hill", "participation")


def print_tails(results: dict) -> None:
    """The scale-free statistics of the gradients as a table."""
    width = max(map(len, results))
    print(f"{'gradients of':<{width + 4}}" + "".join(f"{name:>15}" for name in ("rms", *TAILS)))
    for run, (*_, last) in results.items():
        for kind, found in last["types"].items():
            print(f"{run:<{width}} {kind:<3}" + "".join(f"{found[name]:>15.4g}" for name in ("rms", *TAILS)))


def output_folder(runs: list, config: AnalyzeConfig) -> Path:
    folder = runs[0].folder / "analysis" if len(runs) == 1 else Path("out/analysis")
    folder = Path(config.out or folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"cannot use {folder} ({e.strerror}): choose another --out") from None
    return folder


def analyze(paths: list, config: AnalyzeConfig) -> None:
    device, _ = runtime.choose_device(config.device)
    named = [path.with_suffix("") if path.is_file() else path for path in paths]
    runs = [Run(path, name, config, device) for path, name in zip(paths, report.distinct_names(named), strict=True)]
    folder = output_folder(runs, config)
    compared, drawn = [], []
    alone = len(runs) == 1 and not config.report
    if alone and (config.baseline or config.smooth != AnalyzeConfig.smooth):
        raise ValueError("baseline and smooth are for runs compared: name several, or add --report=True")
    if not alone:  # first: what is wrong with the records is found in no time
        compared = report.load_runs(list(dict.fromkeys(run.folder for run in runs)))
        table = report.compare(compared, folder, config.baseline, config.smooth)["table"]
        print(report.terminal_text(table))
        drawn.append(folder / "loss.png")
    results = measure(runs, config.wanted())
    for name, found in results.items():
        drawn.append(write(name, found, config, folder))
    if "gradients" in results:
        print_tails(results["gradients"])
    if compared:
        drawn.append(report.write_report(compared, folder, drawn, config.baseline))
    print("\n".join(map(str, drawn)))


def main() -> int:
    (config,), given = configure(AnalyzeConfig, description=__doc__, positional="run")
    try:
        paths = [Path(path) for path in given["run"][0]]
        if not paths:
            raise ValueError("no run is named: python analyze.py RUN [RUN ...], a run directory or a checkpoint of one")
        if missing := [str(path) for path in paths if not path.exists()]:
            raise ValueError(f"there is no {', '.join(missing)}: name run directories, or checkpoint files in them")
        analyze(paths, config)
        return 0
    except runtime.EXPECTED as e:
        return runtime.report(e)


if __name__ == "__main__":
    sys.exit(main())
