"""From run directories to figures: measure, draw, write, and compare several runs."""

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from model import Transformer
from nanodnt.files import make_folder, write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.metrics import save_figure
from nanodnt.tables import table
from studies.analysis import (
    compare,
    conditioning,
    gradients,
    norms,
    scale_vectors,
    streams,
    tracked,
)
from studies.analysis.figure import (
    FIGURES,
    STYLE,
    Figure,
    Measured,
    NotApplicable,
    draw,
    plain_label,
    plt,
)
from studies.analysis.runs import Batches, CheckpointedRun, PretrainedModel
from studies.analysis.settings import AnalyzeConfig

MODULES = (gradients, norms, scale_vectors, streams, conditioning, tracked)  # they register figures

MeasuredRuns = dict[str, list[Measured]]  # {run: the measurement of each checkpoint}


class Measurements(NamedTuple):
    figures: dict[str, MeasuredRuns]  # {figure: its measurements}
    failures: dict[str, Exception]  # {"RUN: FIGURE": the error}


def analyze(paths: list[Path], config: AnalyzeConfig) -> int:
    """Draw the figures of `config` for `paths`: run directories or checkpoint files, or the one
    folder or name config.init_from. Returns the exit code: 1 if a figure failed, which is printed.
    ValueError for paths and settings that do not go together."""
    if len(paths) == 1 and config.baseline:
        raise ValueError("baseline is for runs compared: name several")
    runs = open_runs(paths, config)
    parent = Path("out")
    if len(runs) == 1 and runs[0].folder:
        parent = runs[0].folder
    folder = Path(config.out or parent / "analysis")
    make_folder(folder, "--out")
    comparison = None
    drawn = []
    if len(runs) > 1:  # first: mistakes in the records show at once, before anything slow
        records = compare.load_records([run.folder for run in runs])
        comparison = compare.compare_runs(records, folder, config.baseline, config.formats)
        print(compare.format_table(comparison["table"]))
        print("".join(f"warning: {line}\n" for line in comparison["warnings"]), end="")
        drawn.append("loss")
    figures, failures = measure_runs(runs, config.figure_names)
    names = [run.name for run in runs]
    for name, measured in figures.items():
        try:
            write_figure(name, measured, names, config, folder)
            drawn.append(name)
        except Exception as e:  # whatever it is, the other figures are still drawn
            failures[name] = e
    paths = [folder / f"{name}.{kind}" for name in drawn for kind in config.formats]
    if comparison:
        paths.append(compare.write_report(records, comparison, folder, drawn, config.formats))
    print("\n".join(map(str, paths)))
    for name, error in failures.items():
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: {name} is not drawn: {reason}", file=sys.stderr)
    return 1 if failures else 0


def open_runs(paths: list[Path], config: AnalyzeConfig) -> list[CheckpointedRun]:
    """The runs or the model of Hugging Face at these paths, each with its own name."""
    device, _ = choose_device(config.device)
    places = [path.with_suffix("") if path.is_file() else path for path in paths]
    kind = PretrainedModel if config.init_from else CheckpointedRun
    runs = []
    for path, name in zip(paths, compare.distinct_names(places), strict=True):
        runs.append(kind(path, name, config, device))
    return runs


def measure_runs(runs: list[CheckpointedRun], names: list[str]) -> Measurements:
    """Measure the figures `names` on the snapshots of every run. An error of one figure does not
    stop the others. ValueError if no figure applies."""
    figures = {name: {} for name in names}
    reasons = []
    failures = {}
    for run in runs:
        left_out = set()  # figures that do not apply to this run, or failed
        for name, path, model, step in due_figures(run, names):
            if name in left_out:
                continue
            start = time.perf_counter()
            try:
                measured = measure_figure(FIGURES[name], model, run)
            except NotApplicable as e:
                left_out.add(name)
                reasons.append(f"{run.name}: {name} is left out: {e}")
                print(reasons[-1])
                continue
            except Exception as e:  # the other figures may not have this fault
                left_out.add(name)
                figures[name].pop(run.name, None)
                failures[f"{run.name}: {name}"] = e
                continue
            snapshot = {"checkpoint": path.name, "step": step, **measured}
            figures[name].setdefault(run.name, []).append(snapshot)
            seconds = f"{time.perf_counter() - start:.1f} s"
            words = [f"{run.name}: {name} of {path.name}", *amounts(measured), seconds]
            print(", ".join(words))
    figures = {name: runs for name, runs in figures.items() if runs}
    if not figures and not failures:
        raise ValueError(f"nothing to draw: {'; '.join(reasons)}")
    return Measurements(figures, failures)


def due_figures(
    run: CheckpointedRun, names: list[str]
) -> Iterator[tuple[str, Path, Transformer, int]]:
    """(figure, checkpoint, its model, its step) for every measurement of a run: figures over
    training on all snapshots, the others on the last."""
    for path in run.snapshots:
        model, step = run.load(path)
        for name in names:
            if FIGURES[name].over_training or path == run.snapshots[-1]:
                yield name, path, model, step


def measure_figure(figure: Figure, model: Transformer, run: CheckpointedRun) -> Measured:
    """The measurement of a figure on a model, with the number of tokens or images read."""
    if not figure.tokens:
        return figure.measure(model, None, run)
    batches = Batches(run, run.config.tokens or figure.tokens, figure.window)
    return batches.count | figure.measure(model, batches, run)


def amounts(measured: Measured) -> list[str]:
    """The amounts read and drawn for a figure, in words: ["4,096 tokens", "8 draws"]."""
    units = ("tokens", "images", "draws")
    return [f"{measured[unit]:,} {unit}" for unit in units if unit in measured]


def write_figure(
    name: str, measured: MeasuredRuns, names: list[str], config: AnalyzeConfig, folder: Path
) -> None:
    """Draw figure `name` of the runs in `measured`, of all runs `names`; write name.png, or the
    formats of `config`, and, with all its numbers, name.json. Print its `table`, if it has one: a
    line for each type, of each run's last checkpoint."""
    figure = FIGURES[name]
    title = f"{figure.shows} ({figure.after})" if figure.after else figure.shows
    with plt.rc_context(STYLE):
        panels = {plain_label(run): figure.panels(found) for run, found in measured.items()}
        drawing = draw(panels, list(map(plain_label, names)))
        drawing.suptitle(textwrap.fill(title, 105))
        save_figure(drawing, folder / f"{name}.png", config.formats)
    record = {
        "figure": name,
        "shows": figure.shows,
        "source": figure.after,
        "settings": asdict(config),
        "runs": round_for_json(measured),
    }
    write_file(folder / f"{name}.json", lambda f: f.write(json.dumps(record).encode()))
    if figure.table:
        rows = [[name, "of", *figure.table]]
        for run, snapshots in measured.items():
            for kind, values in snapshots[-1]["types"].items():
                rows.append([run, kind, *(f"{values[key]:.4g}" for key in figure.table)])
        print("\n".join(table(rows)))


def round_for_json(value: Any) -> Any:
    """`value` as JSON gives it back: floats with 6 digits, and None for nan and infinity, which
    JSON lacks."""
    text = json.dumps(value)
    return json.loads(text, parse_float=round_digits, parse_constant=lambda _: None)


def round_digits(digits: str) -> float:
    return float(f"{float(digits):.6g}")
