"""Runs beside each other, by their config.json and metrics.jsonl: a table of their final losses,
their differing settings, their loss curves, and report.md, a page with all of it.

Datasets are compared by name, and tokenizers by the size of their vocabulary: config.json has no
more on them.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from model import GPTConfig
from nanodnt.files import make_printable, write_file
from nanodnt.run.metrics import (
    curve_style,
    finish_axis,
    plot_losses,
    read_metrics,
    save_figure,
    training_seconds,
)
from nanodnt.settings import TrainConfig
from nanodnt.tasks import task_of
from studies.analysis.figure import FIGURES, legend_of_runs, picture, plain_label, plt

# training losses are averaged over a window of this share of the run, as in a run's own loss.png
SMOOTH = 0.05
# fields on a run's files and its display, which are not listed as differences
PATHS = {
    "out_dir",
    "overwrite",
    "wandb_log",
    "wandb_project",
    "wandb_group",
    "wandb_tags",
    "sample_interval",
    "sample_start",
}
LOSS = "Training and validation loss against steps, tokens or images, and hours of training"
# the table's columns: {key of a row: (heading, format)}; a column without any value is left out
COLUMNS = {
    "name": ("run", "{}"),
    "step": ("steps", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "images": ("images", "{:,}"),
    "loss": ("final loss", "{:.4f}"),
    "best": ("best", "{:.4f}"),
    "difference": ("difference", "{:+.4f}"),
    "baseline_needs": ("baseline needs", "{:,.0f} steps"),
    "speedup": ("speed-up", "{:.2f}×"),
    "time_to_loss": ("hours to baseline's loss", "{:.3g}"),
    "time_to_target": ("hours to target", "{:.3g}"),
    "val_bpb": ("bits per byte", "{:.4f}"),
    "top1": ("top-1", "{:.2%}"),
    "state": ("state", "{}"),
}
DEFINITION = (
    "Baseline needs: the first step at which the baseline's validation loss is as low as the run's "
    "final one, linear between evaluations; a dash where it never is, so the baseline's schedule "
    "should be longer. Speed-up: that step divided by the run's steps. Both are our reading of "
    "Blockwise LR (arXiv 2502.19002, sec. 6.1). Hours are of training, without compiling, "
    "evaluating and saving, to the first step at which a run is as low as the baseline at its end, "
    "or as low as the target_val_loss that all runs have."
)

TextTable = list[list[str]]


class RunRecord:
    """A run directory: its name in the comparison, rows of metrics.jsonl, config.json. ValueError
    for a folder without these files."""

    def __init__(self, name: str, path: Path, number: int) -> None:
        self.name = name
        self.number = number  # among all runs of the command: gives its color
        self.rows = read_metrics(path)
        if not self.rows:
            raise ValueError(
                f"{path} is not the directory of a run: it has no metrics.jsonl, or one without "
                "rows"
            )
        file = path / "config.json"
        try:
            self.config = json.loads(file.read_text(encoding="utf-8"))
            self.flags = self.config["model"] | self.config["train"]
            self.max_iters = int(self.flags["max_iters"])
            self.versions = self.config["versions"] | {"commit": self.config["git_commit"]}
            self.command = " ".join(shlex.quote(str(word)) for word in self.config["command"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
            reason = f"{type(e).__name__}: {e}".replace("\n", " ")
            raise ValueError(
                f"{file} is missing or damaged ({reason}): restore it, or leave this run out"
            ) from None
        self.is_of_images = task_of(self.config["model"]).reads == "images"
        # the rows with a validation loss, which is None if it was not finite
        self.evaluations = [row for row in self.rows if "val_loss" in row]
        self.end = {"val_loss": None} | (self.evaluations or self.rows)[-1]

    def hours_to(self, loss: float | None) -> float | None:
        """Hours of training to the first step at which the validation loss is down to `loss`; None
        where it never is, or where metrics.jsonl has no tokens_per_s."""
        step = first_step_at(self.evaluations, loss)
        seconds = training_seconds(self.rows)
        if step is None or seconds is None:
            return None
        return float(np.interp(step, [row["step"] for row in self.rows], seconds)) / 3600

    def state(self) -> str | None:
        """The early end of the run, in words; None if it made all its steps."""
        step = self.rows[-1]["step"]
        if "failure" in self.rows[-1]:
            return f"failed at step {step}"
        if step >= self.max_iters:
            return None
        end = self.config.get("end", {}).get("how", "unfinished")
        return f"{end} at step {step} of {self.max_iters}"


def load_records(paths: Sequence[Path]) -> list[RunRecord]:
    """The records of these run directories; one that is there several times is read once."""
    once = list(dict.fromkeys(paths))
    records = []
    for name, path in zip(distinct_names(once), once, strict=True):
        records.append(RunRecord(name, Path(path), paths.index(path)))
    return records


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, or if two are the same, paths in the folder that holds all. ValueError if
    a folder is given twice."""
    paths = [Path(os.path.abspath(path)) for path in paths]
    if len(set(paths)) < len(paths):
        raise ValueError("a run is given twice: name each once")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        root = os.path.commonpath([path.parent for path in paths])
        names = [path.relative_to(root).as_posix() for path in paths]
    return list(map(make_printable, names))


