"""Runs beside each other, by their config.json and metrics.jsonl: where they end, what differs, their losses drawn, and
report.md, a page on one or several runs.

Datasets are compared by name, and tokenizers by the size of their vocabulary: config.json says no more about them.
"""

import json
import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import numpy as np

from model import GPTConfig
from nanodnt.files import make_printable, write_file
from nanodnt.run.metrics import finish_axis, plot_losses, read_metrics, save_figure, training_seconds
from nanodnt.settings import TrainConfig
from nanodnt.tasks import task_of
from studies.analysis.figure import FIGURES, plt

# what a valid config.json holds, and of which type
RECORD = {"model": dict, "train": dict, "command": list, "versions": dict, "git_commit": (str, type(None))}
# where a run's files go, and what it shows: not listed as differences
PATHS = "out_dir overwrite wandb_log wandb_project wandb_group wandb_tags sample_interval sample_start".split()
LOSS = "Training and validation loss against steps, tokens or images, and hours of training"
DEFINITION = (
    "Baseline needs: the first step at which the baseline's validation loss is as low as the run's final one, linear "
    "between evaluations. Speed-up: that step divided by the run's steps. Both are our reading of Blockwise LR (arXiv "
    "2502.19002, sec. 6.1), which does not define it. The baseline's schedule should be longer; its learning rate has "
    "not decayed at that step, which favours the run. Hours are of training, without compiling, evaluating and "
    "saving, to the first step at which a run is as low as the baseline at its end, or as low as the target_val_loss "
    "that all runs have."
)


class RunRecord:
    """A run directory: its name in the comparison, rows of metrics.jsonl, config.json. ValueError for what is none."""

    def __init__(self, name: str, path: Path):
        self.name, self.path, self.rows, file = name, path, read_metrics(path), path / "config.json"
        if not self.rows:
            raise ValueError(f"{path} is not the directory of a run: it has no metrics.jsonl, or one without rows")
        try:
            self.config = json.loads(file.read_text(encoding="utf-8"))
            wrong = [key for key, kind in RECORD.items() if not isinstance(self.config[key], kind)]
            if wrong or not isinstance(self.config["train"]["max_iters"], int):
                raise ValueError(f"{', '.join(wrong) or 'max_iters'} of a wrong kind")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
            reason = f"{type(e).__name__}: {e}".replace("\n", " ")
            raise ValueError(f"{file} is missing or damaged ({reason}): restore it, or leave this run out") from None
        changed = len(self.config.get("git_changed_files") or [])
        commit = (self.config["git_commit"] or "unknown")[:12] + (f", changed files: {changed}" if changed else "")
        self.config["versions"]["commit"] = commit
        self.flags = self.config["model"] | self.config["train"]
        self.max_iters = self.flags["max_iters"]
        self.evaluations = [row for row in self.rows if "val_loss" in row]  # a loss is None where it was not finite
        self.end = {"val_loss": None} | (self.evaluations or self.rows)[-1]
        self.image_tokens = self.flags["block_size"] * (task_of(self.config["model"]).reads == "images")  # 0 for text

    def hours_to(self, loss: float | None) -> float | None:
        """Hours of training to the first step at which the validation loss is down to `loss`; None where it never is,
        or where metrics.jsonl has no tokens_per_s."""
        step, seconds = first_step_at(self.evaluations, loss), training_seconds(self.rows)
        known = step is not None and seconds is not None
        return float(np.interp(step, [row["step"] for row in self.rows], seconds)) / 3600 if known else None

    def state(self) -> str:
        """What is unusual about its end; "" for a run that finished."""
        step, rollbacks = self.rows[-1]["step"], max(row.get("rollbacks", 0) for row in self.rows)
        end, failed = self.config.get("end"), "failure" in self.rows[-1]
        reached = isinstance(end, dict) and str(end.get("how")).startswith("target")
        facts = {
            f"target reached at step {step}": reached,
            f"failed at step {step}": failed,
            f"at step {step} of {self.max_iters}": step < self.max_iters and not reached and not failed,
            "loss not finite": self.evaluations and self.end["val_loss"] is None,
            "never evaluated": not self.evaluations,
            f"{rollbacks} roll-backs": rollbacks,
        }
        return ", ".join(fact for fact, holds in facts.items() if holds)


