"""How the best learning rate follows a model's size: transfer.md, transfer.png, and the flags of a larger run."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path

from configurator import read_flags
from model import GPTConfig
from nanodnt.files import write_file
from nanodnt.run.metrics import save_figure
from nanodnt.settings import TrainConfig
from nanodnt.tables import table
from studies.sweep.fits import best_rate, bootstrap, loss_at, mean_curves, slope
from studies.sweep.grid import check_trainable, follow, locate
from studies.sweep.results import draw_curves, draw_sizes, markdown_table, new_figure
from studies.sweep.runner import TrainingRun, read_configs

SIZES = ("n_embd", "n_layer")
ACCOUNTED = {"standard": (), "mup": ("n_embd",)}  # by a parametrization: a rate needs no change; by others all SIZES
TUNED = ("learning_rate", "min_lr", "base_")
# of the run, not of its method: a larger model takes over all other flags
OWN = ("size", "run", "data", "images", "schedule", "evaluation", "system")  # how sections begin
FLAGS = read_flags(GPTConfig, TrainConfig)
METHOD = [name for name, flag in FLAGS.items() if not name.startswith(TUNED) and not flag.section.startswith(OWN)]


def families(found: dict, size: str) -> dict:
    """{curve without its size: ({size: {rate: {seed: loss, None if it diverged}}}, {size: a run's name})} of what
    `collect` found, smallest first."""
    by_name, rows = {}, [(name, row) for name, rows in found["curves"].items() for row in rows]
    for name, row in sorted(rows, key=lambda item: (int(item[1]["flags"][size]), item[1]["x"])):
        family = " ".join(word for word in name.split() if not word.startswith(f"{size}=")) or "the config"
        (curves, runs), n = by_name.setdefault(family, ({}, {})), int(row["flags"][size])
        curves.setdefault(n, {}).setdefault(row["x"], {})[row["seed"]] = row["loss"]
        runs[n] = row["run"]
    return by_name


def best_rates(curves: dict) -> dict:
    """{size: best rate} of {size: {rate: mean}}."""
    return {size: best_rate(curve) for size, curve in curves.items()}


def exponent(curves: dict) -> float:
    """The power of the size that the best rates follow; nan where one is not known."""
    return slope(best_rates(curves))


def cost(curves: dict) -> float:
    """What the best rate of the smallest size costs at the largest, in nats above the loss at the best rate there, or
    where that is not known above the lowest."""
    small, large = curves[min(curves)], curves[max(curves)]
    best, known = best_rate(large), [loss for loss in large.values() if loss is not None]
    lowest = loss_at(large, best) if best > 0 else min(known, default=math.nan)
    return loss_at(large, best_rate(small)) - lowest


def number(x: float, form: str = ".3g") -> str:
    return "–" if math.isnan(x) else f"{x if float(f'{x:{form}}') else 0.0:{form}}"  # no -0.00


def measured(curves: dict, function, form: str) -> list:
    """Two cells: `function` of the mean curves, and its 95% interval."""
    value, (low, high) = bootstrap(curves, function)
    return [number(value, form), "–" if math.isnan(low) else f"{number(low, form)} to {number(high, form)}"]


def transfer_rows(by_name: dict, size: str) -> list:
    """A table's rows, head first: the best rate at each size, the exponent by which it follows the size (0: it
    transfers), and what a rate tuned at the smallest costs at the largest, each with its 95% interval."""
    sizes = sorted({n for curves in by_name.values() for n in curves})
    ends = f"tuned at {sizes[0]}, costs at {sizes[-1]}"
    rows = [["", *(f"best at {size}={n}" for n in sizes), "exponent", "interval", ends, "interval"]]
    for name, curves in by_name.items():
        bests = best_rates(mean_curves(curves))
        cells = [number(bests.get(n, math.nan)) for n in sizes]
        whole = {sizes[0], sizes[-1]} <= curves.keys()
        costs = measured(curves, cost, "+.3f") if whole else ["–", "–"]
        rows.append([name, *cells, *measured(curves, exponent, "+.2f"), *costs])
    return rows


def swept_sizes(flags: dict) -> list:
    """Those of SIZES that have several values, beside learning_rate. `flags`: those with several values, of a run."""
    return [size for size in SIZES if {size, "learning_rate"} <= flags.keys()]


def write_transfer(found: dict, folder: Path) -> list:
    """Write transfer.md and transfer.png if learning rates and a size were swept; returns lines for the console."""
    every = [row["flags"] for rows in found["curves"].values() for row in rows]
    lines, swept = [], swept_sizes(every[0]) if every else []
    for size in swept:
        by_name = {name: curves for name, (curves, _) in families(found, size).items()}
        rows = transfer_rows(by_name, size)
        stem = "transfer" if len(swept) == 1 else f"transfer_{size}"
        write_file(folder / f"{stem}.md", lambda f, rows=rows: f.write("\n".join(markdown_table(rows)).encode()))
        draw(by_name, size, folder / f"{stem}.png")
        lines += ["", *table(rows)]
    return lines


def draw(by_name: dict, size: str, path: Path) -> None:
    """Draw loss against rate by size, a panel for each family, and the best rates against the size."""
    figure, (*axes, last) = new_figure(len(by_name) + 1, width=5.0, height=3.6, sharey=False)
    bests = {}
    for axis, (name, curves) in zip(axes, by_name.items(), strict=True):
        shown = {f"{size}={n}": {x: list(its.values()) for x, its in curve.items()} for n, curve in curves.items()}
        draw_curves(axis, shown, "learning_rate", "validation loss")
        axis.set_title(name, fontsize=9)
        means = mean_curves(curves)
        bests[f"{name}: {number(exponent(means), '+.2f')}"] = best_rates(means)
    draw_sizes(last, bests, size, "best learning_rate", "best rate, and its exponent")
    last.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)


def check_large(points: list, large: str) -> None:
    """ValueError unless sizes and learning rates are swept, and all that is swept fits the config `large`."""
    if not swept_sizes(points[0].flags):
        raise ValueError("for needs several values of learning_rate, and of n_embd or n_layer")
    runs = {tuple(large_arguments(point.run, large)): point.run for point in points}
    for words, run in runs.items():
        check_trainable(TrainingRun(Path(f"{Path(large).name} with {run.path.name}"), words), with_data=False)


def large_commands(found: dict, points: list, large: str) -> list:
    """For each family of the first size that is swept: a remark, and the command that trains `large`, config files
    joined by "+", with the method and the best rate of its largest model."""
    size, lines, runs = swept_sizes(points[0].flags)[0], [], {point.run.path.name: point.run for point in points}
    for name, (curves, names) in families(found, size).items():
        curves, n = mean_curves(curves), max(curves)
        run, p = runs[names[n]], exponent(curves)
        words = large_arguments(run, large)
        if math.isnan(best := best_rate(curves[n])):
            lines += [f"# {name}: no best rate at {size}={n}: it is at an end, or beside a run that diverged"]
            continue
        (tuned, its_run), (model, config) = read_configs(run.args), read_configs(words)
        factor, how = 1.0, ""
        for its in SIZES:
            before, after = getattr(tuned, its), getattr(model, its)
            if before == after or its in ACCOUNTED.get(tuned.parametrization, SIZES):
                continue
            if its == size and not math.isnan(p):
                factor = (after / before) ** p
                how += f"; times {after / before:g}^{number(p, '+.2f')}, extrapolated"
            else:
                how += f"; nothing here accounts for {its} {before} → {after}"
        pairs = ((its_run, tuned), (config, model))
        tokens = [f"{c.max_iters * c.batch_size * m.block_size:,}" for c, m in pairs]
        how += f"; nothing here accounts for {' → '.join(tokens)} tokens" if len(set(tokens)) > 1 else ""
        rate = {"learning_rate": f"{best * factor:.4g}"}
        flags = [f"--{name}={value}" for name, value in (rate | follow(words, rate)).items()]
        command = ["torchrun", "--standalone", "--nproc_per_node=8", "train.py", *words, *flags]
        lines += [f"# {name}: best at {size}={n}: {best:.3g}{how}", shlex.join(command)]
    return lines


def large_arguments(run, large: str) -> list:
    """Arguments of train.py: the config files of `large`, and the flags that give it the METHOD of `run`. Its sizes
    stay; an FFN, and heads, of a size of their own keep their share."""
    files = [locate(file.strip()) for file in large.split("+")]
    (tuned, its), (model, config) = read_configs(run.args), read_configs(files)
    wanted, present = asdict(tuned) | asdict(its), asdict(model) | asdict(config)
    wider, heads = model.n_embd / tuned.n_embd, model.n_head / tuned.n_head
    for name, times in (("n_ff", wider), ("n_kv_head", heads), ("head_size", wider / heads)):
        wanted[name] = round(wanted[name] * times)
    bases = dict(base_n_embd=tuned.n_embd, base_n_layer=tuned.n_layer, base_head_size=tuned.head_dim)
    bases = {name: wanted[name] or size for name, size in bases.items() if tuned.parametrization != "standard"}
    wanted |= bases
    return files + [f"--{name}={wanted[name]}" for name in (*METHOD, *bases) if wanted[name] != present[name]]
