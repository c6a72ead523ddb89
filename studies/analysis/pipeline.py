"""From run directories to figures: measure, draw, write the PNG and JSON files, and compare several runs."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from studies.analysis import compare, figures, measures
from studies.analysis.page import write_page
from studies.analysis.settings import CAPTIONS, AnalyzeConfig


class Figure(NamedTuple):
    measure: Callable
    draw: Callable
    over_training: bool  # measured on every snapshot, else on the last alone
    tokens: int = 0  # how many it reads unless the configuration says otherwise; 0 = it needs none


FIGURES = {
    "gradients": Figure(measures.measure_gradients, figures.draw_gradients, False, 65536),
    "sharpness": Figure(measures.measure_sharpness, figures.draw_sharpness, True, 4096),
    "norms": Figure(measures.measure_norms, figures.draw_norms, True),
    "alpha": Figure(measures.measure_alpha, figures.draw_alpha, True, 8192),
    "scatter": Figure(measures.measure_scatter, figures.draw_scatter, False, 128),  # a token has many points
    "variance": Figure(measures.measure_variance, figures.draw_variance, True, 8192),
    "angular": Figure(measures.measure_angular, figures.draw_angular, False, 8192),
    "removal": Figure(measures.measure_removal, figures.draw_removal, False, 32768),
    "jacobian": Figure(measures.measure_jacobian, figures.draw_jacobian, False, 2048),
    "gains": Figure(measures.measure_gains, figures.draw_gains, True),
    "logits": Figure(measures.measure_logits, figures.draw_logits, True, 8192),
    "experts": Figure(measures.measure_experts, figures.draw_experts, False),
    "tracking": Figure(measures.measure_tracking, figures.draw_tracking, False),
}
# figure: statistics of each type that are printed, and their headings
TABLES = {
    "gradients": {key: key for key in ("rms", "kurtosis", "max_over_rms", "p999_over_p50", "hill", "participation")},
    "sharpness": {"arithmetic": "arithmetic", "geometric": "geometric", "zero_fraction": "zeros left out"},
}


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
                    found = FIGURES[name].measure(run, model, run.config.tokens or FIGURES[name].tokens)
                except measures.NotApplicable as e:
                    left.remove(name)
                    reasons.append(f"{run.name}: {name} is left out: {e}")
                    print(reasons[-1])
                    continue
                results[name].setdefault(run.name, []).append({"checkpoint": path.name, "step": step, **found})
                which = f" {i}/{len(run.snapshots)} checkpoints" if FIGURES[name].over_training else ""
                read = "".join(f", {words}" for words in how_much(found))
                print(f"{run.name}: {name}{which}{read}, {time.perf_counter() - start:.1f} s")
    if not any(results.values()):
        raise ValueError(f"nothing to draw: {'; '.join(reasons)}")
    return {name: found for name, found in results.items() if found}


def how_much(found: dict) -> list:
    """What was read and drawn for a figure, in words: ["4,096 tokens", "8 draws"]."""
    return [f"{found[what]:,} {what}" for what in ("tokens", "images", "draws") if what in found]


def write_figure(name: str, results: dict, config: AnalyzeConfig, folder: Path) -> Path:
    """Draw figure `name` from {run: what was measured}; write name.png and, with all its numbers, name.json."""
    shows, source = CAPTIONS[name]
    first = next(m for measured in results.values() for m in measured)
    how = "; " * bool(how_much(first)) + ", ".join(how_much(first))
    with plt.rc_context(figures.STYLE):
        escaped = {run.replace("$", r"\$"): found for run, found in results.items()}  # "$" would begin mathematics
        figure = FIGURES[name].draw(escaped)
        figure.suptitle(f"{shows}{f' ({source})' if source else ''}{how}")
        write_file(folder / f"{name}.png", lambda f: figure.savefig(f, format="png"))
        plt.close(figure)
    record = {"figure": name, "shows": shows, "source": source, "settings": asdict(config)}
    record["runs"] = round_for_json(results)
    write_file(folder / f"{name}.json", lambda f: f.write(json.dumps(record).encode()))
    return folder / f"{name}.png"


def round_for_json(value):
    """`value` with its floats rounded to 6 digits, and None for nan and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: round_for_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_for_json(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def print_table(name: str, results: dict) -> None:
    """Print the statistics in TABLES of a figure, a line for each type of each run, at its last checkpoint."""
    width = max(map(len, [name, *results]))
    print(f"{name:<{width}} of    " + "".join(f"{heading:>15}" for heading in TABLES[name].values()))
    for run, (*_, last) in results.items():
        for kind, found in last["types"].items():
            print(f"{run:<{width}} {kind:<6}" + "".join(f"{found[key]:>15.4g}" for key in TABLES[name]))


def make_output_folder(runs: list, config: AnalyzeConfig) -> Path:
    """The folder for the results, which exists afterwards. ValueError if it cannot be made."""
    folder = runs[0].folder / "analysis" if len(runs) == 1 else Path("out/analysis")
    folder = Path(config.out or folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"cannot use {folder} ({e.strerror}): choose another --out") from None
    return folder


def analyze(paths: list, config: AnalyzeConfig) -> None:
    """Draw what `config` asks for of the run directories or checkpoint files `paths`.

    ValueError, one line, for what cannot be read, drawn or written."""
    device, _ = choose_device(config.device)
    named = [path.with_suffix("") if path.is_file() else path for path in paths]
    names = compare.distinct_names(named)
    runs = [measures.CheckpointedRun(path, name, config, device) for path, name in zip(paths, names, strict=True)]
    folder = make_output_folder(runs, config)
    records, drawn = [], []
    comparing = len(runs) > 1 or config.report
    if not comparing and (config.baseline or config.smooth != AnalyzeConfig.smooth):
        raise ValueError("baseline and smooth are for runs compared: name several, or add --report=True")
    if comparing:  # first: mistakes in the records show at once, before anything slow
        records = compare.load_records(list(dict.fromkeys(run.folder for run in runs)))
        table = compare.compare_runs(records, folder, config.baseline, config.smooth)["table"]
        print(compare.format_table(table))
        drawn.append(folder / "loss.png")
    results = measure_runs(runs, config.figure_names())
    for name, found in results.items():
        drawn.append(write_figure(name, found, config, folder))
    for name in filter(results.get, TABLES):
        print_table(name, results[name])
    if comparing:
        drawn.append(write_page(records, folder, drawn, config.baseline))
    print("\n".join(map(str, drawn)))
