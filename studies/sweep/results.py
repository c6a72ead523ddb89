"""A sweep's results: sweep.json with every run, sweep.md with a table, sweep.png with loss against the swept number."""

import json
import math
import os
import statistics
from contextlib import suppress
from pathlib import Path

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.hardware import device_name
from nanodnt.run.loss_curve import save_figure
from nanodnt.tables import table
from nanodnt.tasks import task_of
from studies.sweep.figure import draw_curves, new_figure
from studies.sweep.runner import read_origin, read_outcome, resolve_configs

BASE = "the config"  # the name of a curve without choices


def describe_hardware() -> str:
    """What this process computes on: a GPU's name, or a CPU's and its cores."""
    device = choose_device("auto")[0]
    name = device_name(device)
    return f"{os.cpu_count()} CPU cores, {name}" if device.type == "cpu" else name


def find_axis(points: list) -> str | None:
    """The flag on the figure's x axis: learning_rate if it has several values, else the first flag whose values are all
    numbers."""
    names = [name for name in points[0].flags if all(is_number(point.flags[name]) for point in points)]
    return "learning_rate" if "learning_rate" in names else next(iter(names), None)


def is_number(text: str) -> bool:
    with suppress(ValueError):
        return not math.isnan(float(text))
    return False


def collect(points: list, finished: set) -> dict:
    """What sweep.json holds: {"axis": flag or None, "curves": {name: [{x, seed, outcome, loss, run, …}]}} of the runs
    that are finished, "seeds": how many there should be, "missing": the names of the other runs. A curve's name is its
    files and its values of the other flags."""
    axis, curves = find_axis(points), {}
    titles = {point.files: "+".join(Path(part).stem for part in point.files.split("+")) for point in points}
    if len(set(titles.values())) < len(titles):  # names without folders do not tell them apart
        titles = {files: files for files in titles}
    for point in points:
        others = [f"{name}={value}" for name, value in point.flags.items() if name != axis]
        rows = curves.setdefault(" ".join(filter(None, [titles[point.files], *others])) or BASE, [])
        if point.run in finished:
            outcome, loss = read_outcome(point.run.path)
            x = float(point.flags[axis]) if axis else None
            row = dict(x=x, seed=point.seed, outcome=outcome, loss=loss, run=point.run.path.name)
            rows.append(row | read_origin(point.run.path))
    missing = [point.run.path.name for point in points if point.run not in finished]
    return {"axis": axis, "seeds": len({point.seed for point in points}), "missing": missing, "curves": curves}


def by_x(rows: list) -> dict:
    """{x: losses of the seeds, None for a run that diverged}, in the order of x."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["x"] or 0, row["seed"])):
        found.setdefault(row["x"], []).append(row["loss"])
    return found


def find_best(rows: list) -> tuple:
    """(x, its losses) with the lowest mean loss among those where no seed diverged, of as many seeds as any has; (None,
    []) without any."""
    found = by_x(rows)
    most = max(map(len, found.values()), default=0)
    whole = {x: losses for x, losses in found.items() if None not in losses and len(losses) == most}
    return min(whole.items(), key=lambda item: statistics.mean(item[1]), default=(None, []))


def summary_rows(found: dict) -> list:
    """The table's rows, head first: each curve's best, its spread over the seeds, the runs that diverged, and the mean
    at each x."""
    xs = sorted({row["x"] for rows in found["curves"].values() for row in rows if row["x"] is not None})
    head = ["", *([f"best {found['axis']}"] if xs else []), "loss", "lowest to highest", "diverged"]
    lines = [head + [f"{x:g}" for x in xs]]
    for name, rows in found["curves"].items():
        (x, best), losses = find_best(rows), by_x(rows)
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


def write_results(points: list, finished: set, folder: Path, command: list) -> list:
    """Write sweep.json, sweep.md and, where a number is swept, sweep.png to `folder`; returns the table's lines for the
    console, and a last one that names the files."""
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
    return [*table(rows), f"{folder}: {', '.join(sorted(path.name for path in folder.glob('sweep.*')))}"]
