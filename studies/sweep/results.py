"""A sweep's results: sweep.json with every run, sweep.md with a table, sweep.png with loss against
the swept number."""

import json
import os
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.hardware import device_name
from nanodnt.run.metrics import curve_style, save_figure
from nanodnt.tables import table
from nanodnt.tasks import task_of
from studies.analysis.figure import STYLE, legend_below, plain_label, plt
from studies.sweep.grid import Point
from studies.sweep.runner import read_origin, read_outcome, resolve_configs

COLUMNS = 3  # number of axes in a row of a figure


def describe_hardware() -> str:
    """The hardware that this process computes on: a GPU's name, or a CPU's and its cores."""
    device = choose_device("auto")[0]
    name = device_name(device)
    return f"{os.cpu_count()} CPU cores, {name}" if device.type == "cpu" else name


def find_axis(points: list[Point]) -> str:
    """The flag on the x axis: learning_rate if it has several values, else the first flag whose
    several values are all numbers, else learning_rate."""
    numeric = dict(points[0].flags)
    for point in points:
        for name, value in point.flags.items():
            try:
                float(value)
            except ValueError:
                numeric.pop(name, None)
    if "learning_rate" in numeric:
        return "learning_rate"
    return next(iter(numeric), "learning_rate")


def collect(points: list[Point], finished: list[str]) -> dict[str, Any]:
    """The results in sweep.json: {"axis": flag, "seeds": number of seeds, "missing": names of the
    runs that are not in `finished`, "curves": {files and values of the other flags: [{x, flags,
    seed, outcome, loss, run, …}]}}."""
    axis = find_axis(points)
    curves = {}
    missing = []
    for point in points:
        rows = curves.setdefault(point.name_without(axis), [])
        name = point.run.path.name
        if name not in finished:
            missing.append(name)
            continue
        outcome, loss = read_outcome(point.run.path)
        x = point.flags.get(axis) or resolve_configs(point.run.args).train.learning_rate
        row = dict(x=float(x), flags=point.flags, seed=point.seed)
        row |= dict(outcome=outcome, loss=loss, run=name)
        rows.append(row | read_origin(point.run.path))
    n_seeds = len({point.seed for point in points})
    return {"axis": axis, "seeds": n_seeds, "missing": missing, "curves": curves}


def by_x(rows: list[dict]) -> dict[float, list[float | None]]:
    """{x: losses of the seeds, None for a run that diverged}, in the order of x."""
    losses = {}
    for row in sorted(rows, key=lambda row: (row["x"], row["seed"])):
        losses.setdefault(row["x"], []).append(row["loss"])
    return losses


def summary_rows(results: dict[str, Any]) -> list[list[str]]:
    """The table's rows, head first: each curve's best x, which has the lowest mean among those
    where all seeds are present and none diverged; its spread over the seeds, the number of runs
    that diverged, and the mean at each x."""
    xs = sorted({row["x"] for rows in results["curves"].values() for row in rows})
    head = ["", f"best {results['axis']}", "loss", "lowest to highest", "diverged"]
    lines = [[*head, *(f"{x:g}" for x in xs)]]
    for name, rows in results["curves"].items():
        by_rate = by_x(rows)
        complete = {}
        for x, losses in by_rate.items():
            if None not in losses and len(losses) == results["seeds"]:
                complete[x] = losses
        cells = ["–", "–", "–"]
        if complete:
            x = min(complete, key=lambda x: statistics.mean(complete[x]))
            best = complete[x]
            cells = [f"{x:g}", mean_text(best), f"{min(best):.4f} to {max(best):.4f}"]
        n_diverged = sum(row["outcome"] == "diverged" for row in rows)
        cells.append(f"{n_diverged} of {len(rows)}")
        lines.append([name, *cells, *(mean_text(by_rate.get(x, [])) for x in xs)])
    return lines


def mean_text(losses: list[float | None]) -> str:
    """The mean of the seeds' losses as text; "diverged" if one of them diverged."""
    if None in losses:
        return "diverged"
    return f"{statistics.mean(losses):.4f}" if losses else "–"


