"""The contract of a figure, the table of all figures, and their drawing.

A figure has two functions, `measure` and `panels`. `@register` above `panels` joins them:

    measure(model, batches, run) → the measurement of one checkpoint, a dict for JSON; raises
        `NotApplicable` with the reason where the figure does not apply to the run.
        batches: the `Batches` that it reads; run: the `CheckpointedRun`
    panels(measured) → rows of `Panel`s, from a list with the measurement and the "step" of each
        snapshot. Its docstring is the figure's title and, in brackets, the paper's figure that
        it follows
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle, zip_longest
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


Place = tuple[int, int] | str  # row and column among a run's panels; a title, if runs are compared
Cell = tuple[Place, Panel]


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
    """A matplotlib figure of {name of a run: its rows of panels}. Panels in the same place, of all
    runs, have one scale, and one color and one legend for their labels; those `by_run` are merged,
    and come last. `names`: all runs of the command, whose order gives their styles."""
    compared = {}
    if len(runs) > 1:
        compared = compare_panels(runs, list(names or runs))
    rows = own_rows(runs, bool(compared)) + split(list(compared.items()))
    columns = max(map(len, rows))
    legends = max(map(len, runs.values()))
    figsize = (WIDTH, 2.5 * len(rows) + 0.4 * legends + 0.6)
    figure, grid = plt.subplots(len(rows), columns, figsize=figsize, squeeze=False)
    places = {}  # {place: [(axis, panel) of each run]}
    for axes, row in zip(grid, rows, strict=True):
        for ax in axes[len(row) :]:
            ax.remove()
        for ax, (place, panel) in zip(axes, row, strict=False):
            places.setdefault(place, []).append((ax, panel))
    for place, drawn in places.items():
        axes = [ax for ax, _ in drawn]
        color_labels([line for _, panel in drawn for line in panel.lines])
        for ax, panel in drawn:
            if panel.lines and ax is not axes[0]:
                ax.sharey(axes[0])
            draw_panel(ax, panel)
        if place not in compared:
            legend_below(axes)
    if compared:
        axes = [places[place][0][0] for place in compared]
        legend_of_runs(figure, by_label(axes))
    return figure


def own_rows(runs: dict[str, PanelRows], without_compared: bool) -> list[list[Cell]]:
    """The rows of each run, each beside the same row of the other runs. If runs have one panel
    each, these are side by side."""
    rows = []
    for i, same in enumerate(zip_longest(*runs.values(), fillvalue=[])):
        cells = []  # a row for each run
        for name, panels in zip(runs, same, strict=True):
            row = []
            for j, panel in enumerate(panels):
                if panel.by_run and without_compared:
                    continue
                words = panel.ylabel if row else f"{textwrap.fill(name, 26)}\n{panel.ylabel}"
                row.append(((i, j), panel._replace(ylabel=words)))
            cells.append(row)
        if max(map(len, cells)) == 1:
            cells = split(list(chain(*cells)))
        rows += filter(None, cells)
    return rows


def split(cells: list[Cell]) -> list[list[Cell]]:
    """Rows of at most COLUMNS cells."""
    return [cells[first : first + COLUMNS] for first in range(0, len(cells), COLUMNS)]


def compare_panels(runs: dict[str, PanelRows], names: list[str]) -> dict[Place, Panel]:
    """{title: panel} for each label in the panels `by_run`, with a line of each run."""
    compared = {}
    for name, rows in runs.items():
        style = curve_style(names.index(name)) | {"label": name}
        for panel in filter(lambda panel: panel.by_run, chain(*rows)):
            for line in panel.lines:
                title = f"{panel.title}\n{line.options.get('label', '')}".rstrip()
                same = compared.setdefault(title, panel._replace(title=title, lines=[]))
                same.lines.append(line._replace(style="-", options=line.options | style))
    return compared


def color_labels(lines: list[Line]) -> None:
    """Give the lines without a color one by their label."""
    open_lines = [line.options for line in lines if line.options.keys() == {"label"}]
    labels = dict.fromkeys(options["label"] for options in open_lines)
    taken = [LABEL_COLORS.get(label) for label in labels]
    free = cycle(color for color in (*PALETTE, *MORE_COLORS) if color not in taken)
    colors = {label: LABEL_COLORS.get(label) or next(free) for label in labels}
    for options in open_lines:
        options["color"] = colors[options["label"]]


def draw_panel(ax: Axes, panel: Panel) -> None:
    """Draw a panel on a matplotlib axis."""
    for x, y, style, options in panel.lines:
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


def by_label(axes: Sequence[Axes]) -> dict[str, Artist]:
    """{label: the first line with it} of all lines on these axes."""
    handles = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def legend_below(axes: Sequence[Axes]) -> None:
    """Draw a legend of the lines on these axes under the last one, and under all that stands
    there."""
    handles = by_label(axes)
    if not handles:
        return
    ax = axes[-1]
    figure = ax.figure
    depth = ax.bbox.y0 - ax.get_tightbbox().y0
    below = ax.transAxes + ScaledTranslation(0, -depth / figure.dpi - 0.08, figure.dpi_scale_trans)
    place = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, borderaxespad=0)
    width = 1.3 * ax.get_position().width * figure.get_figwidth()
    ax.legend(handles.values(), handles, **place, ncols=count_columns(handles, width))


def legend_of_runs(figure: plt.Figure, handles: dict[str, Artist], title: str = "") -> None:
    """Draw a legend of {label: line} under a whole figure."""
    columns = count_columns(handles, 0.7 * figure.get_figwidth())
    place = dict(loc="outside lower center", ncols=columns, title=title, frameon=False)
    figure.legend(handles.values(), handles, **place, fontsize="medium")


def count_columns(labels: Iterable[str], width: float) -> int:
    """Number of columns of a legend of this width, in inches."""
    return max(1, int(width / (0.4 + 0.055 * max(map(len, labels)))))
