"""How the best learning rate follows a model's size: transfer.md, transfer.png, and the flags of a larger run."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path

from configurator import read_flags
from layers.scaling import ALPHA
from model import GPTConfig
from nanodnt.files import write_file
from nanodnt.run.metrics import save_figure
from nanodnt.settings import TrainConfig
from nanodnt.tables import table
from studies.sweep.fits import best_rate, bootstrap, loss_at, means, seeds_of, slope
from studies.sweep.results import draw_curves, draw_sizes, markdown_table, new_figure
from studies.sweep.runner import resolve_configs

SIZES = ("n_embd", "n_layer")
RATES = ("learning_rate", "min_lr", "adamw_learning_rate")
RELATIVE = ("parametrization", "base_n_embd", "base_n_layer", "base_head_size")


def families(found: dict, size: str) -> dict:
    """{curve without its size: {size: {rate: {seed: loss, None if it diverged}}}} of what `collect` found."""
    by_name = {}
    for row, family in rows_of(found, size):
        rates = by_name.setdefault(family, {}).setdefault(int(row["flags"][size]), {})
        rates.setdefault(row["x"], {})[row["seed"]] = row["loss"]
    return by_name


def rows_of(found: dict, size: str):
    """(row, its curve's name without the size) of what `collect` found."""
    for name, rows in found["curves"].items():
        family = " ".join(word for word in name.split() if not word.startswith(f"{size}=")) or "the config"
        yield from ((row, family) for row in rows)


def mean_curves(curves: dict) -> dict:
    """{size: {rate: mean loss}} of {size: {rate: {seed: loss}}}, over all seeds."""
    return {n: means(curve, seeds_of(curve)) for n, curve in curves.items()}


def exponent(curves: dict) -> float:
    """The power of the size that the best rates of {size: {rate: mean}} follow; nan where one is not known."""
    return slope({size: best_rate(curve) for size, curve in curves.items()})


def cost(curves: dict) -> float:
    """What the best rate of the smallest size costs at the largest, in nats above the lowest loss there."""
    small, large = curves[min(curves)], curves[max(curves)]
    lowest = min((loss for loss in large.values() if loss is not None), default=math.nan)
    return loss_at(large, best_rate(small)) - lowest


def number(x: float, form: str = ".3g") -> str:
    return "–" if math.isnan(x) else f"{x:{form}}"


def transfer_rows(by_name: dict, size: str) -> list:
    """A table's rows, head first: the best rate at each size, the exponent by which it follows the size (0: it
    transfers), and what a rate tuned at the smallest costs at the largest, each with its 95% interval."""
    sizes = sorted({n for curves in by_name.values() for n in curves})
    ends = f"tuned at {sizes[0]}, costs at {sizes[-1]}"
    rows = [["", *(f"best at {size}={n}" for n in sizes), "exponent", "interval", ends, "interval"]]
    for name, curves in by_name.items():
        bests = {n: best_rate(curve) for n, curve in mean_curves(curves).items()}
        (p, span), (nats, range_) = (bootstrap(curves, function) for function in (exponent, cost))
        cells = [number(bests.get(n, math.nan)) for n in sizes]
        cells += [number(p, "+.2f"), interval(span, "+.2f"), number(nats, "+.3f"), interval(range_, "+.3f")]
        rows.append([name, *cells])
    return rows


def interval(ends: tuple, form: str) -> str:
    return "–" if math.isnan(ends[0]) else f"{ends[0]:{form}} to {ends[1]:{form}}"


def write_transfer(found: dict, folder: Path) -> list:
    """Write transfer.md and transfer.png if learning rates and a size were swept; returns lines for the console."""
    lines, swept = [], swept_sizes(found)
    for size in swept:
        by_name = families(found, size)
        rows = transfer_rows(by_name, size)
        stem = "transfer" if len(swept) == 1 else f"transfer_{size}"
        write_file(folder / f"{stem}.md", lambda f, rows=rows: f.write("\n".join(markdown_table(rows)).encode()))
        draw(by_name, size, folder / f"{stem}.png")
        lines += ["", *table(rows)]
    return lines


def swept_sizes(found: dict) -> list:
    """Those of SIZES that have several values beside learning_rate."""
    rows = [row for rows in found["curves"].values() for row in rows]
    return [size for size in SIZES if found["axis"] == "learning_rate" and any(size in row["flags"] for row in rows)]


def draw(by_name: dict, size: str, path: Path) -> None:
    """Draw loss against rate by size, a panel for each family, and the best rates against the size."""
    figure, axes = new_figure(len(by_name) + 1, width=5.0, height=3.6, sharey=False)
    for axis, (name, curves) in zip(axes, by_name.items(), strict=False):
        shown = {f"{size}={n}": {x: list(curves[n][x].values()) for x in sorted(curves[n])} for n in sorted(curves)}
        draw_curves(axis, shown, "learning_rate", "validation loss")
        axis.set_title(name, fontsize=9)
    bests = {name: mean_curves(curves) for name, curves in by_name.items()}
    lines = {
        f"{name}: {number(exponent(its), '+.2f')}": {n: best_rate(its[n]) for n in sorted(its)}
        for name, its in bests.items()
    }
    draw_sizes(axes[-1], lines, size, "best learning_rate")
    axes[-1].set_title("best rate, and its exponent", fontsize=9)
    save_figure(figure, path)


def large_commands(found: dict, points: list, large: str) -> list:
    """For each family of the first size that was swept: the command that trains `large`, config files joined by "+",
    with the layout, the optimizer's settings and the rate of its largest model. ValueError if they contradict."""
    runs = {point.run.path.name: point.run for point in points}
    swept = swept_sizes(found)
    if not swept:
        raise ValueError("for needs several values of learning_rate and of n_embd or n_layer: there is no best rate")
    size, lines = swept[0], []
    for name, by_seed in families(found, size).items():
        curves = mean_curves(by_seed)
        n, p = max(curves), exponent(curves)
        best = best_rate(curves[n])
        if math.isnan(best):
            lines += [f"# {name}: no best rate at {size}={n}: it is at an end, or beside a run that diverged"]
            continue
        run = next(r["run"] for r, family in rows_of(found, size) if family == name and int(r["flags"][size]) == n)
        lines += large_command(runs[run], large.split("+"), best, size, p, name)
    return lines


def large_command(run, files: list, best: float, size: str, p: float, name: str) -> list:
    """[a remark, the command] for `best`, the rate of the model of `run`."""
    (tuned_model, tuned), (model, config) = resolve_configs(run.args), resolve_configs(files)
    flags, sections = {}, read_flags(GPTConfig, TrainConfig)
    for mine, theirs in ((tuned_model, model), (tuned, config)):
        for key, value in asdict(mine).items():
            section, other = sections[key].section, getattr(theirs, key)
            is_method = theirs is model and section != "size" or section.startswith(("optimizer", "blockwise"))
            if is_method and key not in (*RATES, *RELATIVE) and value != other:
                flags[key] = value
    flags |= {key: value for key, value in relative_to(tuned_model, model).items() if value != getattr(model, key)}
    grown = getattr(model, size) / getattr(tuned_model, size)
    factor = 1.0 if tuned_model.parametrization != "standard" or math.isnan(p) else grown**p
    flags["learning_rate"], flags["min_lr"] = f"{best * factor:.4g}", f"{best * factor / 10:.4g}"
    if tuned.adamw_learning_rate not in (None, tuned.learning_rate):
        flags["adamw_learning_rate"] = f"{best * factor * tuned.adamw_learning_rate / tuned.learning_rate:.4g}"
    words = [*files, *(f"--{key}={value}" for key, value in flags.items())]
    try:
        large_model, _ = resolve_configs(words)
        large_model.check()
    except ValueError as e:
        raise ValueError(f"{name} does not fit {'+'.join(files)}: {e}") from None
    how = f"best at {size}={getattr(tuned_model, size)}: {best:.3g}"
    how += f", times {grown:g}^{p:+.2f}, extrapolated" if factor != 1 else ", as it is"
    if tuned_model.parametrization not in ALPHA and tuned_model.n_layer != model.n_layer and size != "n_layer":
        how += f"; nothing here accounts for {tuned_model.n_layer} → {model.n_layer} blocks, as completep would"
    return [f"# {name}: {how}", shlex.join(["torchrun", "--standalone", "--nproc_per_node=8", "train.py", *words])]


def relative_to(tuned: GPTConfig, large: GPTConfig) -> dict:
    """The flags that make `large` relative to the size that `tuned` is relative to."""
    head = tuned.base_head_size or tuned.head_dim
    bases = dict(base_n_embd=tuned.base_n_embd or tuned.n_embd, base_n_layer=tuned.base_n_layer or tuned.n_layer)
    bases |= dict(base_head_size=0 if head == large.head_dim else head)
    return dict(parametrization=tuned.parametrization) | (bases if tuned.parametrization != "standard" else {})
