"""What a scale vector does to the matrix after it, measured and drawn: after scale vectors (arXiv
2605.26895), of which we have a part. What it leaves open, and what we chose: docs/analysis.md."""

import numpy as np
import torch

from nanodnt.run.tracking import MATRICES, gain_vectors, matrix_types
from studies.analysis.figure import NotApplicable, Panel, by_block, over_steps, register

NUMBERS = "low", "high", "condition", "gain"  # of a block and type, in this order


def scaled_matrices(model):
    """Of each matrix of the blocks with a gain γ on its input: (its name, that of the slot with γ,
    the factor c beside γ). q, k, v, gate and up have γ and LNS's c of the pre norm, or a γ of their
    own (HG); o has the gain after v, down that after SwiGLU's up (DP, DNP)."""
    gains = gain_vectors(model)
    for name in (weight.removesuffix(".weight") for weight in matrix_types(model)):
        *path, part = name.split(".")
        owner, pre = ".".join(path), ".".join([*path[:3], "pre"])
        c = 1.0
        if part == "o":
            slots = [f"{owner}.v.out"]
        elif part == "down":
            slots = [f"{owner}.up.out"] if model.config.mlp == "swiglu" else []
        else:
            slots = [pre, f"{name}.pre"]
            c = model.get_submodule(pre).const
        for slot in gains.keys() & slots:
            yield name, slot, c


@torch.no_grad()
def precondition(model) -> dict:
    """{type of MATRICES: {each of NUMBERS: [one per block, nan without a gain]}} for V = W diag(s),
    s = c γ. A step of gradient descent on W and γ moves column v of V by −P g, not −g, with g the
    loss's gradient by v, P = s² I + c² w wᵀ. "low" s² and "high" s² + c² ‖w‖² are P's two
    eigenvalues, medians over the columns; "condition" is the largest over the smallest of all;
    "gain" the mean of γ²."""
    found = {}
    for name, slot_name, c in scaled_matrices(model):
        w = model.get_submodule(name).weight.double().cpu()
        gain = model.get_submodule(slot_name).gain_vector().double().cpu()
        if len(gain) < w.shape[-1]:  # grouped-query attention: several heads read one of v
            shared = w.shape[-1] // len(gain)
            gain = gain.view(-1, model.config.head_dim).repeat_interleave(shared, 0).flatten()
        low = (c * gain).square().expand_as(w[..., 0, :])
        high = low + c**2 * w.square().sum(-2)
        blocks = found.setdefault(MATRICES[name.split(".")[-1]], [[] for _ in model.blocks])
        blocks[int(name.split(".")[1])].append([low.flatten(), high.flatten(), gain.square()])
    tables = {
        kind: np.array([summarize(its) for its in blocks]).T.tolist()
        for kind, blocks in found.items()
    }
    return {kind: dict(zip(NUMBERS, table, strict=True)) for kind, table in tables.items()}


def summarize(matrices: list) -> list:
    """NUMBERS of the matrices of one block and type."""
    if not matrices:
        return [np.nan] * len(NUMBERS)
    low, high, squares = (torch.cat(parts) for parts in zip(*matrices, strict=True))
    return [t.item() for t in (low.median(), high.median(), high.max() / low.min(), squares.mean())]


def measure_preconditioner(model, batches=None, run=None):
    if model.config.sigma_reparam:
        raise NotApplicable(
            "σReparam divides W by a norm of it, which the paper's preconditioner does not know"
        )
    types = precondition(model)
    if not types:
        raise NotApplicable("no scale vector before a matrix of the blocks")
    return {"types": types}


@register("preconditioner", measure_preconditioner, over_training=True)
def draw_preconditioner(measured):
    """Scale vectors as preconditioners of the matrices after them (scale vectors)."""
    eigenvalues, sizes, conditions = [], [], []
    for i, (kind, its) in enumerate(measured[-1]["types"].items()):
        color = f"C{i}"
        eigenvalues.append(by_block(its["high"], color=color, label=kind))
        eigenvalues.append(by_block(its["low"], "--", color=color))
        sizes.append(
            over_steps(
                measured, [np.nanmean(m["types"][kind]["gain"]) for m in measured], color=color
            )
        )
        values = [np.nanmean(m["types"][kind]["condition"]) for m in measured]
        conditions.append(over_steps(measured, values, color=color))
    panels = [
        Panel("eigenvalues of P (medians):\nγ² (dashed), γ² + ‖w‖²", "block", eigenvalues, log="y")
    ]
    panels += [Panel("condition number of P", "step, mean over blocks", conditions, log="y")]
    panels += [Panel("mean γ²", "step, mean over blocks", sizes)]
    return [panels]
