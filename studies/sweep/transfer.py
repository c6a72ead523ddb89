"""How the best learning rate follows a model's size: transfer.md, and the command of a larger
run."""

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanodnt.tables import table
from studies.sweep.fits import (
    Curve,
    SeedCurves,
    best_rate,
    loss_at,
    mean_curves,
    range_over_seeds,
    seeds_of,
    slope,
)
from studies.sweep.grid import FLAGS, Point, check_trainable, follow, locate
from studies.sweep.results import markdown_table, write_lines
from studies.sweep.runner import TrainingRun, read_configs

SIZES = ("n_embd", "n_layer")
# {parametrization: the sizes that may change while the best rate stays}
ACCOUNTED = {"standard": "no other size", "mup": "another n_embd"}
TUNED = ("learning_rate", "min_lr", "base_")
# Flags in these sections of --help belong to the run and not to its method: a larger model takes
# over all other flags.
OWN = ("size", "run", "data", "images", "schedule", "evaluation", "system")
METHOD = [
    name
    for name, flag in FLAGS.items()
    if not name.startswith(TUNED) and not flag.section.startswith(OWN)
]


def families(results: dict[str, Any], size: str) -> dict[str, list[dict]]:
    """{name of a curve without its size: its rows in the results of `collect`, smallest size
    first}."""
    by_name = {}
    for name, rows in results["curves"].items():
        words = [word for word in name.split() if not word.startswith(f"{size}=")]
        by_name.setdefault(" ".join(words) or "the config", []).extend(rows)
    for rows in by_name.values():
        rows.sort(key=lambda row: (int(row["flags"][size]), row["x"]))
    return by_name


def curves_of(rows: list[dict], size: str) -> SeedCurves:
    """The curves {size: {rate: {seed: loss, None if it diverged}}} of a family's rows."""
    curves = {}
    for row in rows:
        curve = curves.setdefault(int(row["flags"][size]), {})
        curve.setdefault(row["x"], {})[row["seed"]] = row["loss"]
    return curves


def exponent(curves: dict[int, Curve]) -> float:
    """The exponent p of the best rate ∝ size^p; nan where a best rate is not known."""
    return slope({size: best_rate(curve) for size, curve in curves.items()})


def cost(curves: dict[int, Curve]) -> float:
    """The cost of the smallest size's best rate at the largest size, in nats above the loss at the
    best rate of that size; where this rate is not known, above its lowest loss."""
    small = curves[min(curves)]
    large = curves[max(curves)]
    best = best_rate(large)
    if best > 0:
        lowest = loss_at(large, best)
    else:
        lowest = min((loss for loss in large.values() if loss is not None), default=math.nan)
    return loss_at(large, best_rate(small)) - lowest


def number(x: float, form: str = ".3g") -> str:
    return "–" if math.isnan(x) else f"{x:{form}}"


def measured(curves: SeedCurves, function: Callable[[dict], float], form: str) -> list[str]:
    """Two cells: `function` of the mean curves, and its range over the seeds."""
    value, low, high = range_over_seeds(curves, function)
    return [number(value, form), "–" if math.isnan(low) else f"{low:{form}} to {high:{form}}"]


def transfer_rows(by_name: dict[str, SeedCurves], size: str) -> list[list[str]]:
    """A table's rows, head first: the best rate at each size, the exponent by which it follows the
    size (0: it transfers), and the cost of the smallest size's rate at the largest, each with its
    range over the seeds."""
    sizes = sorted({n for curves in by_name.values() for n in curves})
    head = ["", *(f"best at {size}={n}" for n in sizes), "exponent", "over the seeds"]
    rows = [[*head, f"tuned at {sizes[0]}, costs at {sizes[-1]}", "over the seeds"]]
    for name, curves in by_name.items():
        means = mean_curves(curves, seeds_of(curves))
        cells = [number(best_rate(means[n])) if n in means else "–" for n in sizes]
        costs = ["–", "–"]
        if {sizes[0], sizes[-1]} <= curves.keys():
            costs = measured(curves, cost, "+z.3f")
        rows.append([name, *cells, *measured(curves, exponent, "+z.2f"), *costs])
    return rows