def load_records(paths) -> list:
    """The run directories `paths` as `RunRecord`s."""
    return [RunRecord(name, Path(path)) for name, path in zip(distinct_names(paths), paths, strict=True)]


def distinct_names(paths: list) -> list:
    """The folders' names, or if two are the same, paths in the folder that holds all. ValueError for one twice."""
    paths = [Path(os.path.abspath(path)) for path in paths]
    if twice := [path.name for path in paths if paths.count(path) > 1]:
        raise ValueError(f"{make_printable(twice[0])} is given twice: name each run once")
    names, root = [path.name for path in paths], os.path.commonpath([path.parent for path in paths])
    if len(set(names)) < len(names):
        names = [path.relative_to(root).as_posix() for path in paths]
    return list(map(make_printable, names))


def data_unit(runs: list) -> str:
    """What data is counted in, and a loss the mean of: "image" where all runs are on images, else "token"."""
    return "image" if all(run.image_tokens for run in runs) else "token"


def first_step_at(evaluations: list, loss: float | None) -> float | None:
    """The first step at which a validation curve is down to `loss`, linear between evaluations; None if it never is,
    or if `loss` is None. An evaluation that was not finite interrupts the curve."""
    before = None
    for row in evaluations if loss is not None else ():
        step, value = row["step"], row["val_loss"]
        if value is not None and value <= loss:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = None if value is None else (step, value)
    return None


