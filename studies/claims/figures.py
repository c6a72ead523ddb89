"""The page's figures: a forest plot of the claims, and loss against learning rate."""

import math
from pathlib import Path

from studies.claims.arms import SCALES
from studies.claims.claims import CLAIMS
from studies.claims.judge import CLASSES, NOT_JUDGED
from studies.claims.statistics import interval
from studies.sweep.figure import new_figure, save_figure

COLORS = dict(zip(CLASSES, ("tab:green", "yellowgreen", "tab:gray", "tab:red", "silver"), strict=True))
COLORS[NOT_JUDGED] = "silver"
HIGHEST = 2.0  # nats, the edge of the figure on robustness
WIDEST = 12.0  # the forest plot's edge, in smallest effects of interest


def draw_forest(found: dict, scale: str, path: Path) -> None:
    """Draw every judged claim, grouped by class: our interval, and the paper's value as a diamond. An effect is divided
    by its smallest effect of interest, and the paper's sign points to the right."""
    ordered = [c for name in COLORS for c in CLAIMS if c.id in found and found[c.id]["class"] == name]
    figure, (axis,) = new_figure(1, 9.0, 0.42 * len(ordered) + 1.2)
    axis.axvspan(-1, 1, color="0.93", linewidth=0)
    axis.axvline(0, color="0.5", linewidth=0.8)
    for i, claim in enumerate(ordered):
        published, smallest = claim.effect(scale)
        row, toward = found[claim.id], claim.toward() / smallest
        color = COLORS[row["class"]]
        values = [toward * v for v in row["primary"]["values"]]
        if not all(map(math.isfinite, values)):
            axis.text(0, i, " diverged", color=color, va="center")
        else:
            mean, low, high = interval(values) if len(values) > 1 else (values[0],) * 3
            mark = "o" if abs(mean) < WIDEST else "<" if mean < 0 else ">"  # an arrow: beyond the edge
            mean, low, high = (min(max(x, -WIDEST), WIDEST) for x in (mean, low, high))
            axis.plot([low, high], [i, i], color=color, linewidth=2.5)
            axis.plot(mean, i, mark, color=color, markersize=7)
        if published is not None:
            axis.plot(toward * published, i, "D", color="black", markersize=5, fillstyle="none")
    on = f" {SCALES[scale].on}" if SCALES[scale].on else ""
    axis.set_yticks(range(len(ordered)), [f"{c.id}: {found[c.id]['class']}{on}" for c in ordered])
    axis.set_ylim(len(ordered) - 0.4, -0.6)
    axis.set_xlim(-WIDEST - 0.5, WIDEST + 0.5)
    axis.set_xlabel("effect / smallest effect of interest; the paper's sign is to the right")
    axis.plot([], [], "o-", color="0.3", label="ours, 95% interval")
    axis.plot([], [], "D", color="black", fillstyle="none", label="the paper's")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.spines[["top", "right", "left"]].set_visible(False)
    save_figure(figure, path)


def draw_robustness(curves: dict, path: Path) -> None:
    """Draw {optimizer: {layout: {learning rate over the tuned one: loss, None where it diverged}}}: how far the loss is
    above that at the tuned rate, up to HIGHEST. A cross at the top is a run that diverged."""
    curves = {optimizer: layouts for optimizer, layouts in curves.items() if layouts}
    names = list(dict.fromkeys(layout for layouts in curves.values() for layout in layouts))
    figure, axes = new_figure(len(curves), 4.0, 3.6)
    for axis, (optimizer, layouts) in zip(axes, curves.items(), strict=True):
        for layout, curve in layouts.items():
            color, size = f"C{names.index(layout)}", 6 + names.index(layout)
            ends = {x: y - curve[1.0] for x, y in curve.items() if y is not None}
            axis.plot(list(ends), list(ends.values()), "o-", markersize=3, linewidth=1.4, color=color)
            diverged = [x for x, y in curve.items() if y is None]
            axis.plot(diverged, [HIGHEST] * len(diverged), "x", color=color, markersize=size)
        axis.set_xscale("log", base=2)
        axis.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16], ["¼", "½", "1", "2", "4", "8", "16"])
        axis.set_xlim(2**-2.3, 2**4.3)
        axis.set_ylim(-0.05 * HIGHEST, 1.08 * HIGHEST)
        axis.set(title=optimizer, xlabel="learning rate / tuned learning rate")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss above that at the tuned rate, nats")
    for i, layout in enumerate(names):
        axes[0].plot([], [], "o-", markersize=3, linewidth=1.4, color=f"C{i}", label=layout)
    axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)
