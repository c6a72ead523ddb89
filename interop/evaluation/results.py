"""Results of evaluations: evaluation.json beside a run, and tables of several runs side by side.

An entry has metrics {name: {"value": a number, "stderr": a number or None}}, settings, and facts on
the model that was evaluated."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from interop.evaluation.settings import SUITES, EvaluateConfig
from nanodnt.files import make_folder, write_file
from nanodnt.run.metrics import finite
from nanodnt.tables import table

FILE = "evaluation.json"

Entry = dict[str, Any]


def read_results(folder: str) -> dict[str, Entry]:
    """{task: entry} of a run directory's evaluation.json; {} without such a file. ValueError where
    it is damaged."""
    path = Path(folder) / FILE
    task = "no tasks"
    if not path.exists():
        return {}
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        for task, entry in tasks.items():
            compare_results({folder: {task: entry}})  # an entry that no table can show is damaged
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"{path} is damaged ({task[:99]}: {type(e).__name__}): move it away, evaluate again"
        ) from None
    return tasks


def write_results(
    folder: str, entries: dict[str, Entry], without: str, about: dict[str, Any]
) -> None:
    """Put entries {task: entry} into a run directory's evaluation.json, in place of those of the
    same tasks. `without` is added to the names of the tasks, `about` to all entries."""
    tasks = read_results(folder)
    for task, entry in entries.items():
        entry["settings"]["dtype"] = about["dtype"]
        tasks[task + without] = finite(entry | about)
    results = {"tasks": tasks, "means": suite_means(tasks)}
    content = json.dumps(results, indent=1, ensure_ascii=False)
    make_folder(Path(folder), "--out_dir")
    # the name of a file may be no text: JSON has the same escapes
    raw = content.encode("utf-8", "backslashreplace")
    write_file(Path(folder) / FILE, lambda f: f.write(raw))


def suite_means(tasks: dict[str, Entry]) -> dict[str, Entry]:
    """{list: an entry with its mean}, for each list of tasks that was evaluated in full: all tasks
    of the list, of the same checkpoint, with the same settings."""
    means = {}
    for suite, metrics in SUITES.items():
        entries = [tasks[task] for task in metrics if task in tasks]
        kinds = set()
        for entry in entries:
            kind = [entry["checkpoint"], entry["step"], entry["settings"]]
            kinds.add(json.dumps(kind, sort_keys=True))
        if len(entries) < len(metrics) or len(kinds) > 1:
            continue
        values = []
        for entry, metric in zip(entries, metrics.values(), strict=True):
            values.append(entry["metrics"].get(metric, {}).get("value"))
        if None not in values:
            mean = {f"mean of {len(values)} [I]": {"value": sum(values) / len(values)}}
            means[suite] = {"metrics": mean, "settings": entries[0]["settings"]}
    return means


def mean_entry(entries: dict[str, Entry]) -> dict[str, Entry]:
    """{task: the entry} for the mean of exact_match over several sources, {name: entry}, each with
    the same weight; {} for a single source, or if one of them has no exact_match."""
    matches = [entry["metrics"].get("exact_match") for entry in entries.values()]
    n = len(matches)
    if n < 2 or None in matches:
        return {}
    mean = sum(match["value"] for match in matches) / n
    stderr = math.hypot(*(match["stderr"] for match in matches)) / n
    inputs = {name: dict(entries[name]["settings"]) for name in sorted(entries)}
    return {
        f"answers, mean of {n}": {
            "metrics": {"exact_match": {"value": mean, "stderr": stderr}},
            "settings": {"inputs": inputs},
        }
    }


def compare_results(runs: dict[str, dict[str, Entry]]) -> list[str]:
    """The lines of a table with a column for each run, {folder: {task: entry}}. Metrics with
    different settings are in different rows, so numbers side by side can be compared."""
    head = [""]
    for folder, tasks in runs.items():
        steps = sorted({entry["step"] for entry in tasks.values()})
        word = "steps" if len(steps) > 1 else "step"
        head.append(f"{folder}, {word} {', '.join(map(str, steps)) or '-'}")
    names = {}  # {(task, settings, metric): name of the row}
    cells = {}  # {(folder, task, settings, metric): text}
    means = [(folder, suite_means(tasks)) for folder, tasks in runs.items()]
    for folder, entries in [*runs.items(), *means]:  # the means after all tasks
        for task, entry in entries.items():
            settings = json.dumps(entry["settings"], sort_keys=True)
            for metric, value in entry["metrics"].items():
                names[task, settings, metric] = f"{describe(task, entry['settings'])}  {metric}"
                cells[folder, task, settings, metric] = show(**value)
    counts = Counter(names.values())
    lines = [head]
    for key, name in names.items():
        if counts[name] > 1:  # the same file before and after a change, for example
            _, settings, _ = key
            name = f"{name}, with {settings}"
        lines.append([name, *(cells.get((folder, *key), "-") for folder in runs)])
    return table(lines)


def describe(task: str, settings: dict[str, Any]) -> str:
    """A task's name with the settings that are not the default."""
    words = [task]
    for key in ("num_fewshot", "limit", "gen_kwargs", "overlap", "max_answer_tokens", "doc_mask"):
        if key in settings and settings[key] != getattr(EvaluateConfig, key, False):
            words.append(f"{key}={settings[key]}")
    return ", ".join(words)


def show(value: float | None, stderr: float | None = None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.4f}" if stderr is None else f"{value:,.4f} ± {stderr:.4f}"
