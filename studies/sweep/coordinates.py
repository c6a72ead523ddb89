"""Coordinate check: do the outputs of all parts, and how far a few steps move them, keep their size as a model grows?

Each model takes a few steps on one batch, at its peak learning rates. For every part: the root mean square (RMS) of its
output at the start, and of the output's change. A part whose change grows or shrinks by a power of the width needs a
learning rate that does the opposite. (Tensor Programs V, arXiv 2203.03466, app. D.1, plots the same.)
"""

import statistics
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from layers.ops import upcast
from model import Transformer
from nanodnt.engine import Trainer, training_step
from nanodnt.files import write_file
from nanodnt.optim import make_optimizer
from nanodnt.run.metrics import save_figure
from nanodnt.run.tracking import watch
from nanodnt.tables import table
from nanodnt.tasks import open_data, task_of
from studies.sweep.fits import slope
from studies.sweep.grid import check_trainable
from studies.sweep.results import markdown_table
from studies.sweep.transfer import SIZES

ROWS = 4  # sequences, or images, of the batch
FLAT = 0.15  # exponents this close to 0 count as none: our choice, about what an infinitely wide model's have at 64


@torch.no_grad()
def outputs(model: Transformer, inputs: tuple) -> dict:
    """{part: its output} of one forward pass: the embedding, in each block attention's logits, its output and the
    FFN's, as they are added to the stream, the stream at the end, and the logits."""
    found, queries = {}, []

    def note(name, args, y):
        found[name] = upcast(y).clone()

    def note_logits(name, args, k):
        q, k = (upcast(x).transpose(1, 2) for x in (queries.pop(), k))  # (B, heads, T, head_dim), before any rotation
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        found[name] = q @ k.mT / q.shape[-1] ** 0.5

    notes = [(model.blocks[0].attn.pre, lambda args, y: note("embedding", args, args[0]))]
    for i, block in enumerate(model.blocks, start=1):
        notes += [(block.attn.f.q_norm, lambda args, q: queries.append(q))]
        notes += [(block.attn.f.k_norm, partial(note_logits, f"{i} attention logits"))]
        notes += [(block.attn.mid, partial(note, f"{i} attention")), (block.mlp.mid, partial(note, f"{i} FFN"))]
    notes += [(model.final_norm, lambda args, y: note("stream", args, args[0]))]
    with watch(notes):
        found["logits"] = model.eval()(*inputs)[0].clone()
    model.train()
    return found


def check_model(model: Transformer, config, batch: tuple, steps: int) -> dict:
    """{part: (RMS of its output, RMS of its change in `steps` steps)} of a model as it is."""
    optimizer, inputs = make_optimizer(model, config), model.inputs(*batch)
    trainer = Trainer(model, optimizer, torch.amp.GradScaler(enabled=False), len(batch[0]), config.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * (1.0 if group.get("constant") else group["lr_ratio"])
    before = outputs(model, inputs)
    for _ in range(steps):
        training_step(trainer, batch)
    after = outputs(model, inputs)
    return {part: (rms(y), rms(after[part] - y)) for part, y in before.items()}


def rms(x) -> float:
    return x.double().square().mean().sqrt().item()


def check_coordinates(points: list, steps: int, folder: Path) -> list:
    """Check the models of a sweep over n_embd, or n_layer. Writes coordinates.md and coordinates.png; returns lines for
    the console. ValueError where there are no sizes to compare."""
    size = next((name for name in SIZES if name in points[0].flags), None)
    if not size:
        raise ValueError("coordinates needs several values of n_embd, or of n_layer")
    found = {}
    for point in points:
        others = [f"{name}={value}" for name, value in point.flags.items() if name != size]
        its = found.setdefault(" ".join(filter(None, [point.files, *others])) or "the config", {})
        its.setdefault(int(point.flags[size]), []).append(check_point(*check_trainable(point.run), steps))
    folder.mkdir(parents=True, exist_ok=True)
    lines, pages = [], []
    for name, by_size in found.items():
        rows = coordinate_rows(by_size)
        wrong = ", ".join(uneven(rows, size))
        verdict = f"changes follow {size}: {wrong}" if wrong else f"no change follows {size}"
        lines += ["", name, *table(rows), verdict]
        pages += [f"## {name}", "", *markdown_table(rows), verdict, ""]
    write_file(folder / "coordinates.md", lambda f: f.write("\n".join(pages).encode()))
    draw(found, size, folder / "coordinates.png")
    return [*lines, "", f"{folder}: coordinates.md, coordinates.png"]


def draw(found: dict, size: str, path: Path) -> None:
    """Draw the RMS of outputs and of their changes against the size, a row of two panels for each configuration."""
    figure, axes = plt.subplots(len(found), 2, figsize=(10, 3.6 * len(found)), squeeze=False, layout="constrained")
    for (name, by_size), row in zip(found.items(), axes, strict=True):
        for which, (axis, title) in enumerate(zip(row, ("output at the start", "its change"), strict=True)):
            for i, part in enumerate(by_size[min(by_size)][0]):
                ys = [mean_of(by_size[n], part, which) for n in sorted(by_size)]
                axis.plot(sorted(by_size), ys, marker="os^vD"[i // 10 % 5], markersize=4, label=part)
            axis.set(xscale="log", yscale="log", xlabel=size, ylabel=f"RMS of {title}", title=name)
        row[1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)


def check_point(model_config, config, steps: int) -> dict:
    """`check_model` of the configuration's model in fp32, on the first rows of its data."""
    data = open_data(config, model_config)
    rows = min(ROWS, config.batch_size)
    batch = tuple(map(torch.from_numpy, data.batch(0, config.batch_size, slice(0, rows))))
    return check_model(task_of(model_config).network()(model_config, config.seed), config, batch, steps)


def coordinate_rows(found: dict) -> list:
    """A table's rows, head first, from {size: `check_model`'s of each seed}: each part's RMS and its change at every
    size, the mean over the seeds, and the exponents of the size that these follow."""
    sizes, parts = sorted(found), list(found[min(found)][0])  # of the shallowest
    rows = [["", *(f"RMS {size}" for size in sizes), "exponent", *(f"change {size}" for size in sizes), "exponent"]]
    for part in parts:
        cells = []
        for which in (0, 1):
            means = [mean_of(found[size], part, which) for size in sizes]
            cells += [*(f"{mean:.3g}" for mean in means), f"{slope(sizes, means):+.2f}"]
        rows.append([part, *cells])
    return rows


def mean_of(seeds: list, part: str, which: int) -> float:
    return statistics.mean(seed[part][which] for seed in seeds)


def uneven(rows: list, size: str) -> list:
    """The parts of `coordinate_rows` whose change follows the size, beyond FLAT, each with its exponent. With n_layer
    not those inside the blocks: there are more of them, so each must do less."""
    judged = [row for row in rows[1:] if size == "n_embd" or not row[0][0].isdigit()]
    return [f"{row[0]} ({row[-1]})" for row in judged if not abs(float(row[-1])) <= FLAT]  # nan is uneven
