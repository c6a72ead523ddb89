"""Conditioning: singular values of weights and of the sub-layers' Jacobians, and what scaling a weight does: after DNT
(arXiv 2507.17501, sec. 3.2). What the paper leaves open, and what we chose: docs/analysis.md."""

import math
from functools import partial
from itertools import product

import torch
from torch.nn.utils import get_total_norm

from layers.linear import SigmaReparam
from layers.slot import Slot
from model import Attention, Transformer
from nanodnt.run.tracking import MATRICES, watch
from studies.analysis.figure import BRANCHES, Panel, by_block, line, over_steps, register
from studies.analysis.gradients import trained_parameters
from studies.analysis.runs import WINDOW, pick_evenly
from studies.analysis.streams import draw_positions, pull_back, token_functions

EXACT = 1024  # the widest Jacobian that is made in full; of a wider one the largest singular value is estimated [I]
DIGITS, JACOBIAN_DIGITS = 1e-7, 1e-5  # a singular value below this share of the largest counts as 0 [I]
PROBES, PASSES, STEP = 8, 6, 1e-3  # of that estimate; the step of differences, as a share of ‖x‖ [I]
WORST = dict(largest=max, condition=max, stable_rank=min, error=max)  # of several matrices [I]
TITLES = dict(largest="largest singular value", condition="condition number", stable_rank="stable rank")
WEIGHTS = *MATRICES, "WqᵀWk"

NONE = math.nan  # no law
BEHIND = {"none": 1, "dyt": NONE}  # what a slot makes of a power of c; the other norms: 0
POWER = {"v": 1, "o": 1, "down": 1, "up relu": 1, "up relu2": 2, "up swiglu": 1}  # of a branch, in a matrix's output
PROPOSITION = {"emb": 1, "q": 5, "k": 5}  # of DNT, on what is multiplied; on the other matrices: 3
FACTORS = 2.0, 0.5  # powers of 2, with which a weight is afterwards what it was, to the bit
RATIOS = "output", "jacobian", "theory", "gradient", "gradient_theory", "loss_gradient"


def spectrum(w: torch.Tensor, digits=DIGITS) -> dict:
    """{"largest": σ₁, "condition": σ₁/σᵣ, "stable_rank": Σσ²/σ₁², "error": 0} of a matrix, in float64 on the CPU. σᵣ is
    the smallest singular value of at least digits · σ₁: what is below is rounding, or 0 as behind a norm. nan for 0."""
    w = w.detach().cpu().double()
    gram = w.mT @ w if w.shape[0] > w.shape[1] else w @ w.mT
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    found = s[-1], s[-1] / s[s >= digits * s[-1]][0], (s / s[-1]).square().sum(), torch.zeros(())
    return dict(zip(WORST, torch.stack(found).tolist(), strict=True))


def query_key(attention: Attention) -> torch.Tensor:
    """(H, r, r): matrices with the singular values of WqᵀWk (C, C) of each query head and its key head, but for those
    that its rank r = min(head_dim, C) makes 0: R Sᵀ, where Wqᵀ = Q R and Wkᵀ = P S by QR."""
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
    """{one of WEIGHTS: the `worst` of its matrices in a block: its experts, of WqᵀWk its heads}. W is the matrix
    without the gains beside it, as in the paper, whose norms contain them [I]; σReparam's is γW/σ."""
    found = {"WqᵀWk": [spectrum(head) for head in query_key(block.attn.f)]}
    for name, module in block.named_modules():
        if (kind := name.split(".")[-1]) in MATRICES:
            weight = module.effective_weight()
            found.setdefault(kind, []).extend(map(spectrum, weight.view(-1, *weight.shape[-2:])))
    return {kind: worst(found[kind]) for kind in WEIGHTS if kind in found}


