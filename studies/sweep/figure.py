"""Loss against a swept number: one curve a layout or optimizer, a band over the seeds, crosses for diverged runs."""

import math
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def new_figure(n: int, width: float = 6.0, height: float = 4.0):
    """(figure, its n axes side by side, which share the y axis)."""
    how = dict(sharey=True, squeeze=False, dpi=100, layout="constrained")
    figure, axes = plt.subplots(1, n, figsize=(width * n, height), **how)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def draw_curves(axis, curves: dict, xlabel: str, ylabel: str, highest: float | None = None) -> None:
    """Draw {name: {x: losses of the seeds, None for a run that diverged}}, up to `highest`.

    A line joins the means of the x where some run ended well; crosses at the top are runs that diverged."""
    every = [loss for points in curves.values() for losses in points.values() for loss in losses]
    ends = [loss for loss in every if loss is not None]
    low, high = (min(ends), highest or max(ends)) if ends else (0.0, 1.0)
    top = high + 0.06 * (high - low or 1.0)
    marks = "os^vD"  # after ten colours
    for i, (name, points) in enumerate(curves.items()):
        finished = {x: [loss for loss in losses if loss is not None] for x, losses in points.items()}
        finished = {x: losses for x, losses in finished.items() if losses}
        means = [statistics.mean(losses) for losses in finished.values()]
        how = dict(color=f"C{i % 10}", marker=marks[i // 10 % len(marks)])
        (line,) = axis.plot(list(finished), means, "-", markersize=4, linewidth=1.5, label=name, **how)
        lowest, highest_loss = ([end(losses) for losses in finished.values()] for end in (min, max))
        axis.fill_between(list(finished), lowest, highest_loss, color=line.get_color(), alpha=0.2, linewidth=0)
        diverged = [x for x, losses in points.items() if None in losses]
        axis.plot(diverged, [top] * len(diverged), "x", color=line.get_color(), markersize=6 + i % 10, zorder=3)
    xs = sorted({x for points in curves.values() for x in points})
    if len(xs) > 1 and xs[0] > 0 and xs[-1] / xs[0] > 3:
        axis.set_xscale("log", base=2 if all(math.log2(x / xs[0]).is_integer() for x in xs) else 10)
        axis.set_xticks(xs, [f"{x:g}" for x in xs], rotation=45)
        axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    if highest:
        axis.set_ylim(top=top + 0.02 * highest)
    if None in every:
        axis.plot([], [], "kx", label="diverged")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
