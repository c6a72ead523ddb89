"""How the best learning rate follows a model's size: transfer.md, and the command of a larger
run."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path

from nanodnt.files import write_file
from nanodnt.tables import table
from studies.sweep.fits import best_rate, loss_at, mean_curves, range_over_seeds, seeds_of, slope
from studies.sweep.grid import FLAGS, check_trainable, follow, locate
from studies.sweep.results import markdown_table
from studies.sweep.runner import TrainingRun, read_configs

SIZES = ("n_embd", "n_layer")
# what a parametrization takes care of, so that the rate stays
ACCOUNTED = {"standard": "no other size", "mup": "another n_embd"}
TUNED = ("learning_rate", "min_lr", "base_")
# of the run, not of its method: a larger model takes over all other flags
OWN = ("size", "run", "data", "images", "schedule", "evaluation", "system")  # how sections begin
METHOD = [
    name
    for name, flag in FLAGS.items()
    if not name.startswith(TUNED) and not flag.section.startswith(OWN)
]


def families(found: dict, size: str) -> dict:
    """{curve without its size: its rows of what `collect` found, smallest size first}."""
    by_name = {}
    for name, rows in found["curves"].items():
        family = (
            " ".join(word for word in name.split() if not word.startswith(f"{size}="))
            or "the config"
        )
        by_name.setdefault(family, []).extend(rows)
    return {
        name: sorted(rows, key=lambda row: (int(row["flags"][size]), row["x"]))
        for name, rows in by_name.items()
    }


def curves_of(rows: list, size: str) -> dict:
    """{size: {rate: {seed: loss, None if it diverged}}} of a family's rows."""
    curves = {}
    for row in rows:
        curves.setdefault(int(row["flags"][size]), {}).setdefault(row["x"], {})[row["seed"]] = row[
            "loss"
        ]
    return curves


def exponent(curves: dict) -> float:
    """The power of the size that the best rates of {size: {rate: mean}} follow; nan where one is
    not known."""
    return slope({size: best_rate(curve) for size, curve in curves.items()})


def cost(curves: dict) -> float:
    """What the best rate of the smallest size costs at the largest, in nats above the loss at the
    best rate there, or where that is not known above the lowest."""
    small, large = curves[min(curves)], curves[max(curves)]
    best, known = best_rate(large), [loss for loss in large.values() if loss is not None]
    lowest = loss_at(large, best) if best > 0 else min(known, default=math.nan)
    return loss_at(large, best_rate(small)) - lowest


def number(x: float, form: str = ".3g") -> str:
    return "–" if math.isnan(x) else f"{x:{form}}"


def measured(curves: dict, function, form: str) -> list:
    """Two cells: `function` of the mean curves, and its range over the seeds."""
    value, low, high = range_over_seeds(curves, function)
    return [number(value, form), "–" if math.isnan(low) else f"{low:{form}} to {high:{form}}"]


def transfer_rows(by_name: dict, size: str) -> list:
    """A table's rows, head first: the best rate at each size, the exponent by which it follows the
    size (0: it transfers), and what a rate tuned at the smallest costs at the largest, each with
    its range over the seeds."""
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


def swept_size(flags: dict) -> str | None:
    """That of SIZES that has several values, beside learning_rate. `flags`: those with several
    values, of a run."""
    return next((size for size in SIZES if {size, "learning_rate"} <= flags.keys()), None)


def write_transfer(found: dict, size: str, folder: Path) -> list:
    """Write transfer.md, on a swept size; returns lines for the console."""
    by_name = {name: curves_of(rows, size) for name, rows in families(found, size).items() if rows}
    if not by_name:
        return []
    rows = transfer_rows(by_name, size)
    write_file(folder / "transfer.md", lambda f: f.write("\n".join(markdown_table(rows)).encode()))
    return ["", *table(rows)]


def check_large(points: list, large: str) -> None:
    """ValueError unless sizes and learning rates are swept, and all that is swept fits the config
    `large`."""
    if not swept_size(points[0].flags):
        raise ValueError("for needs several values of learning_rate, and of n_embd or n_layer")
    runs = {tuple(large_arguments(point.run, large)): point.run for point in points}
    for words, run in runs.items():
        check_trainable(
            TrainingRun(Path(f"{Path(large).name} with {run.path.name}"), words), with_data=False
        )


def large_commands(found: dict, points: list, large: str) -> list:
    """For each family of the size that is swept: a remark, and the command that trains `large`,
    config files joined by "+", with the method and the best rate of its largest model."""
    size, lines = swept_size(points[0].flags), []
    runs = {point.run.path.name: point.run for point in points}
    for name, rows in families(found, size).items():
        curves = curves_of(rows, size)
        n = max(curves)
        best = best_rate(mean_curves(curves, seeds_of(curves))[n])
        if math.isnan(best):
            lines += [
                f"# {name}: no best rate at {size}={n}: it is at an end, or beside a run that diverged"
            ]
            continue
        words = large_arguments(runs[rows[-1]["run"]], large)
        rate = {"learning_rate": f"{best:.4g}"}
        flags = [f"--{flag}={value}" for flag, value in (rate | follow(words, rate)).items()]
        kind = read_configs(words)[0].parametrization
        sizes = ACCOUNTED.get(kind, "another n_embd or n_layer")
        lines += [
            f"# {name}: best at {size}={n}: {best:.3g}; {kind} accounts for {sizes}, and not for more tokens"
        ]
        lines += [
            shlex.join(
                ["torchrun", "--standalone", "--nproc_per_node=8", "train.py", *words, *flags]
            )
        ]
    return lines


def large_arguments(run, large: str) -> list:
    """Arguments of train.py: the config files of `large`, and the flags that give it the METHOD of
    `run`. Its sizes stay; an FFN, and heads, of a size of their own keep their share."""
    files = [locate(file.strip()) for file in large.split("+")]
    (tuned, its), (model, config) = read_configs(run.args), read_configs(files)
    wanted, present = asdict(tuned) | asdict(its), asdict(model) | asdict(config)
    wider, heads = model.n_embd / tuned.n_embd, model.n_head / tuned.n_head
    for name, times in (("n_ff", wider), ("n_kv_head", heads), ("head_size", wider / heads)):
        wanted[name] = round(wanted[name] * times)
    names = METHOD
    if tuned.parametrization != "standard":
        bases = dict(
            base_n_embd=tuned.n_embd, base_n_layer=tuned.n_layer, base_head_size=tuned.head_dim
        )
        wanted |= {name: wanted[name] or size for name, size in bases.items()}
        names = [*METHOD, *bases]
    return files + [f"--{name}={wanted[name]}" for name in names if wanted[name] != present[name]]