def data_unit(runs: list[RunRecord]) -> str:
    """The unit in which data is counted, and over which a loss is the mean: "image" where all runs
    are on images, else "token"."""
    return "image" if all(run.is_of_images for run in runs) else "token"


def first_step_at(evaluations: list[dict[str, Any]], loss: float | None) -> float | None:
    """The first step at which a validation curve is down to `loss`, linear between evaluations;
    None if it never is, or if `loss` is None. An evaluation that was not finite interrupts the
    curve."""
    if loss is None:
        return None
    before = {"val_loss": None}
    for row in evaluations:
        if row["val_loss"] is not None and row["val_loss"] <= loss:
            if before["val_loss"] is None:
                return float(row["step"])
            share = (before["val_loss"] - loss) / (before["val_loss"] - row["val_loss"])
            return before["step"] + share * (row["step"] - before["step"])
        before = row
    return None


def final_loss_table(runs: list[RunRecord], baseline: str = "") -> list[dict[str, Any]]:
    """A row with the keys of COLUMNS for each run: its end, compared with the run named `baseline`,
    "" for the first. A number that a run lacks or never reached is None. ValueError if no run has
    that name."""
    names = [run.name for run in runs]
    if baseline and baseline not in names:
        raise ValueError(
            f"baseline={baseline!r} is none of the runs: choose one of {', '.join(names)}"
        )
    base = runs[names.index(baseline)] if baseline else runs[0]
    targets = {run.flags.get("target_val_loss") or None for run in runs}
    target = targets.pop() if len(targets) == 1 else None
    unit = data_unit(runs)
    rows = []
    for run in runs:
        end = run.end
        loss = end["val_loss"]
        losses = [row["val_loss"] for row in run.evaluations if row["val_loss"] is not None]
        row = dict.fromkeys(COLUMNS)
        row |= dict(name=run.name, step=end["step"], loss=loss, state=run.state())
        row |= dict(val_bpb=end.get("val_bpb"), top1=end.get("val_top1"))
        row["best"] = min(losses, default=None)
        if unit == "image":
            row["images"] = end["tokens"] // run.flags["block_size"]
        else:
            row["tokens"] = end["tokens"]
        row["time_to_target"] = run.hours_to(target)
        if len(runs) > 1:
            row["time_to_loss"] = run.hours_to(base.end["val_loss"])
        if run is not base:
            if None not in (loss, base.end["val_loss"]):
                row["difference"] = loss - base.end["val_loss"]
            needs = first_step_at(base.evaluations, loss)
            row["baseline_needs"] = needs
            if needs is not None and row["step"]:
                row["speedup"] = needs / row["step"]
        rows.append(row)
    return rows


def find_warnings(runs: list[RunRecord]) -> list[str]:
    """A line for the reader if the losses of the table are not comparable; else none."""
    fields = ["dataset", "eval_tokens", "eval_rows"]
    if data_unit(runs) == "token":  # the loss of an image does not depend on its tokens
        fields += ["vocab_size", "block_size"]
    older = {"eval_rows": "spread"}  # what runs had before there was the flag
    differing = []
    for field in fields:
        values = {str(run.flags.get(field, older.get(field))) for run in runs}
        if len(values) > 1:
            differing.append(field)
    if not differing:
        return []
    return [f"losses are not comparable, since these differ: {', '.join(differing)}"]


def table_cells(rows: list[dict[str, Any]]) -> TextTable:
    """The headings and the rows of `final_loss_table` as texts, without columns that have no
    value."""
    columns = {}
    for key, column in COLUMNS.items():
        if any(row[key] is not None for row in rows):
            columns[key] = column
    lines = [[heading for heading, _ in columns.values()]]
    for row in rows:
        cells = []
        for key, (_, form) in columns.items():
            cells.append("–" if row[key] is None else form.format(row[key]))
        lines.append(cells)
    return lines


