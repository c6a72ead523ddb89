"""loss.png of a run directory."""

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


def draw_loss(out_dir: Path, title: str) -> Path | None:
    """Draw loss.png from metrics.jsonl and return its path; None, with a message, where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("loss.png is not drawn: matplotlib is not installed")
        return None
    rows = read_metrics(out_dir)
    train, val = ([(r["step"], r[k]) for r in rows if r.get(k) is not None] for k in ("train_loss", "val_loss"))
    fig, ax = plt.subplots(figsize=(6.4, 4), dpi=160)
    if train:
        steps, losses = zip(*train, strict=True)
        ax.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        ax.plot(steps, smoothed(losses, 0.05), color="tab:blue", linewidth=1.6, label="training, smoothed")
    if val:
        label = f"held-out, {val[-1][1]:.3f} at the end"
        ax.plot(*zip(*val, strict=True), "o-", color="tab:orange", markersize=3.5, linewidth=1.4, label=label)
    points = [loss for step, loss in train + val if step >= 0.05 * rows[-1]["step"]]
    if points:  # not the first steps: they fall from ln(vocabulary) and would flatten everything else
        low, high = min(points), max(points)
        ax.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    per_step = next((f" ({r['tokens'] // r['step']:,} tokens each)" for r in rows[::-1] if r["step"]), "")
    ax.set(xlabel=f"step{per_step}", ylabel="loss (nats per token)", title=title.replace("$", r"\$"))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if train or val:
        ax.legend(frameon=False)
    fig.tight_layout()
    path = out_dir / "loss.png"
    write_file(path, lambda f: fig.savefig(f, format="png"))
    plt.close(fig)
    return path
