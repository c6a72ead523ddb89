"""Figures of the residual stream and the attention logits, after LNS (arXiv 2502.05795).
Questions that the paper leaves open, and our choices: docs/analysis.md."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.image import AxesImage
from torch import Tensor, nn

from model import Attention, Residual, Transformer
from nanodnt.generate import KVCache
from nanodnt.run.tracking import probe, watch
from nanodnt.weights import without_block
from studies.analysis.figure import (
    BRANCHES,
    Measured,
    Panel,
    PanelRows,
    by_block,
    over_steps,
    register,
    shades,
)
from studies.analysis.runs import (
    WINDOW,
    Batch,
    Batches,
    CheckpointedRun,
    pick_evenly,
    target_shares,
)


class TokenFunction(NamedTuple):
    """A residual sub-layer as a function of one token; the tokens that it sees are held fixed."""

    x: Tensor  # (C,): the token as it enters
    function: Callable  # function(copies (n, 1, C), residual=True) → (n, 1, C): the output for n
    #   variants of the token, or without `residual` the branch output as it is added


@torch.no_grad()
def walk(
    model: Transformer,
    batches: Iterable[Batch],
    modules: Iterable[nn.Module],
    note: Callable,
) -> Iterator[list]:
    """For each batch the list of note(*inputs) of all modules, in the forward's order, final norm
    last."""
    modules = list(modules)
    for inputs, _ in batches:
        notes = []

        def add_note(args: tuple, y: object, notes: list = notes) -> None:
            notes.append(note(*args))

        with watch([(module, add_note) for module in modules]):
            model.final_norm(model.stream(inputs))
        yield notes


def collect_streams(model: Transformer, batches: Iterable[Batch]) -> Iterator[list[Tensor]]:
    """For each batch L + 1 CPU tensors (B, T, C): the stream into block 1 and after each block,
    before the final norm."""
    return walk(model, batches, [*model.blocks, model.final_norm], lambda x, *_: x.cpu())


def stream_variance(
    model: Transformer, batches: Iterable[Batch], run: CheckpointedRun | None = None
) -> Measured:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: stream_var and branch_var of the tracker, mean
    over all tokens."""
    rows = []
    by_batch = {"stream": [], "attn": [], "mlp": []}
    for inputs, _ in batches:
        rows.append(len(inputs))
        probed = probe(model, inputs)
        by_batch["stream"].append(torch.stack(probed["stream_var"]).tolist())
        for branch, variances in probed["branch_var"].items():
            by_batch[branch].append(torch.stack(variances).tolist())
    return {name: np.average(values, 0, rows).tolist() for name, values in by_batch.items()}


@register("variance", stream_variance, tokens=8192, over_training=True)
def draw_variance(measured: list[Measured]) -> PanelRows:
    """Variance of the residual stream after each block, over training (LNS, Figs. 4, 8, 9)."""
    streams = []
    for m, color in zip(measured, shades(len(measured)), strict=True):
        streams.append(by_block(m["stream"], first=0, color=color, label=f"step {m['step']}"))
    at_end = [by_block(measured[-1]["stream"], first=0, label="residual stream")]
    for branch, label in BRANCHES.items():
        at_end.append(by_block(measured[-1][branch], label=f"{label} output, as it is added"))
    places = "after block (0: its input)"
    return [
        [
            Panel("over training", places, streams, "variance", log="y"),
            Panel("variance at the end", "after block", at_end, log="y", by_run=True),
        ]
    ]


def token_angles(streams: list[Tensor]) -> Tensor:
    """(n, n, tokens): arccos(cosine) / π between each two of n streams (…, C): 0 = same direction,
    0.5 = orthogonal, 1 = opposite (LNS eq. 1)."""
    unit = F.normalize(torch.stack(streams).flatten(1, -2).double(), dim=-1, eps=1e-300)
    return torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1).arccos() / math.pi


def angular_distance(model: Transformer, batches: Iterable[Batch]) -> list[list[float]]:
    """d[a][b]: mean of `token_angles` between the L + 1 streams of the model, over all tokens."""
    angles = []
    for streams in collect_streams(model, batches):
        for sequence in zip(*streams, strict=True):
            angles.append(token_angles(sequence).mean(-1))
    # on the diagonal there is only rounding
    return torch.stack(angles).mean(0).fill_diagonal_(0.0).tolist()


def measure_angular(
    model: Transformer, batches: Iterable[Batch], run: CheckpointedRun | None = None
) -> Measured:
    return {"distance": angular_distance(model, batches)}


