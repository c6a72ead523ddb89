"""What evaluations found: evaluation.json beside a run, and tables of several runs side by side."""

import json
import math
from collections import Counter
from pathlib import Path

from interop.evaluation.settings import HOW, SUITES, EvaluateConfig
from nanodnt.files import write_file
from nanodnt.run.metrics import finite
from nanodnt.tables import table

FILE = "evaluation.json"
# An entry: metrics {name: {"value": a number, "stderr": a number or None}}, settings, and what was evaluated with what.


def read_results(folder: str) -> dict:
    """{task: entry} of a run directory's evaluation.json; {} where there is none. ValueError where it is damaged."""
    path = Path(folder) / FILE
    if not path.exists():
        return {}
    task = "no tasks"
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        for task, entry in tasks.items():
            compare_results({folder: {task: entry}})  # what no table can show is damaged
            if not isinstance(entry["checkpoint"], str) or not isinstance(entry["step"], int):
                raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(
            f"{path} is damaged ({task[:99]}: {type(e).__name__}): move it away, and evaluate again"
        ) from None
    return tasks


def write_results(folder: str, new: dict) -> dict:
    """Put the entries `new` into a run directory's evaluation.json, in the place of those of the same tasks.
    Returns {task: entry} of all that it now holds."""
    tasks = read_results(folder) | finite(new)
    content = json.dumps({"tasks": tasks, "means": suite_means(tasks)}, indent=1, ensure_ascii=False)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder) / FILE, lambda f: f.write(content.encode("utf-8")))
    return tasks


def suite_means(tasks: dict) -> dict:
    """{list: its mean and how that was taken}, for each list of tasks that was evaluated as a whole: all tasks of the
    list, of the same checkpoint, with the same settings."""
    means = {}
    for suite, metrics in SUITES.items():
        entries = [tasks[task] for task in metrics if task in tasks]
        kinds = {json.dumps([e["checkpoint"], e["step"], e["settings"]], sort_keys=True) for e in entries}
        if len(entries) < len(metrics) or len(kinds) > 1:
            continue
        values = [tasks[task]["metrics"].get(metric, {}).get("value") for task, metric in metrics.items()]
        if None not in values:
            mean, settings = sum(values) / len(values), entries[0]["settings"]
            means[suite] = dict(mean=mean, metrics=metrics, how=HOW[suite], settings=settings)
    return means


# ------------------------------------------------------------------------------------------------------------ tables


def compare_results(runs: dict, only=None) -> list:
    """The lines of a table with a column for each run, {folder: {task: entry}}; `only`: a set of tasks.

    What was measured with other settings has a row of its own: numbers side by side can be compared."""
    rows, cells = {}, {}  # rows: {key: the row's name}, in the order of the table
    for folder, tasks in runs.items():
        for task, entry in tasks.items():
            if only is None or task in only:
                settings = entry["settings"]
                for metric, found in entry["metrics"].items():
                    key = (task, json.dumps(settings, sort_keys=True), metric)
                    rows[key] = f"{describe(task, settings)}  {metric}"
                    cells[key, folder] = show(**found)
        for suite, mean in suite_means(tasks).items():
            if only is None or set(mean["metrics"]) <= only:
                key = ("~", json.dumps(mean["settings"], sort_keys=True), suite)  # sorted behind all tasks
                rows[key] = f"{describe(suite, mean['settings'])}  mean of {len(mean['metrics'])} [I]"
                cells[key, folder] = show(mean["mean"])
    ordered = sorted(rows, key=lambda key: key[0] == "~")
    repeated = [name for name, n in Counter(rows.values()).items() if n > 1]  # a file, say, that has changed
    rows = {key: f"{name}, with {key[1]}" if name in repeated else name for key, name in rows.items()}
    head = ["", *(f"{folder}, {steps_of(tasks, only)}" for folder, tasks in runs.items())]
    return table([head, *([rows[key], *(cells.get((key, folder), "-") for folder in runs)] for key in ordered)])


def describe(task: str, settings: dict) -> str:
    """A task's name with the settings that are not the default."""
    shots, limit, overlap = (settings.get(name) for name in ("num_fewshot", "limit", "overlap"))
    parts = [task, f"{shots}-shot" if shots is not None else "", f"first {limit}" if limit else ""]
    parts += [f"overlap {overlap}" if overlap else "", settings.get("gen_kwargs") or ""]
    parts.append("documents apart" if settings.get("doc_mask") else "")
    if (longest := settings.get("max_answer_tokens", default := EvaluateConfig.max_answer_tokens)) != default:
        parts.append(f"answers of up to {longest} tokens" if longest else "answers of any length")
    return ", ".join(filter(None, parts))


def steps_of(tasks: dict, only) -> str:
    """Which steps' checkpoints the entries are of: "step 2000"."""
    steps = sorted({entry["step"] for task, entry in tasks.items() if only is None or task in only})
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps)) or '-'}"


def show(value, stderr=None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")
