"""The flags of `analyze.py`, and from run directories to figures: measure, draw, write, and compare
several runs."""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from configurator import PathName
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
)  # noqa: F401
from studies.analysis.figure import FIGURES, STYLE, NotApplicable, draw, plt
from studies.analysis.runs import Batches, CheckpointedRun, PretrainedModel


@dataclass
class AnalyzeConfig:
    # --- what to draw ---
    figures: str = "all"  # all, or a comma list of gradients, sharpness, norms, alpha, scatter,
    #   gains, preconditioner, variance, angular, removal, jacobian, conditioning, logits, experts,
    #   tracking
    init_from: PathName = ""  # instead of runs: a folder or a name of Hugging Face, to be measured
    #   on `dataset`
    out: PathName = ""  # folder for the results; empty = RUN/analysis, for several runs or
    #   init_from out/analysis
    baseline: PathName = ""  # name of the run that the others are compared with; empty = the first
    # --- what to measure on ---
    dataset: PathName = ""  # its validation windows, or images, are read; empty = the run's own
    #   dataset. With init_from a text file (UTF-8), or a prepared dataset with that model's
    #   tokenizer, in windows of at most 1,024 tokens
    tokens: int | None = None  # how many each figure reads, in whole windows or images, whose
    #   tokens are patches; None = few, for a CPU: gradients 65,536, removal 32,768, alpha,
    #   variance, angular, logits 8,192, sharpness 4,096, jacobian 2,048, conditioning 256, scatter
    #   128 (these two and jacobian read 128 of a window). More tokens take more time, not more
    #   memory
    draws: int = 8  # sampled gradients that sharpness is averaged over
    snapshots: int = 6  # most checkpoints, evenly spread, for a figure over training
    seed: int = 1337  # of sampled labels, positions and points
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps

    def __post_init__(self):
        names = list(FIGURES) if self.figures == "all" else self.figures.split(",")
        self.figure_names = list(dict.fromkeys(name.strip() for name in names))  # each once
        unknown = [name for name in self.figure_names if name not in FIGURES]
        if unknown:
            raise ValueError(
                f"figures={self.figures!r} has {unknown}: allowed are all, {', '.join(FIGURES)}"
            )
        for name in ("tokens", "draws", "snapshots"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative")


def analyze(paths: list, config: AnalyzeConfig) -> int:
    """Draw what `config` asks for of `paths`: run directories or checkpoint files, or the one
    folder or name that config.init_from is. Returns the exit code: 1 if a figure failed, which is
    printed. ValueError for what cannot be."""
    if len(paths) == 1 and config.baseline:
        raise ValueError("baseline is for runs compared: name several")
    device, _ = choose_device(config.device)
    names = compare.distinct_names(
        [path.with_suffix("") if path.is_file() else path for path in paths]
    )
    kind = PretrainedModel if config.init_from else CheckpointedRun
    runs = [kind(path, name, config, device) for path, name in zip(paths, names, strict=True)]
    parent = runs[0].folder if len(runs) == 1 and runs[0].folder else Path("out")
    folder = Path(config.out or parent / "analysis")
    make_folder(folder, "--out")
    comparison = None
    drawn = []
    if len(runs) > 1:  # first: mistakes in the records show at once, before anything slow
        records = compare.load_records(list(dict.fromkeys(run.folder for run in runs)))
        comparison = compare.compare_runs(records, folder, config.baseline)
        print(compare.format_table(comparison["table"]))
        print("".join(f"warning: {line}\n" for line in comparison["warnings"]), end="")
        drawn.append(folder / "loss.png")
    measured, failures = measure_runs(runs, config.figure_names)
    for name, found in measured.items():
        try:
            drawn.append(write_figure(name, found, config, folder))
        except Exception as e:  # of matplotlib, a disk, …: the others are still drawn
            failures[name] = e
    if comparison:
        drawn.append(
            compare.write_report(records, comparison, folder, [path.stem for path in drawn])
        )
    print("\n".join(map(str, drawn)))
    for what, error in failures.items():
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: {what} is not drawn: {reason}", file=sys.stderr)
    return 1 if failures else 0


def measure_runs(runs: list, names: list) -> tuple[dict, dict]:
    """({figure: {run: [{"checkpoint", "step", and what was measured}, …]}}, {"RUN: FIGURE": the
    error that it had}). An error of one figure does not stop the others. ValueError if none
    applies."""
    results = {name: {} for name in names}
    reasons, failures = [], {}
    for run in runs:
        left = list(names)
        for path in run.snapshots:
            model, step = run.load(path)
            for name in [n for n in left if FIGURES[n].over_training or path == run.snapshots[-1]]:
                start = time.perf_counter()
                try:
                    found = measure_figure(FIGURES[name], model, run)
                except NotApplicable as e:
                    left.remove(name)
                    reasons.append(f"{run.name}: {name} is left out: {e}")
                    print(reasons[-1])
                    continue
                except Exception as e:  # the other figures may not have this fault
                    left.remove(name)
                    results[name].pop(run.name, None)
                    failures[f"{run.name}: {name}"] = e
                    continue
                results[name].setdefault(run.name, []).append(
                    {"checkpoint": path.name, "step": step, **found}
                )
                seconds = f"{time.perf_counter() - start:.1f} s"
                print(", ".join([f"{run.name}: {name} of {path.name}", *how_much(found), seconds]))
    results = {name: found for name, found in results.items() if found}
    if not results and not failures:
        raise ValueError(f"nothing to draw: {'; '.join(reasons)}")
    return results, failures


def measure_figure(figure, model, run) -> dict:
    """What `figure` measures of a model, and how many tokens or images it read."""
    if not figure.tokens:
        return figure.measure(model, None, run)
    batches = Batches(run, run.config.tokens or figure.tokens, figure.window)
    return batches.count | figure.measure(model, batches, run)


def how_much(found: dict) -> list:
    """What was read and drawn for a figure, in words: ["4,096 tokens", "8 draws"]."""
    return [f"{found[what]:,} {what}" for what in ("tokens", "images", "draws") if what in found]


def write_figure(name: str, results: dict, config: AnalyzeConfig, folder: Path) -> Path:
    """Draw figure `name` from {run: what was measured}; write name.png and, with all its numbers,
    name.json. Print its `table`, if it has one: a line for each type, of each run's last
    checkpoint."""
    figure = FIGURES[name]
    title = f"{figure.shows} ({figure.after})" if figure.after else figure.shows
    with plt.rc_context(STYLE):  # "$" in a run's name would begin mathematics
        drawing = draw(
            {run.replace("$", r"\$"): figure.panels(its) for run, its in results.items()}
        )
        drawing.suptitle(title)
        save_figure(drawing, folder / f"{name}.png")
    record = {
        "figure": name,
        "shows": figure.shows,
        "source": figure.after,
        "settings": asdict(config),
    }
    record["runs"] = round_for_json(results)
    write_file(folder / f"{name}.json", lambda f: f.write(json.dumps(record).encode()))
    if figure.table:
        rows = [[name, "of", *figure.table]]
        for run, (*_, last) in results.items():
            rows += [
                [run, kind, *(f"{its[key]:.4g}" for key in figure.table)]
                for kind, its in last["types"].items()
            ]
        print("\n".join(table(rows)))
    return folder / f"{name}.png"


def round_for_json(value):
    """`value` as JSON gives it back: floats with 6 digits, and None for nan and infinity, which
    JSON lacks."""
    how = dict(
        parse_float=lambda digits: float(f"{float(digits):.6g}"), parse_constant=lambda _: None
    )
    return json.loads(json.dumps(value), **how)
