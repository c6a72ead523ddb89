"""The contract of a figure, the table of all figures, and their drawing.

A figure has two functions, `measure` and `panels`. `@register` above `panels` joins them:

    measure(model, batches, run) → the measurement of one checkpoint, a dict for JSON; raises
        `NotApplicable` with the reason where the figure does not apply to the run.
        batches: the `Batches` that it reads; run: the `CheckpointedRun`
    panels(measured) → rows of `Panel`s, from a list with the measurement and the "step" of each
        snapshot. Its docstring is the figure's title and, in brackets, the paper's figure that
        it follows
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 7,
    "figure.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 3.5,
    "lines.linewidth": 1.3,
    "savefig.dpi": 130,
    "figure.constrained_layout.use": True,
    "axes.titley": 1.0,  # a fixed place of titles halves the time of drawing
}
BRANCHES = {"attn": "attention", "mlp": "FFN"}
TYPE_COLORS = {
    "emb": "C0",
    "pos": "C4",
    "head": "C5",
    "qk": "C1",
    "ffn": "C2",
    "router": "C6",
    "vo": "C3",
    "norm": "C7",
    "patch": "C8",
}
Measured = dict[str, Any]  # the measurement of one checkpoint


class NotApplicable(Exception):
    """A figure does not apply to a run; the message is the reason."""


class Figure(NamedTuple):
    measure: Callable
    panels: Callable
    shows: str  # the title
    after: str  # the paper's figure that it follows; "" = none
    tokens: int = 0  # number of tokens to read unless the configuration sets it; 0 = none are read
    window: int = 0  # number of tokens to read of each sequence; 0 = all
    over_training: bool = False  # measured on every snapshot, else on the last alone
    table: tuple[str, ...] = ()  # statistics of each type that are printed too


FIGURES = {}  # {name for --figures: Figure}


def register(name: str, measure: Callable, **options: Any) -> Callable:
    """Enter the function below, a `panels`, as figure `name` in FIGURES. `options`: the fields of
    `Figure` from `tokens` on."""

    def enter(panels: Callable) -> Callable:
        shows, _, after = panels.__doc__.removesuffix(".").partition(" (")
        FIGURES[name] = Figure(measure, panels, shows, after.removesuffix(")"), **options)
        return panels

    return enter


class Line(NamedTuple):
    x: Sequence
    y: Sequence
    style: str
    options: dict[str, Any]  # keyword arguments of matplotlib's plot


class Panel(NamedTuple):
    title: str
    xlabel: str
    lines: Sequence[Line] = ()
    ylabel: str = ""
    log: str = ""  # the logarithmic axes: "", "y" or "xy"
    paint: Callable | None = None  # paint(ax) draws more than lines; returns an image that needs a
    #   colorbar, or None


PanelRows = list[list[Panel]]


def line(x: Sequence, y: Sequence, style: str = "o-", **options: Any) -> Line:
    return Line(x, y, style, options)


def over_steps(
    measured: list[Measured], values: Sequence, style: str = "o-", **options: Any
) -> Line:
    """A line with one value per snapshot, over their steps."""
    return line([m["step"] for m in measured], values, style, **options)


def by_block(values: Sequence, style: str = "o-", first: int = 1, **options: Any) -> Line:
    """A line with one value per block."""
    return line(range(first, first + len(values)), values, style, **options)


def blocks_over_steps(steps: list[int], rows: list[list[float]], first: int = 1) -> list[Line]:
    """A line over the steps for each block, the first darkest; rows: [L] for each step. The legend
    names two."""
    values = np.array(rows).T  # (L, steps)
    lines = []
    for block, color in zip(values, shades(len(values)), strict=True):
        lines.append(line(steps, block, ".-", color=color))
    lines[0].options["label"] = f"block {first}"
    lines[-1].options["label"] = f"block {first + len(lines) - 1}"
    return lines


def shades(n: int) -> list[tuple[float, ...]]:
    """n colors from dark to light, for depth or time."""
    return [plt.colormaps["viridis"](0.9 * i / max(1, n - 1)) for i in range(n)]


def draw(runs: dict[str, PanelRows]) -> plt.Figure:
    """A matplotlib figure of {name of a run: its rows of panels}. Panels with lines in the same
    place have one scale for all runs."""
    rows = []
    for name, panel_rows in runs.items():
        for i, panels in enumerate(panel_rows):
            rows.append((name, i, panels))
    columns = max(len(panels) for _, _, panels in rows)
    figsize = (9.5, 2.5 * len(rows) + 0.6)
    figure, axes = plt.subplots(len(rows), columns, figsize=figsize, squeeze=False)
    for row, (name, i, panels) in zip(axes, rows, strict=True):
        for ax, top, panel in zip(row, axes[i], panels, strict=False):
            if panel.lines and ax is not top:
                ax.sharey(top)
            draw_panel(ax, panel)
        row[0].set_ylabel(f"{name}\n{panels[0].ylabel}")
        for ax in row[len(panels) :]:
            ax.set_visible(False)
    return figure


def draw_panel(ax: Axes, panel: Panel) -> None:
    """Draw a panel on a matplotlib axis."""
    for x, y, style, options in panel.lines:
        ax.plot(x, y, style, **options)
    if panel.paint and (image := panel.paint(ax)):
        ax.grid(False)
        ax.figure.colorbar(image, ax=ax)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.set(**{f"{axis}scale": "log" for axis in panel.log})
    if "block" in panel.xlabel:
        ax.locator_params("x", integer=True)
    if any(line.options.get("label") for line in panel.lines):
        ax.legend()
