"""Conditioning: singular values of weights and of the sub-layers' Jacobians: after DNT (arXiv
2507.17501, sec. 3.2). What the paper leaves open, and what we chose: docs/analysis.md."""

from functools import partial
from itertools import product

import torch

from model import Attention, Transformer
from nanodnt.run.tracking import MATRICES
from studies.analysis.figure import BRANCHES, Panel, by_block, over_steps, register
from studies.analysis.runs import WINDOW
from studies.analysis.streams import draw_positions, pull_back, token_functions

# a singular value below this share of the largest counts as 0 [I]
DIGITS, JACOBIAN_DIGITS = 1e-7, 1e-5
WORST = dict(largest=max, condition=max, stable_rank=min)  # of several matrices [I]
TITLES = dict(
    largest="largest singular value", condition="condition number", stable_rank="stable rank"
)
WEIGHTS = *MATRICES, "WqᵀWk"


def spectrum(w: torch.Tensor, digits=DIGITS) -> dict:
    """{"largest": σ₁, "condition": σ₁/σᵣ, "stable_rank": Σσ²/σ₁²} of a matrix, in float64 on the
    CPU. σᵣ is the smallest singular value of at least digits · σ₁: what is below is rounding, or 0
    as behind a norm. nan for 0."""
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


def query_key(attention: Attention) -> torch.Tensor:
    """(H, r, r): matrices with the singular values of WqᵀWk (C, C) of each query head and its key
    head, but for those that its rank r = min(head_dim, C) makes 0: R Sᵀ, where Wqᵀ = Q R and Wkᵀ =
    P S by QR."""
    heads = (m.effective_weight().detach().cpu().double() for m in (attention.q, attention.k))
    q, k = (torch.linalg.qr(w.unflatten(0, (-1, attention.head_dim)).mT, mode="r").R for w in heads)
    return q @ k.repeat_interleave(len(q) // len(k), 0).mT


def worst(found: list) -> dict:
    """The worst of each number of `spectrum`: the largest, but the smallest stable rank."""
    return {name: pick(its[name] for its in found) for name, pick in WORST.items()}


def average(found: list) -> dict:
    """{name: mean} of several dicts of numbers."""
    return {name: sum(its[name] for its in found) / len(found) for name in found[0]}


def weight_spectra(block) -> dict:
    """{one of WEIGHTS: the `worst` of its matrices in a block: its experts, of WqᵀWk its heads}. W
    is the matrix without the gains beside it, as in the paper, whose norms contain them [I];
    σReparam's is γW/σ."""
    found = {"WqᵀWk": [spectrum(head) for head in query_key(block.attn.f)]}
    for name, module in block.named_modules():
        if (kind := name.split(".")[-1]) in MATRICES:
            weight = module.effective_weight()
            found.setdefault(kind, []).extend(map(spectrum, weight.view(-1, *weight.shape[-2:])))
    return {kind: worst(found[kind]) for kind in WEIGHTS if kind in found}


def jacobian_spectra(model: Transformer, batches, positions: list) -> dict:
    """{"attention", "FFN", each also "+ residual": [L] of {number: its mean over the tokens}} of
    the Jacobians ∂y/∂x of sub-layers at one token of each sequence. x is what enters, before the
    pre norm, y the branch output as it is added (DNT eq. 7), or what leaves the sub-layer."""
    places = list(product(range(len(model.blocks)), BRANCHES))
    modules = [getattr(model.blocks[block], branch) for block, branch in places]
    tokens = {}  # {(label, block): [the spectrum at each token]}
    for token in token_functions(model, batches, positions, modules):
        for (block, branch), (x, function) in zip(places, token, strict=True):
            for residual, label in (
                (False, BRANCHES[branch]),
                (True, f"{BRANCHES[branch]} + residual"),
            ):
                jacobian = pull_back(
                    partial(function, residual=residual), x, torch.eye(len(x)).to(x)
                )
                tokens.setdefault((label, block), []).append(spectrum(jacobian, JACOBIAN_DIGITS))
    found = {}
    for (label, _), spectra in tokens.items():
        found.setdefault(label, []).append(average(spectra))
    return found


def measure_conditioning(model, batches, run):
    positions = draw_positions(batches, run)
    blocks = [weight_spectra(block) for block in model.blocks]
    found = {kind: [spectra[kind] for spectra in blocks] for kind in blocks[0]}
    found |= jacobian_spectra(model, batches, positions)
    return {
        "positions": positions,
        "types": {kind: worst(its) for kind, its in found.items()},
        "blocks": found,
    }


@register(
    "conditioning",
    measure_conditioning,
    tokens=256,
    window=WINDOW,
    over_training=True,
    table=tuple(WORST),
)
def draw_conditioning(measured):
    """Singular values of the weights and of the sub-layers' Jacobians (DNT, sec. 3.2)."""
    last = measured[-1]["blocks"]
    weights = [kind for kind in last if kind in WEIGHTS]
    jacobians = [kind for kind in last if kind not in WEIGHTS]
    rows = []
    for kinds in (weights, jacobians):
        at_end, training = [], []
        for name, title in TITLES.items():
            lines = []
            for kind in kinds:
                label = kind if name == "largest" else None
                lines.append(by_block([its[name] for its in last[kind]], label=label))
            at_end.append(Panel(f"{title}\n(at the end)", "block", lines, log="y"))
            lines = [
                over_steps(measured, [m["types"][kind][name] for m in measured]) for kind in kinds
            ]
            training.append(Panel(f"{title}\n(the worst of all blocks)", "step", lines, log="y"))
        rows += [at_end, training]
    return rows
