"""A sweep's results: sweep.json with every run, sweep.md with a table, sweep.png with loss against the swept number."""

import json
import math
import os
import statistics
from pathlib import Path

import matplotlib

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.hardware import device_name
from nanodnt.run.metrics import save_figure
from nanodnt.tables import table
from nanodnt.tasks import task_of
from studies.sweep.runner import read_origin, read_outcome, resolve_configs

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def describe_hardware() -> str:
    """What this process computes on: a GPU's name, or a CPU's and its cores."""
    device = choose_device("auto")[0]
    name = device_name(device)
    return f"{os.cpu_count()} CPU cores, {name}" if device.type == "cpu" else name


def find_axis(points: list) -> str | None:
    """The flag on the x axis: learning_rate if it has several values, else the first whose values are all numbers."""
    flags = dict(points[0].flags)
    for name, value in (item for point in points for item in point.flags.items()):
        try:
            float(value)
        except ValueError:
            flags.pop(name, None)
    return "learning_rate" if "learning_rate" in flags else next(iter(flags), None)


def collect(points: list, finished: list) -> dict:
    """What sweep.json holds: {"axis": flag or None, "seeds": how many there should be, "missing": names of the runs
    that are not in `finished`, "curves": {files and values of the other flags: [{x, flags, seed, outcome, loss, run,
    …}]}}."""
    axis, curves = find_axis(points), {}
    titles = {point.files: "+".join(Path(part).stem for part in point.files.split("+")) for point in points}
    if len(set(titles.values())) < len(titles):  # names without folders do not tell them apart
        titles = {files: files for files in titles}
    for point in points:
        others = [f"{name}={value}" for name, value in point.flags.items() if name != axis]
        rows = curves.setdefault(" ".join(filter(None, [titles[point.files], *others])) or "the config", [])
        if point.run.path.name in finished:
            outcome, loss = read_outcome(point.run.path)
            x = float(point.flags[axis]) if axis else None
            row = dict(x=x, flags=point.flags, seed=point.seed, outcome=outcome, loss=loss, run=point.run.path.name)
            rows.append(row | read_origin(point.run.path))
    missing = [point.run.path.name for point in points if point.run.path.name not in finished]
    return {"axis": axis, "seeds": len({point.seed for point in points}), "missing": missing, "curves": curves}


def by_x(rows: list) -> dict:
    """{x: losses of the seeds, None for a run that diverged}, in the order of x."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["x"] or 0, row["seed"])):
        found.setdefault(row["x"], []).append(row["loss"])
    return found


def summary_rows(found: dict) -> list:
    """The table's rows, head first: each curve's best x, which has the lowest mean among those where no seed diverged,
    of as many seeds as any has; its spread over the seeds, the runs that diverged, and the mean at each x."""
    xs = sorted({row["x"] for rows in found["curves"].values() for row in rows if row["x"] is not None})
    head = ["", *([f"best {found['axis']}"] if xs else []), "loss", "lowest to highest", "diverged"]
    lines = [head + [f"{x:g}" for x in xs]]
    for name, rows in found["curves"].items():
        losses = by_x(rows)
        most = max(map(len, losses.values()), default=0)
        whole = {x: its for x, its in losses.items() if None not in its and len(its) == most}
        x = min(whole, key=lambda x: statistics.mean(whole[x]), default=None)
        best = whole.get(x, [])
        cells = [f"{x:g}" if best else "–"] if xs else []
        cells += [mean_text(best, found["seeds"]), f"{min(best):.4f} to {max(best):.4f}" if best else "–"]
        cells += [f"{sum(row['outcome'] == 'diverged' for row in rows)} of {len(rows)}"]
        lines.append([name, *cells, *(mean_text(losses.get(x, []), found["seeds"]) for x in xs)])
    return lines


def mean_text(losses: list, seeds: int) -> str:
    """The mean of some seeds' losses; says so if one of them diverged, or if there are fewer than `seeds`."""
    if not losses or None in losses:
        return "diverged" if losses else "–"
    part = f" ({len(losses)} of {seeds} seeds)" if len(losses) < seeds else ""
    return f"{statistics.mean(losses):.4f}{part}"


