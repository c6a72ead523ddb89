"""The contract of a figure, the table of all figures, and their drawing.

A figure has two functions, `measure` and `panels`. `@register` above `panels` joins them:

    measure(model, batches, run) → the measurement of one checkpoint, a dict for JSON; raises
        `NotApplicable` with the reason where the figure does not apply to the run.
        batches: the `Batches` that it reads; run: the `CheckpointedRun`
    panels(measured) → rows of `Panel`s, from a list with the measurement and the "step" of each
        snapshot. Its docstring is the figure's title and, in brackets, the paper's figure that
        it follows
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter
from matplotlib.transforms import ScaledTranslation

from nanodnt.run.metrics import PALETTE, curve_style

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "figure.titlesize": 10,
    "axes.prop_cycle": matplotlib.cycler(color=PALETTE),
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
WIDTH = 9.5  # inches
COLUMNS = 4  # most panels in a row of runs side by side, or of panels that compare them
BRANCHES = {"attn": "attention", "mlp": "FFN"}
MORE_COLORS = ("#8C510A", "#7F7F7F", "#A0A000")  # of types and labels: brown, grey, olive
TYPE_COLORS = {
    "emb": PALETTE[0],
    "pos": PALETTE[5],
    "head": PALETTE[3],
    "qk": PALETTE[4],
    "ffn": PALETTE[2],
    "router": MORE_COLORS[0],
    "vo": PALETTE[1],
    "norm": MORE_COLORS[1],
    "patch": PALETTE[0],  # that of emb, which images do not have
}
LABEL_COLORS = TYPE_COLORS | {"gain_in": TYPE_COLORS["norm"], "gain_out": PALETTE[6]}
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
        title = " ".join(panels.__doc__.split())
        shows, _, after = title.removesuffix(".").partition(" (")
        FIGURES[name] = Figure(measure, panels, shows, after.removesuffix(")"), **options)
        return panels

    return enter


class Line(NamedTuple):
    x: Sequence
    y: Sequence
    style: str
    options: dict[str, Any]  # keyword arguments of matplotlib's plot. Without a color, lines with
    #   the same label get the same


class Panel(NamedTuple):
    title: str
    xlabel: str
    lines: Sequence[Line] = ()
    ylabel: str = ""
    log: str = ""  # the logarithmic axes: "", "y" or "xy"
    paint: Callable | None = None  # paint(ax) draws more than lines; returns an image that needs a
    #   colorbar, or None
    by_run: bool = False  # if runs are compared: one panel for each label, with a line for each run


PanelRows = list[list[Panel]]


class Cell(NamedTuple):
    """A panel in its row of a figure."""

    panel: Panel
    place: tuple[int, int] | None = None  # row and column among the panels of a run; panels of
    #   several runs in one place have one scale and one legend. None: the panel compares runs


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


def plain_label(name: str) -> str:
    """A name as matplotlib shows it as it is: "$" begins mathematics, and legends leave out what
    begins with "_"."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def picture(alt: str, path: str, formats: Sequence[str]) -> str:
    """Markdown that shows the figure `path`, given without its ending; a PDF is a link."""
    for kind in ("png", "svg"):
        if kind in formats:
            return f"![{alt}]({path}.{kind})"
    return f"[{alt}]({path}.pdf)"


def draw(runs: dict[str, PanelRows], names: Sequence[str] = ()) -> plt.Figure:
    """A matplotlib figure of {name of a run: its rows of panels}. The panels `by_run` come last.
    `names`: all runs of the command, whose order gives their styles."""
    rows = arrange(runs, list(names or runs))
    figure = plt.figure(figsize=(WIDTH, 2.5 * len(rows) + 0.6))
    blocks = [list(block) for _, block in groupby(rows, len)]  # rows with equally many panels
    grid = figure.add_gridspec(len(blocks), 1, height_ratios=list(map(len, blocks)))
    places = {}  # {place: [(axis, panel) of each run]}
    for i, block in enumerate(blocks):
        axes = grid[i].subgridspec(len(block), len(block[0])).subplots(squeeze=False)
        for ax, cell in zip(axes.flat, chain(*block), strict=True):
            places.setdefault(cell.place, []).append((ax, cell.panel))
    same_legend = {}  # {(row of a run, labels): axes}
    for place, drawn in places.items():
        draw_place(drawn, shared=place is not None)
        axes = [ax for ax, _ in drawn]
        key = (place and place[0], tuple(by_label(axes)))
        same_legend.setdefault(key, []).extend(axes)
    n_lines = 0
    for (row, labels), axes in same_legend.items():
        if row is None:
            n_lines += legend_of_runs(figure, by_label(axes))
        elif labels:
            n_lines += legend_below(axes)
    figure.set_figheight(figure.get_figheight() + 0.17 * n_lines)
    return figure


