"""What a figure is, the table of all of them, and what their drawings share.

A figure is a `measure` and a `draw`, put together by `@register` above its `draw`:

    measure(model, batches, run) → a dict for JSON, of one checkpoint; raises `NotApplicable` with the reason where the
        figure does not apply to the run. `batches`: the `Batches` it reads; run: the `CheckpointedRun`
    draw({name of a run: [what was measured, with its "step", one per snapshot]}) → a matplotlib figure. Its docstring
        is the title: what it shows and, in brackets, the paper's figure that it follows
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "figure.titlesize": 10, "axes.grid": True}
STYLE |= {"grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"legend.frameon": False, "lines.markersize": 3.5, "lines.linewidth": 1.3, "savefig.dpi": 130}
BRANCHES = {"attn": "attention", "mlp": "FFN"}
TYPE_COLORS = dict(emb="C0", pos="C4", head="C5", qk="C1", ffn="C2", router="C6", vo="C3", norm="C7", patch="C8")


class NotApplicable(Exception):
    """A figure does not apply to a run; the message is the reason."""


class Figure(NamedTuple):
    measure: Callable
    draw: Callable
    shows: str
    after: str  # the paper's figure that it follows; "" = none
    tokens: int = 0  # how many it reads unless the configuration says otherwise; 0 = it needs none
    window: int = 0  # it reads so many tokens of each sequence; 0 = all
    over_training: bool = False  # measured on every snapshot, else on the last alone
    table: tuple = ()  # statistics of each type that are printed too


FIGURES = {}  # name: Figure, as --figures takes them


def register(name: str, measure: Callable, **how):
    """Enter the function below, a `draw`, as figure `name` in FIGURES. `how`: the last fields of `Figure`."""

    def enter(draw):
        shows, _, after = draw.__doc__.removesuffix(".").partition(" (")
        FIGURES[name] = Figure(measure, draw, shows, after.removesuffix(")"), **how)
        return draw

    return enter


# ------------------------------------------------------------------------------------------------------ drawing


def make_panels(rows: int, columns: int, height: float = 2.2, **how) -> tuple:
    """(figure, array of axes (rows, columns)), of a width that can be read on a page."""
    return plt.subplots(rows, columns, figsize=(9.5, height * rows + 0.6), squeeze=False, layout="constrained", **how)


def rows_of(axes, results: dict):
    """(a row of the axes, what was measured) for each run. Then the run's name is put at the left of its row."""
    for row, (name, measured) in zip(axes, results.items(), strict=True):
        yield row, measured
        first = row.flat[0]
        first.set_ylabel(f"{name}\n{first.get_ylabel()}")


def plot_over_steps(ax, measured: list, values: list, **how) -> None:
    """A line with one value per snapshot, over their steps."""
    ax.plot([m["step"] for m in measured], values, "o-", **how)


def plot_by_block(ax, values: list, *style, first: int = 1, **how) -> None:
    """A line with one value per block."""
    ax.plot(range(first, first + len(values)), values, *(style or ("o-",)), **how)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_blocks_over_steps(ax, steps: list, rows: list, first: int = 1, style: str = "-") -> None:
    """A line over the steps for each block, the first one darkest; rows: a list [L] for each step. The legend names the
    first and the last."""
    blocks = list(zip_longest(*rows))
    for i, (values, color) in enumerate(zip(blocks, dark_to_light(len(blocks)), strict=True)):
        label = f"block {first + i}" if i in (0, len(blocks) - 1) else None
        ax.plot(steps, np.array(values, float), style, color=color, label=label)  # None becomes nan: left out


def dark_to_light(n: int) -> list:
    """n colors from dark to light, for depth or time."""
    return [plt.colormaps["viridis"](0.9 * i / max(1, n - 1)) for i in range(n)]


def slot_without_block(slot: str) -> str:
    """A slot's name, the same in every block: blocks.3.attn.f.q_norm → attn q_norm."""
    parts = slot.split(".")
    return " ".join(part for part in parts[2 * (parts[0] == "blocks") :] if part != "f")


def slot_with_block(slot: str) -> str:
    """blocks.3.attn.pre → 4 attn pre: blocks are counted from 1."""
    parts = slot.split(".")
    return f"{int(parts[1]) + 1} {slot_without_block(slot)}" if parts[0] == "blocks" else slot