@register("angular", measure_angular, tokens=8192)
def draw_angular(measured: list[Measured]) -> PanelRows:
    """Angular distance between the inputs of blocks ℓ and ℓ + n (LNS, Figs. 2, 3, 7)."""
    d = np.array(measured[-1]["distance"])
    blocks = len(d) - 1
    shown = np.full((blocks, blocks), math.nan)
    for n in range(1, blocks + 1):
        shown[n - 1, : blocks + 1 - n] = d.diagonal(n)
    edges = (0.5, blocks + 0.5)
    paint = partial(paint_distances, shown, (*edges, *edges))
    return [[Panel("d(ℓ, ℓ + n) = arccos(cosine) / π", "block ℓ", ylabel="n", paint=paint)]]


def paint_distances(distances: np.ndarray, extent: tuple[float, ...], ax: Axes) -> AxesImage:
    ax.locator_params("y", integer=True)
    return ax.imshow(
        distances, cmap="viridis_r", vmin=0, vmax=1, origin="lower", extent=extent, aspect="auto"
    )


@torch.no_grad()
def removal_drop(
    model: Transformer, batches: Iterable[Batch], run: CheckpointedRun | None = None
) -> Measured:
    """{"loss": mean over the targets, "drop": [its rise when block ℓ is deleted]}; for images also
    {"top1": share whose class has the largest logit, "top1_drop": [its fall]}. The other blocks
    keep LNS's constants."""
    shares = target_shares(batches)

    def measure() -> tuple[float, float]:
        """Loss and top-1, which is 0 for text."""
        loss = 0.0
        top1 = 0.0
        for (inputs, targets), share in zip(batches, shares, strict=True):
            logits, batch_loss = model(inputs, targets)
            loss += share * batch_loss.item()
            if logits is not None:  # images
                top1 += share * (logits.argmax(-1) == targets).double().mean().item()
        return loss, top1

    loss, top1 = measure()
    drop = []
    top1_drop = []
    for block in range(1, len(model.blocks) + 1):
        with without_block(model, block):
            other_loss, other_top1 = measure()
        drop.append(other_loss - loss)
        top1_drop.append(top1 - other_top1)
    if model.config.causal:
        return {"loss": loss, "drop": drop}
    return {"loss": loss, "drop": drop, "top1": top1, "top1_drop": top1_drop}


@register("removal", removal_drop, tokens=32768)
def draw_removal(measured: list[Measured]) -> PanelRows:
    """Rise of the loss, of images also fall of top-1, when one block is deleted (LNS, Figs. 2, 3,
    7)."""
    last = measured[-1]
    lines = [by_block(last["drop"])]
    panels = [Panel("rise of the loss, nats", "deleted block", lines, by_run=True)]
    if "top1" in last:
        lines = [by_block(last["top1_drop"])]
        panels.append(Panel("fall of top-1", "deleted block", lines, by_run=True))
    return [panels]


def token_functions(
    model: Transformer,
    batches: Iterable[Batch],
    positions: list[int],
    modules: list[Residual],
) -> Iterator[list[TokenFunction]]:
    """For each sequence b the residual sub-layers `modules` as functions of the token at
    positions[b]. The tokens that it sees, those before it or all tokens of an image, are held
    fixed: their keys and values are in a cache."""
    positions = iter(positions)
    for entering in walk(model, batches, modules, lambda x, rope=None, *_: (x, rope)):
        for b in range(len(entering[0][0])):
            t = int(next(positions))
            functions = []
            for module, (x, rope) in zip(modules, entering, strict=True):
                function = hold_others(module, x[b], rope, t, model.config.causal)
                functions.append(TokenFunction(x[b, t], function))
            yield functions


@torch.no_grad()
def hold_others(
    module: Residual, sequence: Tensor, rope: tuple[Tensor, ...] | None, t: int, causal: bool
) -> Callable:
    """The function of a `TokenFunction` for token t of a sequence (T, C)."""
    others = sequence[:t] if causal else torch.cat((sequence[:t], sequence[t + 1 :]))
    before = rope and tuple(angle[:t] for angle in rope)
    here = rope and tuple(angle[t : t + 1] for angle in rope)
    held = KVCache(len(others) + 1)
    is_attention = isinstance(module.f, Attention)  # the FFN looks at no other token
    if is_attention and len(others):
        module(others[None], before, held)

    def function(copies: Tensor, residual: bool = True) -> Tensor:
        context = ()
        if is_attention:
            cache = KVCache(held.size, held.length)
            if len(others):
                cache.k = held.k.repeat(len(copies), 1, 1, 1)
                cache.v = held.v.repeat(len(copies), 1, 1, 1)
            context = (here, cache)
        branch = []
        with watch([(module.mid, lambda args, y: branch.append(y))]):
            y = module(copies, *context)
        return y if residual else branch[0]

    return function


