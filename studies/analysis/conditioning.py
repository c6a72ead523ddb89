"""Conditioning: singular values of weights and of the sub-layers' Jacobians: after DNT (arXiv
2507.17501, sec. 3.2). Questions that the paper leaves open, and our choices: docs/analysis.md."""

from collections.abc import Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from model import Attention, Block, Transformer
from nanodnt.run.tracking import MATRICES
from studies.analysis.figure import (
    BRANCHES,
    Measured,
    Panel,
    PanelRows,
    by_block,
    over_steps,
    register,
)
from studies.analysis.runs import WINDOW, Batch, Batches, CheckpointedRun
from studies.analysis.streams import draw_positions, pull_back, token_functions

# A singular value below this share of the largest counts as 0: our choice.
DIGITS = 1e-7
JACOBIAN_DIGITS = 1e-5
WORST = dict(largest=max, condition=max, stable_rank=min)  # of several matrices: our choice
TITLES = {
    "largest": "largest singular value",
    "condition": "condition number",
    "stable_rank": "stable rank",
}
WEIGHTS = (*MATRICES, "WqᵀWk")

Spectrum = dict[str, float]  # {each of WORST: its value}


def spectrum(w: Tensor, digits: float = DIGITS) -> Spectrum:
    """{"largest": σ₁, "condition": σ₁/σᵣ, "stable_rank": Σσ²/σ₁²} of a matrix, in float64 on the
    CPU. σᵣ is the smallest singular value of at least digits · σ₁: smaller ones are rounding, or 0
    as behind a norm. nan for a matrix of zeros."""
    w = w.detach().cpu().double()
    gram = w.mT @ w if w.shape[0] > w.shape[1] else w @ w.mT
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    largest = s[-1]
    smallest = s[s >= digits * largest][0]
    return {
        "largest": largest.item(),
        "condition": (largest / smallest).item(),
        "stable_rank": (s / largest).square().sum().item(),
    }


def query_key(attention: Attention) -> Tensor:
    """(H, r, r): matrices R Sᵀ, where Wqᵀ = Q R and Wkᵀ = P S by QR for each query head and its key
    head. They have the singular values of WqᵀWk (C, C), but for those that its rank
    r = min(head_dim, C) makes 0."""
    triangles = []
    for linear in (attention.q, attention.k):
        w = linear.effective_weight().detach().cpu().double()
        heads = w.unflatten(0, (-1, attention.head_dim)).mT
        triangles.append(torch.linalg.qr(heads, mode="r").R)
    q, k = triangles
    return q @ k.repeat_interleave(len(q) // len(k), 0).mT


def worst(spectra: list[Spectrum]) -> Spectrum:
    """The worst of each number of `spectrum`: the largest, but the smallest stable rank."""
    return {name: pick(s[name] for s in spectra) for name, pick in WORST.items()}


def average(spectra: list[Spectrum]) -> Spectrum:
    """The mean of each number of `spectrum`."""
    return {name: sum(s[name] for s in spectra) / len(spectra) for name in spectra[0]}


def weight_spectra(block: Block) -> dict[str, Spectrum]:
    """{one of WEIGHTS: the `worst` of its matrices in a block, which are experts, or heads of
    WqᵀWk}. W is the matrix without the gains beside it, as in the paper, whose norms contain them
    (our inference); under σReparam it is γW/σ."""
    spectra = {"WqᵀWk": [spectrum(head) for head in query_key(block.attn.f)]}
    for name, module in block.named_modules():
        kind = name.split(".")[-1]
        if kind in MATRICES:
            weight = module.effective_weight()
            matrices = weight.view(-1, *weight.shape[-2:])
            spectra.setdefault(kind, []).extend(map(spectrum, matrices))
    return {kind: worst(spectra[kind]) for kind in WEIGHTS if kind in spectra}


def jacobian_spectra(
    model: Transformer, batches: Iterable[Batch], positions: list[int]
) -> dict[str, list[Spectrum]]:
    """{"attention", "FFN", each also "+ residual": [L] of {number: its mean over the tokens}} of
    the Jacobians ∂y/∂x of sub-layers at one token of each sequence. x is the sub-layer's input,
    before the pre norm; y is the branch output as it is added (DNT eq. 7), or with "+ residual" the
    sub-layer's output."""
    places = list(product(range(len(model.blocks)), BRANCHES))
    modules = [getattr(model.blocks[block], branch) for block, branch in places]
    tokens = {}  # {(label, block): [the spectrum at each token]}
    for token in token_functions(model, batches, positions, modules):
        for (block, branch), (x, function) in zip(places, token, strict=True):
            identity = torch.eye(len(x)).to(x)
            for residual, suffix in ((False, ""), (True, " + residual")):
                label = BRANCHES[branch] + suffix
                jacobian = pull_back(partial(function, residual=residual), x, identity)
                tokens.setdefault((label, block), []).append(spectrum(jacobian, JACOBIAN_DIGITS))
    means = {}
    for (label, _), spectra in tokens.items():
        means.setdefault(label, []).append(average(spectra))
    return means


def measure_conditioning(model: Transformer, batches: Batches, run: CheckpointedRun) -> Measured:
    positions = draw_positions(batches, run)
    weights = [weight_spectra(block) for block in model.blocks]
    by_kind = {kind: [block[kind] for block in weights] for kind in weights[0]}
    by_kind |= jacobian_spectra(model, batches, positions)
    types = {kind: worst(blocks) for kind, blocks in by_kind.items()}
    return {"positions": positions, "types": types, "blocks": by_kind}


@register(
    "conditioning",
    measure_conditioning,
    tokens=256,
    window=WINDOW,
    over_training=True,
    table=tuple(WORST),
)
def draw_conditioning(measured: list[Measured]) -> PanelRows:
    """Singular values of the weights and of the sub-layers' Jacobians (DNT, sec. 3.2)."""
    last = measured[-1]["blocks"]
    weights = [kind for kind in last if kind in WEIGHTS]
    jacobians = [kind for kind in last if kind not in WEIGHTS]
    rows = []
    for kinds in (weights, jacobians):
        at_end = []
        training = []
        for name, title in TITLES.items():
            lines = []
            worst_lines = []
            for kind in kinds:
                lines.append(by_block([block[name] for block in last[kind]], label=kind))
                values = [m["types"][kind][name] for m in measured]
                worst_lines.append(over_steps(measured, values, label=kind))
            at_end.append(Panel(f"{title}\n(at the end)", "block", lines, log="y"))
            title = f"{title}\n(the worst of all blocks)"
            training.append(Panel(title, "step", worst_lines, log="y"))
        rows += [at_end, training]
    return rows