def markdown_table(rows: list[list]) -> list[str]:
    """The lines of a table, head first, and an empty line; a "|" in a cell becomes "/"."""
    lines = []
    for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]:
        cells = [str(cell).replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def new_figure(n: int, width: float = 6.0, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure and its n axes, up to COLUMNS in a row. Each has this width and height, inches."""
    rows = -(-n // COLUMNS)
    columns = min(n, COLUMNS)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[n:]:
        axis.remove()
    return figure, list(axes.flat[:n])


def draw_curves(
    axis: Axes, curves: dict[str, dict[float, list[float | None]]], title: str, x: str, unit: str
) -> None:
    """Draw {name: {value of the flag x: validation losses of the seeds, per `unit`, None for a run
    that diverged}}: a line through the means with bars from the lowest to the highest seed. Where
    runs diverged, a cross above the axis has their number; mean and bar are of the others."""
    strips = 0  # rows of crosses
    for i, (name, curve) in enumerate(curves.items()):
        style = curve_style(i)
        means = []
        strips += any(None in losses for losses in curve.values())
        for value, losses in curve.items():
            ended = [loss for loss in losses if loss is not None]
            if ended:
                means.append((value, statistics.mean(ended)))
                axis.vlines(value, min(ended), max(ended), color=style["color"])
            if len(ended) < len(losses):
                words = f"× {losses.count(None)} of {len(losses)}"
                place = dict(xycoords=axis.get_xaxis_transform(), textcoords="offset points")
                look = dict(ha="center", color=style["color"], fontsize=7)
                axis.annotate(words, (value, 1), (0, 12 * strips - 9), **place, **look)
        axis.plot(*np.reshape(means, (-1, 2)).T, **style, markersize=4, label=plain_label(name))
    xs = sorted({value for curve in curves.values() for value in curve})
    axis.update_datalim([(value, 0) for value in xs], updatey=False)  # where all runs diverged
    axis.autoscale_view()
    label = x.replace("_", " ")
    if xs and xs[0] > 0:
        axis.set_xscale("log")
        axis.set_xticks(xs, [f"{x:g}" for x in xs], rotation=45)
        axis.minorticks_off()
        label += " (log scale)"
    axis.set(xlabel=label, ylabel=f"validation loss (nats per {unit})")
    axis.set_title(title, pad=6 + 12 * strips, parse_math=False)
    if strips:
        axis.plot([], [], "x", color="0.4", label="seeds that diverged")
    legend_below([axis])


def write_lines(path: Path, lines: list[str]) -> None:
    write_file(path, lambda f: f.write("\n".join(lines).encode()))


def describe_figure(name: str, results: dict[str, Any]) -> str:
    """The title of sweep.png: number of seeds, meaning of the bars, number of missing runs."""
    name = textwrap.fill(name, 70)
    title = f"{name}\none seed"
    if results["seeds"] > 1:
        title = f"{name}\nmean of {results['seeds']} seeds, bars from lowest to highest"
    if results["missing"]:
        title += f"; runs missing: {len(results['missing'])}"
    return title


def write_results(
    points: list[Point],
    finished: list[str],
    folder: Path,
    command: list[str],
    formats: Sequence[str],
) -> tuple[list[str], dict[str, Any]]:
    """Write sweep.json, sweep.md and sweep.png, or these formats of it; returns lines for the
    console, and the results in sweep.json."""
    results = {"command": command, "hardware": describe_hardware(), **collect(points, finished)}
    write_lines(folder / "sweep.json", [json.dumps(results, indent=1)])
    rows = summary_rows(results)
    write_lines(folder / "sweep.md", markdown_table(rows))
    losses = {name: by_x(rows) for name, rows in results["curves"].items()}
    unit = task_of(resolve_configs(points[0].run.args).model).loss_unit
    with plt.rc_context(STYLE):
        figure, (axis,) = new_figure(1, height=3.5 + 0.3 * len(losses))
        draw_curves(axis, losses, describe_figure(folder.name, results), results["axis"], unit)
        save_figure(figure, folder / "sweep.png", formats)
    lines = [f"not finished: {name}" for name in results["missing"]]
    return [*lines, *table(rows), str(folder / "sweep.md")], results