@torch.enable_grad()
def pull_back(function: Callable, x: Tensor, rows: Tensor) -> Tensor:
    """rows (n, C) times the Jacobian ∂y[i]/∂x[j] of a `TokenFunction`."""
    products = []
    for part in rows.split(512):  # bounds memory
        copies = x.expand(len(part), 1, -1).clone().requires_grad_()
        products += torch.autograd.grad(function(copies), copies, part[:, None])
    return torch.cat(products)[:, 0]


def residual_jacobian(
    model: Transformer,
    batches: Iterable[Batch],
    positions: list[int],
    block: int,
    branch: str,
) -> Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the
    sequences (LNS Fig. 5); x is the input and y the output of the residual sub-layer `branch`
    ("attn" or "mlp") in block `block`, counted from 0."""
    tokens = token_functions(model, batches, positions, [getattr(model.blocks[block], branch)])
    jacobians = (pull_back(function, x, torch.eye(len(x)).to(x)) for ((x, function),) in tokens)
    return (sum(jacobians) / len(positions)).cpu()


def deviation(jacobian: Tensor) -> float:
    """‖J − I‖ / √C, in the Frobenius norm."""
    return (jacobian.double() - torch.eye(len(jacobian))).norm().item() / len(jacobian) ** 0.5


def draw_positions(batches: Batches, run: CheckpointedRun) -> list[int]:
    """One random position in each sequence."""
    n = len(batches.starts)
    return torch.randint(batches.length, (n,), generator=run.generator()).tolist()


def measure_jacobian(model: Transformer, batches: Batches, run: CheckpointedRun) -> Measured:
    positions = draw_positions(batches, run)
    channels = pick_evenly(list(range(model.config.n_embd)), 64)
    blocks = range(len(model.blocks))
    maps = {branch: [] for branch in BRANCHES}
    layers = {branch: [] for branch in BRANCHES}
    for branch, block in product(BRANCHES, blocks):
        jacobian = residual_jacobian(model, batches, positions, block, branch)
        layers[branch].append({"deviation": deviation(jacobian)})
        if block in pick_evenly(blocks, 3):
            picked = jacobian[channels][:, channels].tolist()
            maps[branch].append({"block": block + 1, "map": picked})
    return {"positions": positions, "channels": channels, "maps": maps, "layers": layers}


@register("jacobian", measure_jacobian, tokens=2048, window=WINDOW)
def draw_jacobian(measured: list[Measured]) -> PanelRows:
    """Jacobian of residual sub-layers, averaged over one token of each window (LNS, Fig. 5)."""
    rows = []
    for branch, label in BRANCHES.items():
        row = []
        for shown in measured[-1]["maps"][branch]:
            paint = partial(paint_map, shown["map"])
            row.append(Panel(f"{label}, block {shown['block']}", "", paint=paint))
        deviations = [layer["deviation"] for layer in measured[-1]["layers"][branch]]
        row.append(Panel(f"{label}: ‖J−I‖/√C", "block", [by_block(deviations)], by_run=True))
        rows.append(row)
    return rows


def paint_map(jacobian: list[list[float]], ax: Axes) -> AxesImage:
    norm = SymLogNorm(0.01, vmin=-1, vmax=1)
    return ax.imshow(jacobian, cmap="RdBu_r", norm=norm, aspect="auto")


def largest_logits(
    model: Transformer, batches: Iterable[Batch], run: CheckpointedRun | None = None
) -> Measured:
    """{"layers": [L]}: logit_max of the tracker, over all tokens."""
    largest = [torch.stack(probe(model, inputs)["logit_max"]) for inputs, _ in batches]
    return {"layers": torch.stack(largest).amax(0).tolist()}


@register("logits", largest_logits, tokens=8192, over_training=True)
def draw_logits(measured: list[Measured]) -> PanelRows:
    """Largest attention logit of each block."""
    at_end = by_block(measured[-1]["layers"])
    largest = over_steps(measured, [max(m["layers"]) for m in measured])
    unit = "largest |q·k| / √head_dim"
    return [
        [
            Panel("at the end", "block", [at_end], unit, log="y", by_run=True),
            Panel("the largest of all blocks", "step", [largest], unit, log="y", by_run=True),
        ]
    ]