def final_loss_table(runs: list, baseline: str = "") -> dict:
    """Where each run ends, compared with `baseline`: a run's name or path, "" for the first. ValueError for neither.

    {"baseline": name, "baseline_steps" (to its last finite evaluation), "baseline_loss", "unit": of `data_unit`,
    "target": the target_val_loss that all runs have, or None, "rows", "warnings"}. A row: step, tokens, loss, val_bpb
    and, of images, their number and top1 at the last evaluation; best loss; baseline_needs and speedup (DEFINITION);
    reaches_baseline, the step at which the run is first as low as the baseline at its end; time_to_loss, its hours of
    training to there, and time_to_target. None: there is none, or it was never reached."""
    named = [run for run in runs if baseline in ("", run.name) or Path(baseline).resolve() == run.path.resolve()]
    if not named:
        names = ", ".join(run.name for run in runs)
        raise ValueError(f"baseline={baseline!r} is none of the runs: choose one of {names}")
    base, rows, targets = named[0], [], [run.flags.get("target_val_loss") or None for run in runs]
    goal, target = base.end["val_loss"], targets[0] if targets.count(targets[0]) == len(runs) else None
    for run in runs:
        step, tokens, loss = (run.end[key] for key in ("step", "tokens", "val_loss"))
        losses = [row["val_loss"] for row in run.evaluations if row["val_loss"] is not None]
        row = dict(name=run.name, step=step, tokens=tokens, loss=loss, best=min(losses, default=None))
        row |= dict(images=tokens // run.image_tokens if run.image_tokens else None)
        row |= dict(top1=run.end.get("val_top1"), val_bpb=run.end.get("val_bpb"))
        row |= dict(difference=None, baseline_needs=None, speedup=None, reaches_baseline=None, state=run.state())
        row |= dict(time_to_loss=run.hours_to(goal), time_to_target=run.hours_to(target))
        if run is not base:
            row["difference"] = loss - goal if None not in (loss, goal) else None
            row["baseline_needs"] = needs = first_step_at(base.evaluations, loss)
            row["speedup"] = needs / step if step and needs is not None else None
            row["reaches_baseline"] = first_step_at(run.evaluations, goal)
        rows.append(row)
    last = max((row["step"] for row in base.evaluations if row["val_loss"] is not None), default=None)
    facts = {"baseline": base.name, "baseline_steps": last, "baseline_loss": goal, "unit": data_unit(runs)}
    return facts | {"target": target, "rows": rows, "warnings": find_warnings(runs, base, rows)}


def find_warnings(runs: list, base: RunRecord, rows: list) -> list:
    """Lines on what makes the numbers of the table mean less than they seem to."""

    def differing(*flags):
        """Which of the flags differ from the baseline's, and in which runs; "" if none does."""
        facts = []
        for flag in flags:
            usual, *values = (format_value(run.flags.get(flag)) for run in (base, *runs))
            others = [f"{value} ({run.name})" for run, value in zip(runs, values, strict=True) if value != usual]
            facts += [f"{flag} is {usual}, but {', '.join(others)}"] if others else []
        return "; ".join(facts)

    unit, fields, lines = data_unit(runs), ["dataset", "vocab_size", "block_size", "eval_tokens"], []
    if unit == "image" and not any(run.flags.get("eval_tokens") for run in runs):
        fields.remove("block_size")  # a loss is of an image, however many tokens it has; but eval_tokens counts tokens
    if different := differing(*fields):
        data = "images" if unit == "image" else "text"
        lines.append(f"losses are not comparable, they are not of the same {data}: {different}")
    if different := differing("batch_size"):
        lines.append(f"a step is not the same number of {unit}s everywhere: {different}")
    if len({row[f"{unit}s"] for row in rows}) > 1:
        lines.append(f"the runs end after different numbers of {unit}s: the differences are not at equal training")
    if any(run.max_iters >= base.max_iters for run in runs if run is not base):
        longer = "speed-ups need a longer one"
        lines.append(f"the baseline's schedule ({base.max_iters:,} steps) is no longer than another run's: {longer}")
    return lines


def table_cells(table: dict) -> list:
    """The headings and the rows of `final_loss_table` as texts; for a single run without what needs a baseline."""

    def number(value, form, words="{}", missing="–"):
        return missing if value is None else words.format(format(value, form))

    data, last, goal = f"{table['unit']}s", table["baseline_steps"], table["baseline_loss"]
    lines, several = [], len(table["rows"]) > 1
    for row in table["rows"]:
        is_base, comparable = row["name"] == table["baseline"], None not in (row["loss"], last)
        cells = {"run": row["name"], "steps": f"{row['step']:,}", data: f"{row[data]:,}"}
        cells |= {"final loss": number(row["loss"], ".4f"), "best": number(row["best"], ".4f")}
        if several:
            never = f"> {last:,} steps, needs a longer baseline" if comparable and not is_base else "–"
            cells["difference"] = number(row["difference"], "+.4f")
            cells["baseline needs"] = number(row["baseline_needs"], ",.0f", "{} steps", never)
            cells["speed-up"] = number(row["speedup"], ".2f", "{}×")
            never = "–" if is_base or goal is None else f"not in {row['step']:,} steps"
            cells["reaches baseline"] = number(row["reaches_baseline"], ",.0f", "at {}", never)
        times = {"time_to_loss": "hours to baseline's loss"} if several else {}
        for key, words in (times | {"time_to_target": f"hours to {table['target']}"}).items():
            if any(row[key] is not None for row in table["rows"]):
                cells[words] = number(row[key], ".3g")
        for key, words, form in (("val_bpb", "bits per byte", ".4f"), ("top1", "top-1", ".2%")):
            if any(row[key] is not None for row in table["rows"]):
                cells[words] = number(row[key], form)
        cells["state"] = ", ".join(filter(None, ["baseline" if is_base and several else "", row["state"]]))
        lines.append(cells)
    return [list(lines[0]), *(list(cells.values()) for cells in lines)]


def format_table(lines: list) -> str:
    """A table of texts, the first line its headings, as aligned Markdown."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines)


def format_value(value) -> str:
    """A setting as text: strings as they are, but '' for the empty one."""
    return value if isinstance(value, str) and value else repr(value)


def find_differences(runs: list) -> list:
    """[{"section": "model", "train" or "versions", "field", "default", "values": one per run}] of every field but PATHS
    that is not the same in all runs, all as text; "–" where there is none."""
    found = []
    for section, defaults in (("model", asdict(GPTConfig())), ("train", asdict(TrainConfig())), ("versions", {})):
        settings = [run.config[section] for run in runs]
        for field in dict.fromkeys(name for setting in settings for name in setting):
            default, *values = (format_value(its[field]) if field in its else "–" for its in (defaults, *settings))
            if len(set(values)) > 1 and field not in PATHS:
                found.append(dict(section=section, field=field, default=default, values=values))
    return found


def draw_losses(runs: list, path: Path, smooth: float) -> None:
    """Losses against steps, tokens or images, and hours of training, as PNG to `path`. The y axis is fitted to what
    comes after a twentieth of the longest run, as in a run's own loss.png."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), dpi=130, sharey=True, layout="constrained")
    unit, lines = data_unit(runs), []  # a line of each run, for the legend
    for i, run in enumerate(runs):
        steps, counts = zip(*((row["step"], row["tokens"]) for row in run.rows), strict=True)
        counts = [n // (run.image_tokens if unit == "image" else 1) for n in counts]
        hours = [s / 3600 for s in training_seconds(run.rows) or ()]  # none without tokens_per_s
        xs = [x for x in (steps, counts, hours) if x]
        drawn = [plot_losses(ax, x, run.rows, smooth, f"C{i % 10}") for ax, x in zip(axes, xs, strict=False)]
        lines.append(drawn[0][0])
    names = ("step", f"{unit}s", f"hours of training ({unit}s / {unit}s per s;\nwithout evaluation and saving)")
    every, longest = [row for run in runs for row in run.rows], max(run.rows[-1]["step"] for run in runs)
    for axis, name in zip(axes, names, strict=True):
        axis.set_xlabel(name)
        axis.locator_params(axis="x", nbins=6)
        finish_axis(axis, every, 0.05 * longest)
    axes[0].set_ylabel(f"loss (nats per {unit})")
    labels = [run.name if len(run.name) <= 60 else f"…{run.name[-59:]}" for run in runs]
    title = f"training{f', smoothed over {smooth:.0%} of the run' if smooth else ''}; dashed: validation"
    legend = figure.legend(lines, labels, title=title, loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a "$" in a run's name is a "$"
    save_figure(figure, path)


def compare_runs(runs: list, out: Path, baseline: str = "", smooth: float = 0.05) -> dict:
    """Draw loss.png and write compare.json in the folder `out`; returns what compare.json holds. `smooth`: the window
    that training losses are averaged over, as a share of the run."""
    result = {"definition": DEFINITION, "smooth": smooth, "table": final_loss_table(runs, baseline)}
    result |= {"differences": find_differences(runs), "figure": "loss.png"}
    draw_losses(runs, out / "loss.png", smooth)
    write_file(out / "compare.json", lambda f: f.write(json.dumps(result, indent=2).encode()))
    return result


def write_report(runs: list, comparison: dict, folder: Path, figures: list) -> Path:
    """Write report.md in `folder`; returns its path. `comparison`: of `compare_runs`; `figures`: its PNGs."""
    table, several = comparison["table"], len(runs) > 1
    page = [f"# {len(runs)} runs compared" if several else f"# Run {plain(runs[0].name)}"]
    page += ["## Where they end", f"Validation loss in nats per {table['unit']}, at the last evaluation."]
    page += [format_table(plain(table_cells(table))), *(f"**Warning:** {plain(line)}" for line in table["warnings"])]
    if several:
        header = ["field", "of", "default", *(run.name for run in runs)]
        rows = [[d["field"], d["section"], d["default"], *d["values"]] for d in comparison["differences"]]
        nothing = "Nothing in their configuration, versions or commit."
        page += [plain(DEFINITION), "## What differs", format_table(plain([header, *rows])) if rows else nothing]
    page.append("## Figures")
    for name in figures:
        shows, after = (FIGURES[name].shows, FIGURES[name].after) if name in FIGURES else (LOSS, "")
        page.append(f"**{name}**: {shows}.{f' After {after}.' if after else ''}\n\n![{shows}]({name}.png)")
    page.append("## How they were made")
    for run in runs:
        facts = [f"{key} {format_value(value)}" for key, value in run.config["versions"].items() if value is not None]
        facts += [f"started {run.config['started']}"] if "started" in run.config else []
        command = " ".join(make_printable(shlex.quote(str(word))) for word in run.config["command"])
        page += [f"### {plain(run.name)}", f"    {command}", plain(" · ".join(facts))]  # four spaces: no markup in it
        if (failure := run.rows[-1].get("failure")) is not None:
            page.append(f"**Failed:** {plain(str(failure))}")
    path = folder / "report.md"
    write_file(path, lambda f: f.write("\n\n".join([*page, ""]).encode(errors="replace")))
    return path


def plain(text):
    """`text`, or lists of texts, each in one line of Markdown that shows it as it is, without markup."""
    if isinstance(text, list):
        return [plain(part) for part in text]
    return re.sub(r"[\\`*\[\]<&|~$#]|\b_|_\b", r"\\\g<0>", make_printable(text))
