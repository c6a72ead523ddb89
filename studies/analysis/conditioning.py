"""Conditioning: singular values of weights and of the sub-layers' Jacobians, and what scaling a weight does: after DNT
(arXiv 2507.17501, sec. 3.2). What the paper leaves open, and what we chose: docs/analysis.md."""

import math
from contextlib import contextmanager
from functools import partial, reduce
from itertools import product, repeat

import torch
from torch.nn.utils import get_total_norm

from layers.linear import SigmaReparam
from layers.slot import Slot
from model import Attention, Transformer
from nanodnt.run.tracking import watch
from studies.analysis.figure import BRANCHES, Panel, by_block, line, over_steps, register
from studies.analysis.gradients import MATRICES, trained_parameters
from studies.analysis.runs import WINDOW, pick_evenly, target_shares
from studies.analysis.streams import draw_positions, pull_back, token_functions

EXACT = 1024  # the widest Jacobian that is made in full; of a wider one the largest singular value is estimated [I]
DIGITS, JACOBIAN_DIGITS = 1e-7, 1e-5  # a singular value below this share of the largest counts as 0 [I]
PROBES, PASSES, STEP = 8, 6, 1e-3  # of that estimate; the step of differences, as a share of ‖x‖ [I]
WORST = dict(largest=max, condition=max, stable_rank=min, error=max)  # of several matrices [I]
RESIDUAL = "", " + residual"
KINDS = "q", "k", "v", "o", "gate", "up", "down", "WqᵀWk"
TITLES = dict(largest="largest singular value", condition="condition number", stable_rank="stable rank")

NONE = math.nan  # no law
BEHIND = {"none": 1, "rmsnorm": 0, "layernorm": 0, "dyt": NONE}  # what a norm makes of a power of c
POWER = {"q": NONE, "k": NONE, "v": 1, "o": 1, "gate": NONE, "down": 1}  # of a branch, in the output of its matrix;
POWER_UP = {"relu": 1, "relu2": 2, "swiglu": 1}  # in that of up, by activation: GELU has none
PROPOSITION = {"emb": 1, "q": 5, "k": 5}  # that the paper has on a matrix; the others: 3
FACTORS = 2.0, 0.5
RATIOS = "output", "jacobian", "theory", "gradient", "gradient_theory", "loss_gradient"


def singular_values(w: torch.Tensor) -> torch.Tensor:
    """(…, min(m, n)) of w (…, m, n), the largest first, in float64 from the smaller Gram matrix. What is below 1e-7 of
    the largest is rounding."""
    w = (w.cpu() if w.device.type == "mps" else w).detach().double()
    gram = w.mT @ w if w.shape[-2] > w.shape[-1] else w @ w.mT
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(-1)


