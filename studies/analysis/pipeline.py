"""From run directories to figures: measure, draw, write the PNG and JSON files, and compare several runs."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.loss_curve import save_figure
from nanodnt.tables import table
from studies.analysis import compare
from studies.analysis.figure import STYLE, NotApplicable, draw
from studies.analysis.report import write_report
from studies.analysis.runs import Batches, CheckpointedRun
from studies.analysis.settings import FIGURES, AnalyzeConfig


def analyze(paths: list, config: AnalyzeConfig) -> None:
    """Draw what `config` asks for of the run directories or checkpoint files `paths`.

    ValueError, one line, for what cannot be read, drawn or written."""
    device, _ = choose_device(config.device)
    names = compare.distinct_names([path.with_suffix("") if path.is_file() else path for path in paths])
    runs = [CheckpointedRun(path, name, config, device) for path, name in zip(paths, names, strict=True)]
    folder = Path(config.out or (runs[0].folder / "analysis" if len(runs) == 1 else "out/analysis"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"cannot use {folder} ({e.strerror}): choose another --out") from None
    comparing, drawn = len(runs) > 1 or config.report, []
    if not comparing and (config.baseline or config.smooth != AnalyzeConfig.smooth):
        raise ValueError("baseline and smooth are for runs compared: name several, or add --report=True")
    if comparing:  # first: mistakes in the records show at once, before anything slow
        records = compare.load_records(list(dict.fromkeys(run.folder for run in runs)))
        comparison = compare.compare_runs(records, folder, config.baseline, config.smooth)
        print(compare.format_table(compare.table_cells(comparison["table"])))
        print("".join(f"warning: {line}\n" for line in comparison["table"]["warnings"]), end="")
        drawn.append(folder / "loss.png")
    for name, found in measure_runs(runs, config.figure_names).items():
        drawn.append(write_figure(name, found, config, folder))
        print_table(name, found)
    if comparing:
        drawn.append(write_report(records, comparison, folder, [path.stem for path in drawn]))
    print("\n".join(map(str, drawn)))


def measure_runs(runs: list, names: list) -> dict:
    """{figure: {run: [{"checkpoint", "step", and what was measured}, one per snapshot that the figure needs]}}.

    Each checkpoint is read once. ValueError if no figure applies to any run."""
    results, reasons = {name: {} for name in names}, []
    for run in runs:
        left = list(names)
        if run.has_kept_one and any(FIGURES[name].over_training for name in names):
            print(f"note: {run.name} has kept one checkpoint, so nothing is over training: train with --keep_every=N")
        for i, path in enumerate(run.snapshots, 1):
            model, step = run.load(path)
            for name in [n for n in left if FIGURES[n].over_training or i == len(run.snapshots)]:
                start = time.perf_counter()
                try:
                    found = measure_figure(FIGURES[name], model, run)
                except NotApplicable as e:
                    left.remove(name)
                    reasons.append(f"{run.name}: {name} is left out: {e}")
                    print(reasons[-1])
                    continue
                results[name].setdefault(run.name, []).append({"checkpoint": path.name, "step": step, **found})
                which = f" {i}/{len(run.snapshots)} checkpoints" if FIGURES[name].over_training else ""
                facts = [f"{run.name}: {name}{which}", *how_much(found), f"{time.perf_counter() - start:.1f} s"]
                print(", ".join(facts))
    if not any(results.values()):
        raise ValueError(f"nothing to draw: {'; '.join(reasons)}")
    return {name: found for name, found in results.items() if found}


def measure_figure(figure, model, run: CheckpointedRun) -> dict:
    """What a figure measures of a checkpoint's model, and how much it has read."""
    if not figure.tokens:
        return figure.measure(model, None, run)
    batches = Batches(run, run.config.tokens or figure.tokens, figure.window)
    return {**batches.count, **figure.measure(model, batches, run)}


def how_much(found: dict) -> list:
    """What was read and drawn for a figure, in words: ["4,096 tokens", "8 draws"]."""
    return [f"{found[what]:,} {what}" for what in ("tokens", "images", "draws") if what in found]


def write_figure(name: str, results: dict, config: AnalyzeConfig, folder: Path) -> Path:
    """Draw figure `name` from {run: what was measured}; write name.png and, with all its numbers, name.json."""
    shows, after = FIGURES[name].shows, FIGURES[name].after
    how = ", ".join(how_much(next(iter(results.values()))[0]))
    with plt.rc_context(STYLE):  # "$" in a run's name would begin mathematics
        figure = draw({run.replace("$", r"\$"): FIGURES[name].panels(its) for run, its in results.items()})
        figure.suptitle(f"{shows}{f' ({after})' if after else ''}{f'; {how}' if how else ''}")
        save_figure(figure, folder / f"{name}.png")
    record = {"figure": name, "shows": shows, "source": after, "settings": asdict(config)}
    record["runs"] = round_for_json(results)
    write_file(folder / f"{name}.json", lambda f: f.write(json.dumps(record).encode()))
    return folder / f"{name}.png"


def round_for_json(value):
    """`value` as JSON gives it back: floats with 6 digits, and None for nan and infinity, which JSON lacks."""
    how = dict(parse_float=lambda digits: float(f"{float(digits):.6g}"), parse_constant=lambda _: None)
    return json.loads(json.dumps(value), **how)


def print_table(name: str, results: dict) -> None:
    """Print a figure's `table`, if it has one: a line for each type, of each run's last checkpoint."""
    if keys := FIGURES[name].table:
        rows = [[name, "of", *keys]]
        for run, (*_, last) in results.items():
            rows += [[run, kind, *(f"{found[key]:.4g}" for key in keys)] for kind, found in last["types"].items()]
        print("\n".join(table(rows)))
