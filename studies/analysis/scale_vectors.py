"""The effect of a scale vector on the matrix after it, measured and drawn: after scale vectors
(arXiv 2605.26895), of which we have a part. Questions that it leaves open, and our choices:
docs/analysis.md."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model import Transformer
from nanodnt.run.tracking import MATRICES, gain_vectors, matrix_types
from studies.analysis.figure import (
    Measured,
    NotApplicable,
    Panel,
    PanelRows,
    by_block,
    over_steps,
    register,
)
from studies.analysis.runs import CheckpointedRun

NUMBERS = ("low", "high", "condition", "gain")


class ScaledMatrix(NamedTuple):
    """A matrix with a gain γ on its input."""

    name: str
    slot: str  # name of the slot with γ
    c: float  # factor beside γ


class Columns(NamedTuple):
    """Vectors with a number for each column of one matrix."""

    low: Tensor
    high: Tensor
    gain_squared: Tensor


def scaled_matrices(model: Transformer) -> Iterator[ScaledMatrix]:
    """The matrices of the blocks with a gain on their input: q, k, v, gate and up have γ and LNS's
    c of the pre norm, or a γ of their own (HG); o has the gain after v, and down the gain after
    up beside a gate (DP, DNP)."""
    gains = gain_vectors(model)
    for weight in matrix_types(model):
        name = weight.removesuffix(".weight")
        owner, _, part = name.rpartition(".")
        pre = ".".join([*name.split(".")[:3], "pre"])
        c = 1.0
        if part == "o":
            slots = [f"{owner}.v.out"]
        elif part == "down":
            slots = [f"{owner}.up.out"] if model.config.is_gated else []
        else:
            slots = [pre, f"{name}.pre"]
            c = model.get_submodule(pre).const
        for slot in gains.keys() & slots:
            yield ScaledMatrix(name, slot, c)


@torch.no_grad()
def precondition(model: Transformer) -> dict[str, dict[str, list[float]]]:
    """{type of MATRICES: {each of NUMBERS: [one per block, nan without a gain]}} for V = W diag(s),
    s = c γ. A step of gradient descent on W and γ moves column v of V by −P g, not −g, with g the
    loss's gradient by v, P = s² I + c² w wᵀ. "low" s² and "high" s² + c² ‖w‖² are P's two
    eigenvalues, medians over the columns; "condition" is the largest over the smallest of all
    columns; "gain" is the mean of γ²."""
    columns = {}  # {type: [one list per block]}
    for name, slot_name, c in scaled_matrices(model):
        w = model.get_submodule(name).weight.double().cpu()
        gain = model.get_submodule(slot_name).gain_vector().double().cpu()
        if len(gain) < w.shape[-1]:  # grouped-query attention: several heads read one of v
            shared = w.shape[-1] // len(gain)
            gain = gain.view(-1, model.config.head_dim).repeat_interleave(shared, 0).flatten()
        low = (c * gain).square().expand_as(w[..., 0, :])
        high = low + c**2 * w.square().sum(-2)
        _, block, *_, part = name.split(".")
        blocks = columns.setdefault(MATRICES[part], [[] for _ in model.blocks])
        blocks[int(block)].append(Columns(low.flatten(), high.flatten(), gain.square()))
    numbers = {}
    for kind, blocks in columns.items():
        summaries = [summarize(matrices) for matrices in blocks]
        numbers[kind] = {key: [block[key] for block in summaries] for key in NUMBERS}
    return numbers


def summarize(matrices: list[Columns]) -> dict[str, float]:
    """{each of NUMBERS: its value} for the matrices of one block and type."""
    if not matrices:
        return dict.fromkeys(NUMBERS, math.nan)
    low, high, gain_squared = (torch.cat(parts) for parts in zip(*matrices, strict=True))
    return {
        "low": low.median().item(),
        "high": high.median().item(),
        "condition": (high.max() / low.min()).item(),
        "gain": gain_squared.mean().item(),
    }


def measure_preconditioner(
    model: Transformer, batches: None = None, run: CheckpointedRun | None = None
) -> Measured:
    if model.config.sigma_reparam:
        raise NotApplicable(
            "σReparam divides W by a norm of it, which the paper's preconditioner does not know"
        )
    types = precondition(model)
    if not types:
        raise NotApplicable("no scale vector before a matrix of the blocks")
    return {"types": types}


@register("preconditioner", measure_preconditioner, over_training=True)
def draw_preconditioner(measured: list[Measured]) -> PanelRows:
    """Scale vectors as preconditioners of the matrices after them (scale vectors)."""
    eigenvalues = []
    sizes = []
    conditions = []
    for kind, last in measured[-1]["types"].items():
        eigenvalues.append(by_block(last["high"], label=kind))
        eigenvalues.append(by_block(last["low"], "o--", label=kind))
        means = [np.nanmean(m["types"][kind]["gain"]) for m in measured]
        sizes.append(over_steps(measured, means, label=kind))
        means = [np.nanmean(m["types"][kind]["condition"]) for m in measured]
        conditions.append(over_steps(measured, means, label=kind))
    title = "eigenvalues of P (medians):\nγ² (dashed), γ² + ‖w‖²"
    return [
        [
            Panel(title, "block", eigenvalues, log="y"),
            Panel("condition number of P", "step, mean over blocks", conditions, log="y"),
            Panel("mean γ²", "step, mean over blocks", sizes),
        ]
    ]
