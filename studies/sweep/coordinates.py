"""Coordinate check: do the outputs of all parts, and their changes in a few steps, keep their size
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
from torch import Tensor

from layers.ops import upcast
from model import Attention, Transformer
from nanodnt.engine import Trainer, training_step
from nanodnt.files import make_folder
from nanodnt.optim import make_optimizer
from nanodnt.run.tracking import watch
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, task_of
from studies.sweep.fits import slope
from studies.sweep.grid import Point, check_trainable
from studies.sweep.results import markdown_table, write_lines
from studies.sweep.runner import Configs
from studies.sweep.transfer import SIZES

QUANTITIES = ("output at the start", "change")  # the RMS of both is measured for every part
ROWS = 4  # sequences, or images, of the batch
FLAT = 0.15  # exponents this close to 0 count as none: small widths stray by as much, our choice

Measured = dict[str, dict[str, float]]  # {one of QUANTITIES: {part: RMS}}


def check_coordinates(points: list[Point], steps: int, folder: Path) -> list[str]:
    """Check the models of a sweep over n_embd, or n_layer. Writes coordinates.md; returns lines for
    the console. ValueError where there are no sizes to compare."""
    swept = [name for name in SIZES if name in points[0].flags]
    if not swept:
        raise ValueError("coordinates needs several values of n_embd, or of n_layer")
    size = swept[0]
    families = {}
    for point in points:
        measured = check_point(check_trainable(point.run), steps)
        by_size = families.setdefault(point.name_without(size), {})
        by_size.setdefault(int(point.flags[size]), []).append(measured)
    verdicts = []
    page = []
    for name, by_size in families.items():
        for quantity in QUANTITIES:
            means = averages(by_size, quantity)
            rows = [["", *sorted(by_size), "exponent"]]
            for part, values in means.items():
                cells = [f"{value:.3g}" for value in values.values()]
                rows.append([part, *cells, f"{slope(values):+.2f}"])
            page += [f"## {name}: RMS of {quantity}", "", *markdown_table(rows)]
        changed = [f"{part} ({power:+.2f})" for part, power in uneven(means, size).items()]
        verdict = f"{name}: changes that follow {size}: {', '.join(changed) or 'none'}"
        verdicts.append(verdict)
        page += [verdict, ""]
    make_folder(folder, "--out")
    write_lines(folder / "coordinates.md", page)
    return [*verdicts, str(folder / "coordinates.md")]


def check_point(configs: Configs, steps: int) -> Measured:
    """`check_model` of the configurations' model, on the first rows of their data."""
    model_config, config = configs
    rows = slice(0, min(ROWS, config.batch_size))
    arrays = open_data(config, model_config).batch(0, config.batch_size, rows)
    batch = tuple(map(torch.from_numpy, arrays))
    model = task_of(model_config).network()(model_config, config.seed)
    return check_model(model, config, batch, steps)


def check_model(
    model: Transformer, config: TrainConfig, batch: tuple[Tensor, ...], steps: int
) -> Measured:
    """The RMS of every part's output in a model as it is, and of the output's change in `steps`
    steps."""
    optimizer = make_optimizer(model, config)
    inputs = model.inputs(*batch)
    scaler = torch.amp.GradScaler(enabled=False)
    trainer = Trainer(model, optimizer, scaler, len(batch[0]), config.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * group["lr_ratio"]
    before = outputs(model, inputs)
    for _ in range(steps):
        training_step(trainer, batch)
    after = outputs(model, inputs)
    changes = {part: after[part] - y for part, y in before.items()}
    return {"output at the start": rms_of(before), "change": rms_of(changes)}


def rms_of(parts: dict[str, Tensor]) -> dict[str, float]:
    return {part: y.double().square().mean().sqrt().item() for part, y in parts.items()}


@torch.no_grad()
def outputs(model: Transformer, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """{part: its output} of one forward pass. The parts are the embedding; in each block
    attention's logits, its output and the FFN's, as they are added to the stream; the stream at
    the end, and the logits."""
    parts = {}
    queries = []

    def note(name: str, args: tuple, y: Tensor) -> None:
        parts[name] = upcast(y).clone()

    def note_logits(name: str, attention: Attention, args: tuple, k: Tensor) -> None:
        # (B, heads, T, head_dim), before any rotation
        q = upcast(queries.pop())
        q = attention.qk_scale(attention.qk_scale(q.flatten(2))).view_as(q).transpose(1, 2)
        k = upcast(k).transpose(1, 2)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        parts[name] = q @ k.mT / q.shape[-1] ** 0.5

    notes = [(model.blocks[0].attn.pre, lambda args, y: note("embedding", args, args[0]))]
    for i, block in enumerate(model.blocks, start=1):
        notes.append((block.attn.f.q_norm, lambda args, q: queries.append(q)))
        note_k = partial(note_logits, f"{i} attention logits", block.attn.f)
        notes.append((block.attn.f.k_norm, note_k))
        notes.append((block.attn.mid, partial(note, f"{i} attention")))
        notes.append((block.mlp.mid, partial(note, f"{i} FFN")))
    notes.append((model.final_norm, lambda args, y: note("stream", args, args[0])))
    with watch(notes):
        parts["logits"] = model.eval()(*inputs)[0].clone()
    model.train()
    return parts


def averages(by_size: dict[int, list[Measured]], quantity: str) -> dict[str, dict[int, float]]:
    """{part: {size: mean over the seeds}} of {size: `check_model`'s result for each seed}, for the
    parts of the smallest model."""
    smallest = by_size[min(by_size)][0]
    means = {}
    for part in smallest[quantity]:
        means[part] = {}
        for size in sorted(by_size):
            means[part][size] = fmean(seed[quantity][part] for seed in by_size[size])
    return means


def uneven(changes: dict[str, dict[int, float]], size: str) -> dict[str, float]:
    """{part: exponent} of the parts whose change follows the size, beyond FLAT. With n_layer the
    parts inside the blocks are left out: a deeper model has more of them, so each must do less."""
    exponents = {}
    for part, by_size in changes.items():
        in_block = part[0].isdigit()
        power = slope(by_size)
        if (size == "n_embd" or not in_block) and not abs(power) <= FLAT:  # nan is uneven
            exponents[part] = power
    return exponents