def estimate_spectrum(function, x: torch.Tensor, generator: torch.Generator) -> dict:
    """`spectrum` of the Jacobian J of a `function` of `token_functions` at x, from PROBES · PASSES products with J and
    Jᵀ, a block Krylov space Q of JJᵀ. "largest" is a lower bound of σ₁, since JᵀQ is exact; "error" is ‖Jv − σu‖/σ:
    so near, relative to σ, a singular value must be. ‖J‖² is a mean over PROBES vectors. No condition number: nan."""

    def push(directions):  # (n, C) → J times each: central differences
        shift = STEP * x.norm() * directions
        with torch.no_grad():
            after, before = function(torch.cat((x + shift, x - shift))[:, None])[:, 0].chunk(2)
        return (after - before) / (2 * STEP * x.norm())

    def orthonormal(rows):
        return torch.linalg.qr(rows.T).Q.T

    rows, basis = pull_back(function, x, torch.randn(PROBES, len(x), generator=generator).to(x)), []
    energy = rows.square().sum().item() / PROBES  # ‖J‖²
    for _ in range(PASSES):
        basis.append(orthonormal(push(orthonormal(rows))))
        rows = pull_back(function, x, basis[-1])
    q = orthonormal(torch.cat(basis))
    u, s, v = torch.linalg.svd(pull_back(function, x, q), full_matrices=False)
    error = (push(v[:1])[0] / s[0] - u[:, 0] @ q).norm().item()
    return dict(largest=s[0].item(), condition=NONE, stable_rank=energy / s[0].item() ** 2, error=error)


def jacobian_spectra(model: Transformer, batches, positions: list, generator: torch.Generator, exact=EXACT) -> dict:
    """{"attention", "FFN", each also "+ residual": [L] of {number: its mean over the tokens}} of the Jacobians ∂y/∂x of
    sub-layers at one token of each sequence. x is what enters, before the pre norm, y the branch output as it is added
    (DNT eq. 7), or what leaves the sub-layer. They are made in full up to width `exact`."""
    places, found = list(product(range(len(model.blocks)), BRANCHES)), {}
    modules = [getattr(model.blocks[block], branch) for block, branch in places]
    for token in token_functions(model, batches, positions, modules):
        for (block, branch), (x, function) in zip(places, token, strict=True):
            for residual, label in ((False, BRANCHES[branch]), (True, f"{BRANCHES[branch]} + residual")):
                one = partial(function, residual=residual)
                if len(x) > exact:
                    its = estimate_spectrum(one, x, generator)
                else:
                    its = spectrum(pull_back(one, x, torch.eye(len(x)).to(x)), JACOBIAN_DIGITS)
                found.setdefault(label, {}).setdefault(block, []).append(its)
    return {label: [average(its) for its in blocks.values()] for label, blocks in found.items()}


def measure_conditioning(model, batches, run):
    positions, blocks = draw_positions(batches, run), [weight_spectra(block) for block in model.blocks]
    found = {kind: [its[kind] for its in blocks] for kind in blocks[0]}
    found |= jacobian_spectra(model, batches, positions, run.generator())
    return {"positions": positions, "types": {kind: worst(its) for kind, its in found.items()}, "blocks": found}


@register("conditioning", measure_conditioning, tokens=256, window=WINDOW, over_training=True, table=tuple(WORST))
def draw_conditioning(measured):
    """Singular values of the weights and of the sub-layers' Jacobians (DNT, sec. 3.2)."""
    last, rows = measured[-1]["blocks"], []
    for what, is_weight in (("weights", True), ("Jacobians", False)):
        kinds, depth, training = [kind for kind in last if (kind in WEIGHTS) == is_weight], [], []
        for name, title in TITLES.items():
            first = not depth
            lines = [by_block([its[name] for its in last[kind]], label=kind if first else None) for kind in kinds]
            depth.append(Panel(f"{title}\n(at the end)", "block", lines, what * first, log="y"))
            lines = [over_steps(measured, [m["types"][kind][name] for m in measured]) for kind in kinds]
            training.append(Panel(f"{title}\n(the worst of all blocks)", "step", lines, what * first, log="y"))
        rows += [depth, training]
    return rows