def markdown_table(rows: list) -> list:
    """The lines of a table, head first, and an empty one; a "|" in a cell becomes "/"."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines] + [""]


COLUMNS = 3  # of a figure


def new_figure(n: int, width: float = 6.0, height: float = 4.0, columns: int = COLUMNS, sharey: bool = True):
    """(figure, its n axes, up to `columns` in a row)."""
    how = dict(sharey=sharey, squeeze=False, dpi=100, layout="constrained")
    rows, columns = -(-n // columns), min(n, columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), **how)
    for axis in axes.flat[n:]:
        axis.remove()
    for axis in axes.flat[:n]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat[:n])


def draw_curves(axis, curves: dict, xlabel: str, ylabel: str, highest: float | None = None) -> None:
    """Draw {name: {x: losses of the seeds, None for a run that diverged}}, up to `highest`: a band over the seeds, a
    line through the means where some run ended well, and crosses at the top for runs that diverged."""
    every = [loss for points in curves.values() for losses in points.values() for loss in losses]
    ends = [loss for loss in every if loss is not None]
    low, high = (min(ends), highest or max(ends)) if ends else (0.0, 1.0)
    top = high + 0.06 * (high - low or 1.0)
    for i, (name, points) in enumerate(curves.items()):
        finished = {x: [loss for loss in losses if loss is not None] for x, losses in points.items()}
        finished = {x: losses for x, losses in finished.items() if losses}
        lows, means, highs = (list(map(f, finished.values())) for f in (min, statistics.mean, max))
        how = dict(color=f"C{i % 10}", marker="os^vD"[i // 10 % 5])  # after ten colours
        axis.plot(list(finished), means, "-", markersize=4, linewidth=1.5, label=name, **how)
        axis.fill_between(list(finished), lows, highs, color=how["color"], alpha=0.2, linewidth=0)
        diverged = [x for x, losses in points.items() if None in losses]
        axis.plot(diverged, [top] * len(diverged), "x", color=how["color"], markersize=6 + i % 10, zorder=3)
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


def draw_sizes(axis, curves: dict, xlabel: str, ylabel: str, title: str) -> None:
    """`draw_curves` of {name: {size: number}}, in logarithms, without numbers that are not above 0."""
    positive = {name: {x: [y] for x, y in points.items() if y > 0} for name, points in curves.items()}
    draw_curves(axis, positive, xlabel, ylabel)
    if any(positive.values()):
        axis.set_yscale("log")
    axis.set_title(title, fontsize=9)


def write_results(points: list, finished: list, folder: Path, command: list) -> tuple:
    """Write sweep.json, sweep.md and, where a number is swept, sweep.png; returns (lines for the console, what
    sweep.json holds)."""
    found = {"command": command, "hardware": describe_hardware(), **collect(points, finished)}
    write_file(folder / "sweep.json", lambda f: f.write(json.dumps(found, indent=1).encode()))
    rows = summary_rows(found)
    write_file(folder / "sweep.md", lambda f: f.write("\n".join(markdown_table(rows)).encode()))
    (folder / "sweep.png").unlink(missing_ok=True)
    if found["axis"]:
        figure, (axis,) = new_figure(1)
        losses = {name: by_x(rows) for name, rows in found["curves"].items()}
        units = sorted({task_of(resolve_configs(point.run.args)[0]).loss_unit for point in points})
        draw_curves(axis, losses, found["axis"], f"validation loss, nats per {' or '.join(units)}")
        save_figure(figure, folder / "sweep.png")
    return [*table(rows), f"{folder}: {', '.join(sorted(path.name for path in folder.glob('sweep.*')))}"], found
