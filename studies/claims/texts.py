"""Numbers as text, and tables in Markdown."""

import math
from collections import Counter

from studies.claims.statistics import interval


def format_number(x: float | None) -> str:
    """Three decimals with a sign; "diverged" where one side diverged, "–" for nothing."""
    if x is None or math.isnan(x):
        return "–"
    return "diverged" if math.isinf(x) else f"{x:+.3f}".replace("-", "−")


def format_interval(values: list) -> str:
    """Mean and 95% interval of values by seed."""
    if not all(map(math.isfinite, values)):
        return f"diverged with {sum(not math.isfinite(v) for v in values)} of {len(values)} seeds"
    if len(values) < 2:
        return format_number(values[0])
    mean, low, high = map(format_number, interval(values))
    return f"{mean} ({low} to {high})"


def markdown_table(head: list, rows: list) -> list:
    """The lines of a table and an empty one; a "|" in a cell becomes "/"."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines] + [""]


def loss_text(loss: float | None | str) -> str:
    return loss if isinstance(loss, str) else "diverged" if loss is None else f"{loss:.3f}"


def describe_runs(experiment) -> str:
    """Scale, hardware, versions, days, seeds and time of the recorded runs."""
    runs = list(experiment.record.runs.values())
    machines = Counter((run["machine"]["hardware"], run["machine"]["torch"]) for run in runs)
    where = ", ".join(f"{hardware} (torch {torch}: {n} runs)" for (hardware, torch), n in machines.most_common())
    days = sorted({run["machine"]["date"] for run in runs})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    hours = sum(run["seconds"] for run in runs) / 3600
    seeds = sorted({int(word.removeprefix("--seed=")) for run in runs for word in run["args"] if "--seed=" in word})
    scale = experiment.scale
    return (
        f"Scale *{experiment.config.scale}*: {scale.title}. {len(runs)} runs, {hours:.1f} hours of one run at a time; "
        f"seeds {', '.join(map(str, seeds))}; {where}; {span}."
    )