def format_table(lines: TextTable) -> str:
    """A table of texts, the first line its headings, as aligned Markdown."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines)


def find_differences(runs: list[RunRecord]) -> TextTable:
    """[[field, "model", "train" or "versions", its default, a value for each run]] of every field
    but PATHS that is not the same in all runs, all as text; "–" where a run lacks the field."""
    differences = []
    sections = {
        "model": (asdict(GPTConfig()), [run.config["model"] for run in runs]),
        "train": (asdict(TrainConfig()), [run.config["train"] for run in runs]),
        "versions": ({}, [run.versions for run in runs]),
    }
    for section, (defaults, settings) in sections.items():
        fields = dict.fromkeys(name for setting in settings for name in setting)
        for field in fields:
            values = [str(setting.get(field, "–")) for setting in settings]
            if len(set(values)) > 1 and field not in PATHS:
                default = str(defaults.get(field, "–"))
                differences.append([field, section, default, *values])
    return differences


def draw_losses(runs: list[RunRecord], path: Path, formats: Sequence[str] = ("png",)) -> None:
    """Losses against steps, tokens or images, and hours of training, to `path` in each format. The
    y axis is fitted to the losses after a twentieth of the longest run, as in a run's own
    loss.png."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), sharey=True, layout="constrained")
    unit = data_unit(runs)
    labels = {}  # {name of a run: its line}
    for run in runs:
        tokens_per_unit = run.flags["block_size"] if unit == "image" else 1
        seconds = training_seconds(run.rows)  # None without tokens_per_s
        xs = (
            [row["step"] for row in run.rows],
            [row["tokens"] // tokens_per_unit for row in run.rows],
            [s / 3600 for s in seconds] if seconds else [math.nan] * len(run.rows),
        )
        for ax, x in zip(axes, xs, strict=True):
            _, labels[plain_label(run.name)] = plot_losses(
                ax, x, run.rows, SMOOTH, curve_style(run.number)
            )
    rows = [row for run in runs for row in run.rows]
    for ax, name in zip(axes, ("step", f"{unit}s", "hours of training"), strict=True):
        ax.set_xlabel(name)
        ax.locator_params("x", nbins=5)
        finish_axis(ax, rows, 0.05 * max(row["step"] for row in rows))
    axes[0].set_ylabel(f"loss (nats per {unit})")
    legend_of_runs(figure, labels, "validation (dashed); training, smoothed (solid)")
    save_figure(figure, path, formats)


def compare_runs(
    runs: list[RunRecord],
    out: Path,
    baseline: str,
    formats: Sequence[str],
) -> dict[str, list]:
    """Draw loss.png in the folder `out`, by `draw_losses`. Returns {"table": lines of
    `table_cells`, "warnings": lines of `find_warnings`}."""
    table = table_cells(final_loss_table(runs, baseline))
    draw_losses(runs, out / "loss.png", formats)
    return {"table": table, "warnings": find_warnings(runs)}


def write_report(
    runs: list[RunRecord],
    comparison: dict[str, list],
    folder: Path,
    figures: Sequence[str],
    formats: Sequence[str],
) -> Path:
    """Write report.md in `folder`; returns its path. `comparison` is the result of `compare_runs`;
    `figures` are the names of the figures in the folder, `formats` their formats."""
    page = [f"# {len(runs)} runs compared", "## Where they end"]
    page.append(f"Validation loss in nats per {data_unit(runs)}, at the last evaluation.")
    page.append(format_table(plain(comparison["table"])))
    page += [f"**Warning:** {line}" for line in comparison["warnings"]]
    page += [plain(DEFINITION), "## What differs"]
    header = ["field", "of", "default", *(run.name for run in runs)]
    page += [format_table(plain([header, *find_differences(runs)])), "## Figures"]
    for name in figures:
        shows = FIGURES[name].shows if name in FIGURES else LOSS
        page.append(f"**{name}**: {shows}.\n\n{picture(shows, name, formats)}")
    page.append("## How they were made")
    for run in runs:
        facts = [f"{key} {value}" for key, value in run.versions.items()]
        # four spaces begin a block of code, without markup
        page += [f"### {plain(run.name)}", f"    {make_printable(run.command)}"]
        page.append(plain(" · ".join(facts)))
        if failure := run.rows[-1].get("failure"):
            page.append(f"**Failed:** {plain(str(failure))}")
    path = folder / "report.md"
    write_file(path, lambda f: f.write("\n\n".join([*page, ""]).encode(errors="replace")))
    return path


def plain(text: str | list) -> str | list:
    """A text, or each text in a list of lists, as one line of Markdown without markup."""
    if isinstance(text, list):
        return [plain(part) for part in text]
    return re.sub(r"[\\`*\[\]<&|~$#]|\b_|_\b", r"\\\g<0>", make_printable(text))
