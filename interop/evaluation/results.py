"""What evaluations found: evaluation.json beside a run, and tables of several runs side by side.

An entry has metrics {name: {"value": a number, "stderr": a number or None}}, settings, and what was
evaluated."""

import json
import math
from collections import Counter
from pathlib import Path

from interop.evaluation.settings import SUITES, EvaluateConfig
from nanodnt.files import make_folder, write_file
from nanodnt.run.metrics import finite
from nanodnt.tables import table

FILE = "evaluation.json"


def read_results(folder: str) -> dict:
    """{task: entry} of a run directory's evaluation.json; {} where there is none. ValueError where
    it is damaged."""
    path, task = Path(folder) / FILE, "no tasks"
    if not path.exists():
        return {}
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        for task, entry in tasks.items():
            compare_results({folder: {task: entry}})  # what no table can show is damaged
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"{path} is damaged ({task[:99]}: {type(e).__name__}): move it away, evaluate again"
        ) from None
    return tasks


def write_results(folder: str, found: dict, without: str, about: dict) -> None:
    """Put entries {task: entry} into a run directory's evaluation.json, over those of the same
    tasks. `without`: what is put behind the names of tasks. `about`: what all entries get."""
    for entry in found.values():
        entry["settings"]["dtype"] = about["dtype"]
    tasks = read_results(folder) | finite(
        {task + without: entry | about for task, entry in found.items()}
    )
    content = json.dumps(
        {"tasks": tasks, "means": suite_means(tasks)}, indent=1, ensure_ascii=False
    )
    make_folder(Path(folder), "--out_dir")
    # the name of a file may be no text: JSON has the same escapes
    write_file(Path(folder) / FILE, lambda f: f.write(content.encode("utf-8", "backslashreplace")))


def suite_means(tasks: dict) -> dict:
    """{list: an entry with its mean}, for each list of tasks that was evaluated as a whole: all
    tasks of the list, of the same checkpoint, with the same settings."""
    means = {}
    for suite, metrics in SUITES.items():
        found = [(tasks[task], metric) for task, metric in metrics.items() if task in tasks]
        kinds = {
            json.dumps([e["checkpoint"], e["step"], e["settings"]], sort_keys=True)
            for e, _ in found
        }
        values = [entry["metrics"].get(metric, {}).get("value") for entry, metric in found]
        if len(values) == len(metrics) and len(kinds) == 1 and None not in values:
            mean = {f"mean of {len(values)} [I]": dict(value=sum(values) / len(values))}
            means[suite] = dict(metrics=mean, settings=found[0][0]["settings"])
    return means


def mean_entry(entries: dict) -> dict:
    """{task: the entry} for the mean of exact_match over several sources, {name: entry}, each with
    the same weight; {} where there is only one, or one of them has no exact_match."""
    found = [entry["metrics"].get("exact_match") for entry in entries.values()]
    if len(found) < 2 or None in found:
        return {}
    mean = sum(one["value"] for one in found) / len(found)
    stderr = math.hypot(*(one["stderr"] for one in found)) / len(found)
    metrics = dict(exact_match=dict(value=mean, stderr=stderr))
    settings = dict(inputs={name: dict(entries[name]["settings"]) for name in sorted(entries)})
    return {f"answers, mean of {len(found)}": dict(metrics=metrics, settings=settings)}


def compare_results(runs: dict) -> list:
    """The lines of a table with a column for each run, {folder: {task: entry}}. What was measured
    with other settings has a row of its own: numbers side by side can be compared."""
    head, rows, cells = [""], {}, {}  # rows: {key: the row's name}
    for folder, tasks in runs.items():
        steps = sorted({entry["step"] for entry in tasks.values()})
        head.append(f"{folder}, step{'s' * (len(steps) > 1)} {', '.join(map(str, steps)) or '-'}")
    means = [(folder, suite_means(tasks)) for folder, tasks in runs.items()]
    for folder, entries in [*runs.items(), *means]:  # the means behind all tasks
        for task, entry in entries.items():
            settings = json.dumps(entry["settings"], sort_keys=True)
            for metric, found in entry["metrics"].items():
                rows[task, settings, metric] = f"{describe(task, entry['settings'])}  {metric}"
                cells[folder, task, settings, metric] = show(**found)
    # of a file, say, that has changed
    twice = [name for name, n in Counter(rows.values()).items() if n > 1]
    names = {key: f"{name}, with {key[1]}" if name in twice else name for key, name in rows.items()}
    return table(
        [
            head,
            *(
                [name, *(cells.get((folder, *key), "-") for folder in runs)]
                for key, name in names.items()
            ),
        ]
    )


def describe(task: str, settings: dict) -> str:
    """A task's name with the settings that are not the default."""
    told = ("num_fewshot", "limit", "gen_kwargs", "overlap", "max_answer_tokens", "doc_mask")
    changed = [
        key
        for key in told
        if key in settings and settings[key] != getattr(EvaluateConfig, key, False)
    ]
    return ", ".join([task, *(f"{key}={settings[key]}" for key in changed)])


def show(value, stderr=None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.4f}" if stderr is None else f"{value:,.4f} ± {stderr:.4f}"