def arrange(runs: dict[str, PanelRows], names: list[str]) -> list[list[Cell]]:
    """The cells of each row of a figure. A run has a row of its own for each of its rows of panels;
    runs with one panel are side by side."""
    rows = []
    comparisons = []
    for i in range(max(map(len, runs.values()))):
        here = {name: panel_rows[i] for name, panel_rows in runs.items() if i < len(panel_rows)}
        if len(runs) > 1:
            comparisons += compare_panels(here, names)
            for name, panels in here.items():
                here[name] = [panel for panel in panels if not panel.by_run]
        longest = max(map(len, here.values()))
        own = []
        for name, panels in here.items():
            for j, panel in enumerate(panels):
                if longest == 1 and len(runs) > 1:
                    panel = panel._replace(title=f"{name}\n{panel.title}")
                elif j == 0:
                    panel = panel._replace(ylabel=f"{name}\n{panel.ylabel}")
                own.append(Cell(panel, (i, j)))
        rows += split_evenly(own, COLUMNS if longest == 1 else longest)
    return rows + split_evenly([Cell(panel) for panel in comparisons], COLUMNS)


def split_evenly(cells: list[Cell], most: int) -> list[list[Cell]]:
    """Rows of at most `most` cells."""
    if not cells:
        return []
    n = math.ceil(len(cells) / math.ceil(len(cells) / most))
    return [cells[first : first + n] for first in range(0, len(cells), n)]


def compare_panels(here: dict[str, list[Panel]], names: list[str]) -> list[Panel]:
    """A panel for each label in the panels `by_run` of {run: panels in its row}, with a line of
    each run."""
    compared = {}  # {(title, label): panel}
    for name, panels in here.items():
        style = curve_style(names.index(name)) | {"label": name}
        for panel in panels:
            for x, y, _, options in panel.lines if panel.by_run else ():
                label = options.get("label", "")
                title = f"{panel.title}\n{label}".rstrip()
                empty = panel._replace(title=title, lines=[])
                merged = compared.setdefault((panel.title, label), empty)
                merged.lines.append(Line(x, y, "-", options | style))
    return list(compared.values())


def draw_place(drawn: list[tuple[Axes, Panel]], shared: bool) -> None:
    """Draw each panel on its axis. `shared`: with one scale, and one color for each label."""
    colors = label_colors([panel for _, panel in drawn])
    for ax, panel in drawn:
        if shared and panel.lines and ax is not drawn[0][0]:
            ax.sharey(drawn[0][0])
        draw_panel(ax, panel, colors)


def label_colors(panels: Iterable[Panel]) -> dict[str, str]:
    """{label of a line without a color: its color}."""
    labels = {}
    for panel in panels:
        for line in panel.lines:
            if "label" in line.options and "color" not in line.options:
                labels[line.options["label"]] = None
    colors = {label: LABEL_COLORS[label] for label in labels if label in LABEL_COLORS}
    free = [color for color in (*PALETTE, *MORE_COLORS) if color not in colors.values()]
    others = [label for label in labels if label not in colors]
    for i, label in enumerate(others):
        colors[label] = free[i % len(free)]
    return colors


def draw_panel(ax: Axes, panel: Panel, colors: dict[str, str]) -> None:
    """Draw a panel on a matplotlib axis. `colors`: of lines without one, by their label."""
    for x, y, style, options in panel.lines:
        color = colors.get(options.get("label"))
        if color and "color" not in options:
            options = options | {"color": color}
        ax.plot(x, y, style, **options)
    if panel.paint and (image := panel.paint(ax)):
        ax.grid(False)
        ax.figure.colorbar(image, ax=ax)
    ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    ax.set(**{f"{axis}scale": "log" for axis in panel.log})
    if "y" in panel.log:
        ax.yaxis.set_minor_formatter(LogFormatter())  # 60, not 6 × 10¹
    if "block" in panel.xlabel:
        ax.locator_params("x", integer=True)


def by_label(axes: Iterable[Axes]) -> dict[str, Artist]:
    """{label: the first line with it} of all lines on these axes that have one."""
    handles = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def count_columns(labels: Iterable[str], width: float) -> int:
    """Number of columns of a legend of this width, in inches, in the smaller letters."""
    longest = max(map(len, labels))
    return max(1, int(width / (0.4 + 0.055 * longest)))


def legend_below(axes: Sequence[Axes]) -> int:
    """Draw one legend of the lines on these axes, under the middle one of the lowest and all that
    stands below it; returns its number of lines."""
    handles = by_label(axes)
    bottom = min(ax.get_position().y0 for ax in axes)
    lowest = [ax for ax in axes if ax.get_position().y0 < bottom + 1e-6]
    ax = lowest[(len(lowest) - 1) // 2]
    figure = ax.figure
    scale = figure.dpi_scale_trans
    columns = count_columns(handles, 1.1 * ax.get_position().width * figure.get_figwidth())
    box = ax.xaxis.get_tightbbox()
    depth = (ax.bbox.y0 - box.y0) / figure.dpi if box else 0
    below = ax.transAxes + ScaledTranslation(0, -depth - 0.08, scale)
    place = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)
    ax.legend(handles.values(), handles, **place, ncols=columns, borderaxespad=0)
    return math.ceil(len(handles) / columns)


def legend_of_runs(figure: plt.Figure, handles: dict[str, Artist], title: str = "") -> int:
    """Draw a legend of {label: line} under a whole figure; returns its number of lines."""
    columns = count_columns(handles, 0.7 * figure.get_figwidth())
    place = dict(loc="outside lower center", ncols=columns, title=title, frameon=False)
    figure.legend(handles.values(), handles, **place, fontsize="medium")
    return math.ceil(len(handles) / columns) + bool(title)
