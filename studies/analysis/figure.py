"""What a figure is, the table of all of them, and how they are drawn.

A figure is a `measure` and a `panels`, put together by `@register` above its `panels`:

    measure(model, batches, run) → a dict for JSON, of one checkpoint; raises `NotApplicable` with
    the reason where the
        figure does not apply to the run. `batches`: the `Batches` it reads; run: the
        `CheckpointedRun`
    panels([what was measured of a run, with its "step", one per snapshot]) → rows of `Panel`s. Its
    docstring is the
        figure's title: what it shows and, in brackets, the paper's figure that it follows
"""

from collections.abc import Callable
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 7,
    "figure.titlesize": 10,
    "axes.grid": True,
}
STYLE |= {
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
STYLE |= {"lines.markersize": 3.5, "lines.linewidth": 1.3, "savefig.dpi": 130}
# titles that need no search take half the time
STYLE |= {"figure.constrained_layout.use": True, "axes.titley": 1.0}
BRANCHES = {"attn": "attention", "mlp": "FFN"}
TYPE_COLORS = dict(
    emb="C0", pos="C4", head="C5", qk="C1", ffn="C2", router="C6", vo="C3", norm="C7", patch="C8"
)


class NotApplicable(Exception):
    """A figure does not apply to a run; the message is the reason."""


class Figure(NamedTuple):
    measure: Callable
    panels: Callable
    shows: str
    after: str  # the paper's figure that it follows; "" = none
    tokens: int = 0  # how many it reads unless the configuration says otherwise; 0 = it needs none
    window: int = 0  # it reads so many tokens of each sequence; 0 = all
    over_training: bool = False  # measured on every snapshot, else on the last alone
    table: tuple = ()  # statistics of each type that are printed too


FIGURES = {}  # name: Figure, as --figures takes them


def register(name: str, measure: Callable, **how):
    """Enter the function below, a `panels`, as figure `name` in FIGURES. `how`: the last fields of
    `Figure`."""

    def enter(panels):
        shows, _, after = panels.__doc__.removesuffix(".").partition(" (")
        FIGURES[name] = Figure(measure, panels, shows, after.removesuffix(")"), **how)
        return panels

    return enter


class Panel(NamedTuple):
    title: str
    xlabel: str
    lines: list = ()  # of `line`
    ylabel: str = ""
    log: str = ""  # the axes that are logarithmic: "", "y" or "xy"
    paint: Callable | None = None  # paint(ax) draws what is not a line; it returns what needs a
    #   colorbar, or None


def line(x, y, style: str = "o-", **how) -> tuple:
    """A line of a panel; `how`: as matplotlib's plot takes it."""
    return (x, y, style), how


def over_steps(measured: list, values: list, style: str = "o-", **how) -> tuple:
    """A line with one value per snapshot, over their steps."""
    return line([m["step"] for m in measured], values, style, **how)


def by_block(values: list, style: str = "o-", first: int = 1, **how) -> tuple:
    """A line with one value per block."""
    return line(range(first, first + len(values)), values, style, **how)


def blocks_over_steps(steps: list, rows: list, first: int = 1) -> list:
    """A line over the steps for each block, the first darkest; rows: [L] for each step. The legend
    names two."""
    values = np.array(rows)  # (steps, L)
    colors = shades(values.shape[1])
    lines = [
        line(steps, its, ".-", color=color) for its, color in zip(values.T, colors, strict=True)
    ]
    for block in (0, -1):
        lines[block][1]["label"] = f"block {first + block % len(lines)}"
    return lines


def shades(n: int) -> list:
    """n colors from dark to light, for depth or time."""
    return [plt.colormaps["viridis"](0.9 * i / max(1, n - 1)) for i in range(n)]


def draw(runs: dict):
    """A matplotlib figure of {name of a run: its rows of panels}. Lines in one place have one scale
    for all runs."""
    rows = [(name, i, panels) for name, its in runs.items() for i, panels in enumerate(its)]
    columns = max(len(panels) for *_, panels in rows)
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


def draw_panel(ax, panel: Panel) -> None:
    """Draw a panel on a matplotlib axis."""
    for values, how in panel.lines:
        ax.plot(*values, **how)
    if panel.paint and (image := panel.paint(ax)):
        ax.grid(False)
        ax.figure.colorbar(image, ax=ax)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.set(**{f"{axis}scale": "log" for axis in panel.log})
    if "block" in panel.xlabel:
        ax.locator_params("x", integer=True)
    if any(how.get("label") for _, how in panel.lines):
        ax.legend()
