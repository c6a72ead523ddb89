"""A sweep's results: sweep.json with every run, sweep.md with a table, sweep.png with loss against
the swept number."""

import json
import os
import statistics
from pathlib import Path

import matplotlib

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.hardware import device_name
from nanodnt.run.metrics import save_figure
from nanodnt.tables import table
from studies.sweep.runner import read_origin, read_outcome, resolve_configs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = 3  # of a figure


def describe_hardware() -> str:
    """What this process computes on: a GPU's name, or a CPU's and its cores."""
    device = choose_device("auto")[0]
    name = device_name(device)
    return f"{os.cpu_count()} CPU cores, {name}" if device.type == "cpu" else name


def find_axis(points: list) -> str:
    """The flag on the x axis: the first whose several values are all numbers; without one, or if it
    has several values too, learning_rate."""
    flags = dict(points[0].flags)
    for point in points:
        for name, value in point.flags.items():
            try:
                float(value)
            except ValueError:
                flags.pop(name, None)
    return "learning_rate" if "learning_rate" in flags else next(iter(flags), "learning_rate")


def collect(points: list, finished: list) -> dict:
    """What sweep.json holds: {"axis": flag, "seeds": how many there should be, "missing": names of
    the runs that are not in `finished`, "curves": {files and values of the other flags: [{x, flags,
    seed, outcome, loss, run, …}]}}."""
    axis, curves, missing = find_axis(points), {}, []
    for point in points:
        rows, name = curves.setdefault(point.name_without(axis), []), point.run.path.name
        if name not in finished:
            missing.append(name)
            continue
        outcome, loss = read_outcome(point.run.path)
        x = float(point.flags.get(axis) or resolve_configs(point.run.args)[1].learning_rate)
        row = dict(x=x, flags=point.flags, seed=point.seed, outcome=outcome, loss=loss, run=name)
        rows.append(row | read_origin(point.run.path))
    return {
        "axis": axis,
        "seeds": len({point.seed for point in points}),
        "missing": missing,
        "curves": curves,
    }


def by_x(rows: list) -> dict:
    """{x: losses of the seeds, None for a run that diverged}, in the order of x."""
    losses = {}
    for row in sorted(rows, key=lambda row: (row["x"], row["seed"])):
        losses.setdefault(row["x"], []).append(row["loss"])
    return losses


def summary_rows(found: dict) -> list:
    """The table's rows, head first: each curve's best x, which has the lowest mean among those
    where all seeds are there and none diverged; its spread over the seeds, the runs that diverged,
    and the mean at each x."""
    xs = sorted({row["x"] for rows in found["curves"].values() for row in rows})
    lines = [
        [
            "",
            f"best {found['axis']}",
            "loss",
            "lowest to highest",
            "diverged",
            *(f"{x:g}" for x in xs),
        ]
    ]
    for name, rows in found["curves"].items():
        losses = by_x(rows)
        whole = {
            x: its for x, its in losses.items() if None not in its and len(its) == found["seeds"]
        }
        cells = ["–"] * 3
        if whole:
            x, best = min(whole.items(), key=lambda item: statistics.mean(item[1]))
            cells = [f"{x:g}", mean_text(best), f"{min(best):.4f} to {max(best):.4f}"]
        cells.append(f"{sum(row['outcome'] == 'diverged' for row in rows)} of {len(rows)}")
        lines.append([name, *cells, *(mean_text(losses.get(x, [])) for x in xs)])
    return lines


def mean_text(losses: list) -> str:
    """The mean of some seeds' losses; says so if one of them diverged."""
    if None in losses:
        return "diverged"
    return f"{statistics.mean(losses):.4f}" if losses else "–"


def markdown_table(rows: list) -> list:
    """The lines of a table, head first, and an empty one; a "|" in a cell becomes "/"."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines] + [
        ""
    ]


def new_figure(n: int, width: float = 6.0, height: float = 4.0):
    """(figure, its n axes, up to COLUMNS in a row)."""
    rows, columns = -(-n // COLUMNS), min(n, COLUMNS)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(
        rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[n:]:
        axis.remove()
    return figure, list(axes.flat[:n])


def draw_curves(axis, curves: dict, xlabel: str, ylabel: str) -> None:
    """Draw {name: {x: losses of the seeds, None for a run that diverged}}: a line through the means
    with a bar over the seeds where some run ended well, and crosses at the top for runs that
    diverged."""
    for i, (name, points) in enumerate(curves.items()):
        ended = {x: [loss for loss in losses if loss is not None] for x, losses in points.items()}
        ended = {x: losses for x, losses in ended.items() if losses}
        means = list(map(statistics.mean, ended.values()))
        axis.plot(list(ended), means, "o-", color=f"C{i}", markersize=4, label=name)
        axis.vlines(
            list(ended),
            list(map(min, ended.values())),
            list(map(max, ended.values())),
            color=f"C{i}",
        )
        diverged = [x for x, losses in points.items() if None in losses]
        axis.plot(
            diverged,
            [0.97] * len(diverged),
            "x",
            color=f"C{i}",
            transform=axis.get_xaxis_transform(),
        )
    xs = sorted({x for points in curves.values() for x in points})
    if xs and xs[0] > 0:
        axis.set_xscale("log")
        axis.set_xticks(xs, [f"{x:g}" for x in xs], rotation=45)
        axis.minorticks_off()
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)


def write_results(points: list, finished: list, folder: Path, command: list) -> tuple:
    """Write sweep.json, sweep.md and sweep.png; returns (lines for the console, what sweep.json
    holds)."""
    found = {"command": command, "hardware": describe_hardware(), **collect(points, finished)}
    write_file(folder / "sweep.json", lambda f: f.write(json.dumps(found, indent=1).encode()))
    rows = summary_rows(found)
    write_file(folder / "sweep.md", lambda f: f.write("\n".join(markdown_table(rows)).encode()))
    figure, (axis,) = new_figure(1)
    losses = {name: by_x(rows) for name, rows in found["curves"].items()}
    draw_curves(axis, losses, found["axis"], "validation loss, nats")
    save_figure(figure, folder / "sweep.png")
    lines = [f"not finished: {name}" for name in found["missing"]]
    return [*lines, *table(rows), str(folder / "sweep.md")], found