def qk_values(attention: Attention) -> torch.Tensor:
    """(H, r): the singular values of WqᵀWk (C, C) for each query head and its key head, the largest first; its rank is
    r = min(head_dim, C) at most, the other C − r are 0. WqᵀWk = Q R (Q' R')ᵀ by QR of either factor."""
    heads = (m.effective_weight().detach().cpu().double() for m in (attention.q, attention.k))
    q, k = (torch.linalg.qr(w.unflatten(0, (-1, attention.head_dim)).mT, mode="r").R for w in heads)
    return singular_values(q @ k.repeat_interleave(len(q) // len(k), 0).mT)


def spectrum_statistics(s: torch.Tensor, digits=DIGITS) -> dict:
    """{"largest": σ₁, "condition": σ₁/σᵣ, "stable_rank": Σσ²/σ₁², "error": 0} of singular values, the largest first; σᵣ
    is the smallest above digits · σ₁: a norm makes the Jacobian of its branch singular [I]. nan for zeros."""
    above = s[s > digits * s[0]] if s[0] > 0 else s
    found = dict(largest=s[0], condition=s[0] / above[-1], stable_rank=(s / s[0]).square().sum())
    return {name: value.item() for name, value in found.items()} | {"error": 0.0}


def worst(found: list) -> dict:
    """The worst of each of `spectrum_statistics`: the largest, but the smallest stable rank."""
    return {name: pick(its[name] for its in found) for name, pick in WORST.items()}


def average(found: list) -> dict:
    """{name: mean} of several dicts of numbers."""
    return {name: sum(its[name] for its in found) / len(found) for name in found[0]}


def weight_spectra(block) -> dict:
    """{one of KINDS: `worst` of its matrices in a block: its experts, of WqᵀWk its heads}. W is the matrix without the
    gains beside it, as in the paper, whose norms contain them [I]; σReparam's is γW/σ."""
    found = {"WqᵀWk": [spectrum_statistics(s) for s in qk_values(block.attn.f)]}
    for name, module in block.named_modules():
        if (kind := name.split(".")[-1]) in MATRICES:
            weight = module.effective_weight()
            matrices = weight if weight.ndim == 3 else [weight]
            found.setdefault(kind, []).extend(spectrum_statistics(singular_values(w)) for w in matrices)
    return {kind: worst(found[kind]) for kind in KINDS if kind in found}


def estimate_spectrum(function, x: torch.Tensor, generator: torch.Generator, **how) -> dict:
    """`spectrum_statistics` of the Jacobian J of a `function` of `token_functions` at x, from PROBES · PASSES products
    with J and Jᵀ: a block Krylov space of JJᵀ. "largest" is a lower bound of σ₁, since the last products, JᵀQ, are
    exact; "error" is ‖Jv − σu‖/σ: so near, relative to σ, a singular value must be. Stable rank: ‖J‖² is a mean over
    PROBES random vectors. No condition number: nan."""

    def push(directions):  # (n, C) → J times each: central differences
        size = STEP * x.norm()
        with torch.no_grad():
            y = function(torch.cat((x + size * directions, x - size * directions))[:, None], **how)[:, 0]
        return (y[: len(directions)] - y[len(directions) :]) / (2 * size)

    rows, energy, basis = torch.randn(PROBES, len(x), generator=generator).to(x), 0.0, []
    for _ in range(PASSES):
        rows = pull_back(function, x, rows, **how)
        energy = energy or rows.square().sum().item() / PROBES  # ‖J‖², of the first
        rows = torch.linalg.qr(push(torch.linalg.qr(rows.T).Q.T).T).Q.T
        basis.append(rows)
    q = torch.linalg.qr(torch.cat(basis).T).Q
    u, s, v = torch.linalg.svd(pull_back(function, x, q.T, **how), full_matrices=False)
    error = (push(v[:1])[0] - s[0] * (q @ u[:, 0])).norm() / s[0]
    largest = s[0].item()
    return dict(largest=largest, condition=NONE, stable_rank=energy / largest**2, error=error.item())


def jacobian_spectra(model: Transformer, batches, positions: list, generator: torch.Generator, exact=EXACT) -> dict:
    """{"attention", "FFN", each also "+ residual": [L] of {statistic: its mean over the tokens}}: Jacobians ∂y/∂x of a
    sub-layer at one token of each sequence, as in DNT eq. 7: x is what enters it, before the pre norm, y the branch
    output as it is added, or what leaves the sub-layer. They are made in full up to width `exact`."""
    modules = [getattr(block, branch) for block in model.blocks for branch in BRANCHES]
    found = {label + more: [[] for _ in model.blocks] for more in RESIDUAL for label in BRANCHES.values()}
    for token in token_functions(model, batches, positions, modules):
        places = product(range(len(model.blocks)), BRANCHES.values())
        for ((block, label), (x, function)), more in product(zip(places, token, strict=True), RESIDUAL):
            how = dict(residual=bool(more))
            if len(x) > exact:
                its = estimate_spectrum(function, x, generator, **how)
            else:
                jacobian = pull_back(function, x, torch.eye(len(x)).to(x), **how)
                its = spectrum_statistics(singular_values(jacobian), JACOBIAN_DIGITS)
            found[label + more][block].append(its)
    return {name: [average(its) for its in blocks] for name, blocks in found.items()}


def measure_conditioning(model, batches, run):
    positions, blocks = draw_positions(batches, run), [weight_spectra(block) for block in model.blocks]
    found = {kind: [its[kind] for its in blocks] for kind in blocks[0]}
    found |= jacobian_spectra(model, batches, positions, run.generator())
    return {"positions": positions, "types": {kind: worst(its) for kind, its in found.items()}, "blocks": found}


@register("conditioning", measure_conditioning, tokens=256, window=WINDOW, over_training=True, table=tuple(WORST))
def draw_conditioning(measured):
    """Singular values of the weights and of the sub-layers' Jacobians (DNT, sec. 3.2)."""
    last, rows = measured[-1], []
    for what, is_weight in (("weights", True), ("Jacobians", False)):
        kinds = [kind for kind in last["blocks"] if (kind in KINDS) == is_weight]
        row = []
        for name, title in TITLES.items():
            values = [[its[name] for its in last["blocks"][kind]] for kind in kinds]
            lines = [by_block(its, label=None if row else kind) for kind, its in zip(kinds, values, strict=True)]
            row.append(Panel(f"{title}\n(at the end)", "block", lines, "" if row else what, log="y"))
        training = [over_steps(measured, [m["types"][kind]["largest"] for m in measured]) for kind in kinds]
        rows.append([*row, Panel("largest singular value\nof all blocks", "step", training, log="y")])
    return rows


def degree(steps) -> float:
    """The p of c^p after these steps: what is unchanged (0) stays so, whatever follows; nan for no law."""
    return reduce(lambda p, step: p and p * step, steps, 1)


def slot_step(slot: Slot) -> float:
    return NONE if slot.norm == "none" and slot.bias is not None else BEHIND[slot.norm]


def branch_degree(module, part: str, act: str) -> float:
    """The p with which the output of residual branch `module` grows, c^p, where its matrix `part` is multiplied by c,
    from what stands behind that matrix: nan if nothing can be said."""
    parts = {name.split(".")[-1]: m for name, m in module.named_modules()}
    matrix, last = parts[part], parts["o" if "o" in parts else "down"]
    steps = [0 if isinstance(matrix, SigmaReparam) else 1, slot_step(matrix.out)]
    steps += [slot_step(parts[f"{part}_norm"])] if f"{part}_norm" in parts else []  # q and k
    steps += [POWER_UP.get(act, NONE) if part == "up" else POWER[part]]
    steps += [NONE] if matrix is not last and last.bias is not None else []
    return degree([*steps, slot_step(module.mid)])


def scalings(model: Transformer, block: int):
    """What is multiplied: (name, modules whose input x and output y are looked at, parameters that are multiplied,
    parameters of "loss_gradient", p): the embedding, and each matrix of a block, with its bias."""
    types, trained = model.block_types(), trained_parameters(model)
    embedding = [trained[name] for name, kind in types.items() if kind in ("emb", "pos", "patch")]
    inside = [p for name, p in trained.items() if name.startswith(f"blocks.{block}.")]
    p = degree(map(slot_step, (model.embed_scale, model.input_norm)))
    yield "emb", (model.input_norm, model.input_norm), embedding, inside, p
    for branch, part in product(BRANCHES, MATRICES):
        module = getattr(model.blocks[block], branch)
        its = [m for name, m in module.named_modules() if name.split(".")[-1] == part]
        scaled = [w for m in its for w in (m.weight, None if isinstance(m, SigmaReparam) else m.bias) if w is not None]
        if its:
            yield part, (module, module.mid), scaled, scaled, branch_degree(module, part, model.config.mlp)


@contextmanager
def multiplied(parameters: list, c: float):
    """Inside, the parameters are c times as large; afterwards they are what they were, to the bit."""
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            torch._foreach_mul_(parameters, c)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)


@torch.enable_grad()
def respond(model: Transformer, batches, places: tuple, scaled: list, watched: list, given: list) -> torch.Tensor:
    """(4,) norms: of y; of ∂L/∂x and ∂L/∂(scaled) with ∂L/∂y as `given`, one for each batch; of ∂L/∂(watched). An empty
    `given` is filled with this pass's own ∂L/∂y. places: (the module that x enters, the one that y leaves)."""
    (enters, leaves), squares, sums, first = places, torch.zeros(2, dtype=torch.float64), repeat(0.0), not given
    grad = partial(torch.autograd.grad, materialize_grads=True, retain_graph=True)
    for i, (batch, share) in enumerate(zip(batches, target_shares(batches), strict=True)):
        seen = {}
        notes = [(enters, lambda args, y, seen=seen: seen.update(x=args[0]))]
        notes += [(leaves, lambda args, y, seen=seen: seen.update(y=y))]
        with watch(notes):
            loss = share * model(*batch)[1]
        behind, *total = grad(loss, [seen["y"], *watched])
        if first:
            given.append(behind)
        before, *its = grad(seen["y"], [seen["x"], *scaled], given[i])
        squares += torch.stack([t.detach().double().square().sum().cpu() for t in (seen["y"], before)])
        sums = [s + g for s, g in zip(sums, [*its, *total], strict=False)]
    norms = [get_total_norm(its).double().cpu() for its in (sums[: len(scaled)], sums[len(scaled) :])]
    return torch.stack([*squares.sqrt(), *norms])


def measure_propositions(model, batches, run):
    """{"types": {"q × 2, Prop. 5": …}}: ratios to the unscaled model, mean over up to three blocks, one of them scaled
    at a time: "output" ‖y‖ and "jacobian" ‖Jᵀ∂L/∂y‖ beside "theory" c^p; "gradient" of what is scaled beside
    "gradient_theory" c^(p−1), all with ∂L/∂y of the unscaled model; "loss_gradient", with the ∂L/∂y that follows: for
    the embedding that of the block's parameters."""
    rows = {}
    for block in pick_evenly(list(range(len(model.blocks))), 3):
        for name, places, scaled, watched, p in scalings(model, block):
            given = []
            before = respond(model, batches, places, scaled, watched, given)
            for c in FACTORS:
                with multiplied(scaled, c):
                    y, x, gradient, total = (respond(model, batches, places, scaled, watched, given) / before).tolist()
                its = y, NONE if name == "emb" else x, c**p, gradient, c ** (p - 1), total
                row = f"{name} × {c:g}, Prop. {PROPOSITION.get(name, 3)}"
                rows.setdefault(row, []).append(dict(zip(RATIOS, its, strict=True)))
    return {"types": {row: average(its) for row, its in rows.items()}}


@register("propositions", measure_propositions, tokens=256, window=WINDOW, table=RATIOS)
def draw_propositions(measured):
    """What multiplying a matrix by c does to output, Jacobian and gradient (DNT, Propositions 1, 3, 5)."""
    types, panels = measured[-1]["types"], []
    ticks = [row.split(",")[0] for row in types]
    for names, theory in ((("output", "jacobian"), "theory"), (("gradient", "loss_gradient"), "gradient_theory")):
        lines = [line(ticks, [its[name] for its in types.values()], "o", label=name) for name in names]
        lines.append(line(ticks, [its[theory] for its in types.values()], "k_", markersize=12, label="theory"))
        panels.append(Panel(f"ratio of {' and '.join(names)}", "", lines, log="y", ticks=ticks))
    return [panels]
