"""The page's figures: a forest plot of the claims, and loss against learning rate."""

import math
from pathlib import Path

from nanodnt.run.loss_curve import save_figure
from studies.claims.arms import LAYOUTS
from studies.claims.experiment import Experiment
from studies.claims.judge import CLASSES, NOT_JUDGED, interval
from studies.sweep.figure import draw_curves, new_figure

COLORS = dict(zip(CLASSES, ("tab:green", "yellowgreen", "tab:gray", "tab:red", "silver"), strict=True))
COLORS[NOT_JUDGED] = "silver"
HIGHEST = 2.0  # nats, the edge of the figure on robustness
WIDEST = 12.0  # the forest plot's edge, in smallest effects of interest


def draw_forest(found: dict, experiment: Experiment, path: Path) -> None:
    """Draw every judged claim, grouped by class: our interval, and the paper's value as a diamond. An effect is divided
    by its smallest effect of interest, and the paper's sign points to the right."""
    ordered = [c for name in COLORS for c in experiment.claims if c.id in found and found[c.id]["class"] == name]
    figure, (axis,) = new_figure(1, 9.0, 0.42 * len(ordered) + 1.2)
    axis.axvspan(-1, 1, color="0.93", linewidth=0)
    axis.axvline(0, color="0.5", linewidth=0.8)
    for i, claim in enumerate(ordered):
        published, smallest = claim.effect(experiment.config.scale)
        row, unit = found[claim.id], smallest * claim.toward()
        color, values = COLORS[row["class"]], [value / unit for value in row["primary"]]
        if not all(map(math.isfinite, values)):
            axis.text(0, i, " diverged", color=color, va="center")
        else:
            ours = interval(values) if len(values) > 1 else (values[0],) * 3
            mean, low, high = (min(max(x, -WIDEST), WIDEST) for x in ours)
            mark = {-WIDEST: "<", WIDEST: ">"}.get(mean, "o")  # an arrow: beyond the edge
            axis.plot([low, high], [i, i], color=color, linewidth=2.5)
            axis.plot(mean, i, mark, color=color, markersize=7)
        if published is not None:
            axis.plot(published / unit, i, "D", color="black", markersize=5, fillstyle="none")
    axis.set_yticks(range(len(ordered)), [f"{c.id}: {found[c.id]['class']}{experiment.scale.on}" for c in ordered])
    axis.set_ylim(len(ordered) - 0.4, -0.6)
    axis.set_xlim(-WIDEST - 0.5, WIDEST + 0.5)
    axis.set_xlabel("effect / smallest effect of interest; the paper's sign is to the right")
    axis.plot([], [], "o-", color="0.3", label="ours, 95% interval")
    axis.plot([], [], "D", color="black", fillstyle="none", label="the paper's")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def draw_robustness(curves: dict, path: Path) -> None:
    """Draw {(optimizer, layout): {learning rate over the tuned one: loss, None where it diverged}}: how far the loss is
    above that at the tuned rate, up to HIGHEST. A cross at the top is a run that diverged."""
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in curves))
    figure, axes = new_figure(len(optimizers), 4.0, 3.6)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        rises = {layout: {} for layout in LAYOUTS}  # of all, so that each has its color
        for layout in rises:
            curve = curves.get((optimizer, layout), {})
            rises[layout] = {x: [loss if loss is None else loss - curve[1.0]] for x, loss in curve.items()}
        draw_curves(axis, rises, "learning rate / tuned one", "loss above that at the tuned rate, nats", HIGHEST)
        axis.set_title(optimizer)
    for axis in axes[1:]:
        axis.set_ylabel("")
        axis.get_legend().remove()
    save_figure(figure, path)
