"""Losses drawn: loss.png of a run directory, and what analyze.py's loss.png of several runs shares with it."""

from pathlib import Path

import numpy as np

from nanodnt.files import write_file
from nanodnt.run.metrics import read_metrics


def smoothed(values: list, share: float) -> list:
    """Moving means over a centred window of that `share` of the values, shorter at both ends. (A trailing window would
    lag behind.)"""
    half, n = int(len(values) * share / 2), len(values)
    sums = np.cumsum([0.0, *values])
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def plot_losses(ax, x: list, rows: list, smooth: float, color) -> tuple:
    """The training losses of metrics rows over x, raw and smoothed, and the validation losses, dashed. Returns the
    lines (smoothed, validation)."""
    found = []
    for key in ("train_loss", "val_loss"):
        there = [(at, row[key]) for at, row in zip(x, rows, strict=True) if row.get(key) is not None]
        found.append(tuple(zip(*there, strict=True)) if there else ((), ()))
    (steps, losses), val = found
    ax.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
    (line,) = ax.plot(steps, smoothed(losses, smooth), color=color, linewidth=1.6)
    (dashed,) = ax.plot(*val, "o--", color=color, markersize=3.5, linewidth=1)
    return line, dashed


def finish_axis(ax, rows: list, start: float) -> None:
    """Fit the y axis to the losses of the rows from step `start` on: the first ones fall from ln(vocabulary) and would
    flatten everything else."""
    late = [row.get(key) for row in rows if row["step"] >= start for key in ("train_loss", "val_loss")]
    if points := [loss for loss in late if loss is not None]:
        margin = 0.05 * (max(points) - min(points)) + 1e-3
        ax.set_ylim(min(points) - margin, max(points) + margin)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def save_figure(figure, path: Path) -> None:
    """Write a matplotlib figure as PNG, whole or not at all, and forget it."""
    from matplotlib.pyplot import close

    write_file(path, lambda f: figure.savefig(f, format="png"))
    close(figure)


def draw_loss(out_dir: Path, unit: str) -> None:
    """Draw loss.png from metrics.jsonl, or print that matplotlib is missing. `unit`: what a loss is the mean over."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("loss.png is not drawn: matplotlib is not installed")
        return
    rows = read_metrics(out_dir)
    fig = Figure(figsize=(6.4, 4), dpi=160, layout="constrained")
    ax = fig.subplots()
    line, dashed = plot_losses(ax, [row["step"] for row in rows], rows, 0.05, "tab:blue")
    line.set_label("training, smoothed")
    if len(val := dashed.get_ydata()):
        dashed.set(label=f"held-out, {val[-1]:.3f} at the end", color="tab:orange")
    per_step = next((f" ({r['tokens'] // r['step']:,} tokens each)" for r in rows[::-1] if r["step"]), "")
    ax.set(xlabel=f"step{per_step}", ylabel=f"loss (nats per {unit})", title=out_dir.name.replace("$", r"\$"))
    finish_axis(ax, rows, 0.05 * rows[-1]["step"])
    ax.legend(frameon=False)
    save_figure(fig, out_dir / "loss.png")