def degree(*steps) -> float:
    """The p of c^p after these steps, `Slot`s or powers: what is unchanged (0) stays so, whatever follows; nan for no
    law, as where a bias is added."""
    p = 1
    for step in steps:
        if isinstance(step, Slot):
            step = NONE if step.norm == "none" and step.bias is not None else BEHIND.get(step.norm, 0)
        p = p and p * step
    return p


def branch_degree(module, part: str, act: str) -> float:
    """The p with which the output of residual branch `module` grows, c^p, where its matrix `part` is multiplied by c,
    from what stands behind that matrix: nan if nothing can be said."""
    parts = {name.split(".")[-1]: m for name, m in module.named_modules()}
    matrix, last = parts[part], parts["o" if "o" in parts else "down"]
    own = 0 if isinstance(matrix, SigmaReparam) else 1
    power = POWER.get(part, POWER.get(f"{part} {act}", NONE))
    bias = 1 if matrix is last or last.bias is None else NONE
    return degree(own, matrix.out, parts.get(f"{part}_norm", 1), power, bias, module.mid)


def scalings(model: Transformer, block: int):
    """What is multiplied: (name, modules whose input x and output y are looked at, parameters that are multiplied,
    parameters of "loss_gradient", p): the embedding, and each matrix of a block, with its bias."""
    types, trained = model.block_types(), trained_parameters(model)
    embedding = [trained[name] for name, kind in types.items() if kind in ("emb", "pos", "patch")]
    inside = [p for name, p in trained.items() if name.startswith(f"blocks.{block}.")]
    p = degree(model.embed_scale, model.input_norm)
    yield "emb", (model.input_norm, model.input_norm), embedding, inside, p
    for branch, part in product(BRANCHES, MATRICES):
        module = getattr(model.blocks[block], branch)
        its = [m for name, m in module.named_modules() if name.split(".")[-1] == part]
        scaled = [w for m in its for w in (m.weight, None if isinstance(m, SigmaReparam) else m.bias) if w is not None]
        if its:
            yield part, (module, module.mid), scaled, scaled, branch_degree(module, part, model.config.mlp)


@torch.enable_grad()
def respond(model: Transformer, batch, places: tuple, scaled: list, watched: list, given=None) -> tuple:
    """(norms (4,) of y; of ∂L/∂x and ∂L/∂(scaled) where ∂L/∂y is `given`, or else this pass's own; of ∂L/∂(watched),
    that ∂L/∂y). places: (the module that x enters, the one that y leaves)."""
    (enters, leaves), seen = places, {}
    with watch([(enters, lambda args, y: seen.update(x=args[0])), (leaves, lambda args, y: seen.update(y=y))]):
        loss = model(*batch)[1]
    grad = partial(torch.autograd.grad, materialize_grads=True, retain_graph=True)
    behind, *total = grad(loss, [seen["y"], *watched])
    given = behind if given is None else given
    before, *own = grad(seen["y"], [seen["x"], *scaled], given)
    return torch.stack([get_total_norm(its).cpu().double() for its in ([seen["y"]], [before], own, total)]), given


@torch.no_grad()
def measure_propositions(model, batches, run):
    """{"types": {"q × 2, Prop. 5": ratios to the unscaled model}}, mean over up to three blocks, one of them scaled at
    a time, and the parts that are read: "output" ‖y‖ and "jacobian" ‖Jᵀ∂L/∂y‖, c^p in "theory"; "gradient" of what is
    scaled, c^(p−1) in "gradient_theory"; "loss_gradient", with the ∂L/∂y that follows (the embedding: `scalings`)."""
    rows, blocks = {}, pick_evenly(range(len(model.blocks)), 3)
    for batch, block in ((batch, block) for batch in batches for block in blocks):
        for name, *about, p in scalings(model, block):
            before, given = respond(model, batch, *about)
            for c in FACTORS:
                torch._foreach_mul_(about[1], c)
                y, x, gradient, total = (respond(model, batch, *about, given)[0] / before).tolist()
                torch._foreach_mul_(about[1], 1 / c)
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
