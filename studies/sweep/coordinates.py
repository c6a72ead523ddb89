"""Coordinate check: do the outputs of all parts, and how far a few steps move them, keep their size
as a model grows?

Each model takes a few steps on one batch, in fp32, at its peak learning rates. For every part: the
root mean square (RMS) of its output at the start, and of the output's change. A part whose change
follows the width by a power needs a learning rate that does the opposite. Tensor Programs V (arXiv
2203.03466, app. D.1) has the same check.
"""

from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from layers.ops import upcast
from model import Transformer
from nanodnt.engine import Trainer, training_step
from nanodnt.files import make_folder, write_file
from nanodnt.optim import make_optimizer
from nanodnt.run.tracking import watch
from nanodnt.tasks import open_data, task_of
from studies.sweep.fits import slope
from studies.sweep.grid import check_trainable
from studies.sweep.results import markdown_table
from studies.sweep.transfer import SIZES

WHAT = ("output at the start", "change")
ROWS = 4  # sequences, or images, of the batch
FLAT = 0.15  # exponents this close to 0 count as none: small widths stray by as much, our choice


def check_coordinates(points: list, steps: int, folder: Path) -> list:
    """Check the models of a sweep over n_embd, or n_layer. Writes coordinates.md; returns lines for
    the console. ValueError where there are no sizes to compare."""
    size = next((name for name in SIZES if name in points[0].flags), None)
    if not size:
        raise ValueError("coordinates needs several values of n_embd, or of n_layer")
    families = {}
    for point in points:
        by_size = families.setdefault(point.name_without(size), {})
        by_size.setdefault(int(point.flags[size]), []).append(
            check_point(*check_trainable(point.run), steps)
        )
    verdicts, page = [], []
    for name, by_size in families.items():
        for title in WHAT:
            means = averages(by_size, title)
            rows = [["", *sorted(by_size), "exponent"]]
            rows += [
                [part, *map("{:.3g}".format, its.values()), f"{slope(its):+.2f}"]
                for part, its in means.items()
            ]
            page += [f"## {name}: RMS of {title}", "", *markdown_table(rows)]
        parts = ", ".join(f"{part} ({power:+.2f})" for part, power in uneven(means, size).items())
        verdicts.append(f"{name}: changes that follow {size}: {parts or 'none'}")
        page += [verdicts[-1], ""]
    make_folder(folder, "--out")
    write_file(folder / "coordinates.md", lambda f: f.write("\n".join(page).encode()))
    return [*verdicts, str(folder / "coordinates.md")]


def check_point(model_config, config, steps: int) -> dict:
    """`check_model` of the configuration's model, on the first rows of its data."""
    rows = slice(0, min(ROWS, config.batch_size))
    batch = tuple(
        map(torch.from_numpy, open_data(config, model_config).batch(0, config.batch_size, rows))
    )
    return check_model(
        task_of(model_config).network()(model_config, config.seed), config, batch, steps
    )


def check_model(model: Transformer, config, batch: tuple, steps: int) -> dict:
    """{each of WHAT: {part: RMS}} of a model as it is, and its change in `steps` steps."""
    optimizer, inputs = make_optimizer(model, config), model.inputs(*batch)
    trainer = Trainer(
        model, optimizer, torch.amp.GradScaler(enabled=False), len(batch[0]), config.grad_clip
    )
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * group["lr_ratio"]
    before = outputs(model, inputs)
    for _ in range(steps):
        training_step(trainer, batch)
    after = outputs(model, inputs)
    changes = {part: after[part] - y for part, y in before.items()}
    return dict(zip(WHAT, (rms_of(before), rms_of(changes)), strict=True))


def rms_of(parts: dict) -> dict:
    return {part: y.double().square().mean().sqrt().item() for part, y in parts.items()}


@torch.no_grad()
def outputs(model: Transformer, inputs: tuple) -> dict:
    """{part: its output} of one forward pass: the embedding; in each block attention's logits, its
    output and the FFN's, as they are added to the stream; the stream at the end, and the logits."""
    found, queries = {}, []

    def note(name, args, y):
        found[name] = upcast(y).clone()

    def note_logits(name, args, k):
        # (B, heads, T, head_dim), before any rotation
        q, k = (upcast(x).transpose(1, 2) for x in (queries.pop(), k))
        found[name] = (
            q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / q.shape[-1] ** 0.5
        )

    notes = [(model.blocks[0].attn.pre, lambda args, y: note("embedding", args, args[0]))]
    for i, block in enumerate(model.blocks, start=1):
        notes.append((block.attn.f.q_norm, lambda args, q: queries.append(q)))
        notes.append((block.attn.f.k_norm, partial(note_logits, f"{i} attention logits")))
        notes.append((block.attn.mid, partial(note, f"{i} attention")))
        notes.append((block.mlp.mid, partial(note, f"{i} FFN")))
    notes.append((model.final_norm, lambda args, y: note("stream", args, args[0])))
    with watch(notes):
        found["logits"] = model.eval()(*inputs)[0].clone()
    model.train()
    return found


def averages(by_size: dict, what: str) -> dict:
    """{part: {size: mean over the seeds}} of {size: `check_model`'s of each seed}, for the parts of
    the smallest."""
    parts = by_size[min(by_size)][0][what]
    return {
        part: {n: fmean(its[what][part] for its in by_size[n]) for n in sorted(by_size)}
        for part in parts
    }


def uneven(changes: dict, size: str) -> dict:
    """{part: exponent} of the parts whose change follows the size, beyond FLAT. With n_layer not
    those inside the blocks: there are more of them, so each must do less."""
    judged = {
        part: slope(its)
        for part, its in changes.items()
        if size == "n_embd" or not part[0].isdigit()
    }
    return {part: p for part, p in judged.items() if not abs(p) <= FLAT}  # nan is uneven