def swept_size(flags: dict[str, str]) -> str | None:
    """The first of SIZES among the flags with several values, if learning_rate is one of them
    too."""
    for size in SIZES:
        if {size, "learning_rate"} <= flags.keys():
            return size
    return None


def write_transfer(results: dict[str, Any], size: str, folder: Path) -> list[str]:
    """Write transfer.md, on a swept size; returns lines for the console."""
    by_name = {}
    for name, rows in families(results, size).items():
        if rows:
            by_name[name] = curves_of(rows, size)
    if not by_name:
        return []
    rows = transfer_rows(by_name, size)
    write_lines(folder / "transfer.md", markdown_table(rows))
    return ["", *table(rows)]


def check_large(points: list[Point], large: str) -> None:
    """ValueError unless sizes and learning rates are swept, and all swept flags fit the config
    `large`."""
    if not swept_size(points[0].flags):
        raise ValueError("for needs several values of learning_rate, and of n_embd or n_layer")
    runs = {tuple(large_arguments(point.run, large)): point.run for point in points}
    for words, run in runs.items():
        name = f"{Path(large).name} with {run.path.name}"
        check_trainable(TrainingRun(Path(name), words), with_data=False)


def large_commands(results: dict[str, Any], points: list[Point], large: str) -> list[str]:
    """For each family of the size that is swept: a remark, and the command that trains `large`,
    config files joined by "+", with the method and the best rate of its largest model."""
    size = swept_size(points[0].flags)
    runs = {point.run.path.name: point.run for point in points}
    lines = []
    for name, rows in families(results, size).items():
        curves = curves_of(rows, size)
        n = max(curves)
        best = best_rate(mean_curves(curves, seeds_of(curves))[n])
        if math.isnan(best):
            lines.append(
                f"# {name}: no best rate at {size}={n}: it is at an end, or beside a run that "
                "diverged"
            )
            continue
        words = large_arguments(runs[rows[-1]["run"]], large)
        kind = read_configs(words).model.parametrization
        sizes = ACCOUNTED.get(kind, "another n_embd or n_layer")
        tuned = describe_length(runs[rows[-1]["run"]].args)
        lines.append(
            f"# {name}: best at {size}={n}: {best:.3g}, in {tuned}; the command below trains "
            f"{describe_length(words)}: {kind} accounts for {sizes}, and not for more tokens"
        )
        rate = {"learning_rate": f"{best:.4g}"}
        flags = [f"--{flag}={value}" for flag, value in (rate | follow(words, rate)).items()]
        launch = ["torchrun", "--standalone", "--nproc_per_node=8", "train.py"]
        lines.append(shlex.join([*launch, *words, *flags]))
    return lines


def describe_length(args: Iterable[str]) -> str:
    """Steps and tokens of a run with these arguments of train.py."""
    model, config = read_configs(args)
    return f"{config.max_iters:,} steps of {config.batch_size * model.block_size:,} tokens"


def large_arguments(run: TrainingRun, large: str) -> list[str]:
    """Arguments of train.py: the config files of `large`, and the flags that give it the METHOD of
    `run`. It keeps its sizes; an FFN and heads whose sizes `run` sets keep their share of the
    width."""
    files = [locate(file.strip()) for file in large.split("+")]
    tuned, train = read_configs(run.args)
    model, large_train = read_configs(files)
    present = asdict(model) | asdict(large_train)
    wanted = asdict(tuned) | asdict(train)
    wider = model.n_embd / tuned.n_embd
    more_heads = model.n_head / tuned.n_head
    wanted["n_ff"] = round(tuned.n_ff * wider)
    wanted["n_kv_head"] = round(tuned.n_kv_head * more_heads)
    wanted["head_size"] = round(tuned.head_size * (wider / more_heads))
    names = METHOD
    if tuned.parametrization != "standard":
        wanted["base_n_embd"] = tuned.base_n_embd or tuned.n_embd
        wanted["base_n_layer"] = tuned.base_n_layer or tuned.n_layer
        wanted["base_head_size"] = tuned.base_head_size or tuned.head_dim
        names = [*METHOD, "base_n_embd", "base_n_layer", "base_head_size"]
    return files + [f"--{name}={wanted[name]}" for name in names if wanted[name] != present[name]]
