"""What a scale vector does to the matrix after it, measured, simulated and drawn: after scale vectors (arXiv
2605.26895), of which we have a part. What it leaves open, and what we chose: docs/analysis.md."""

from dataclasses import fields
from functools import cache

import numpy as np
import torch

from nanodnt.optim import fill_defaults, lr_at
from nanodnt.optim.groups import make_groups
from nanodnt.settings import TrainConfig
from studies.analysis.figure import NotApplicable, Panel, by_block, line, over_steps, register
from studies.analysis.gradients import MATRICES, compute_gradients, matrix_types

COLORS = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(MATRICES.values()))}
GAINS = "gain_in", "gain_out"  # the roles of scale vectors
DECAY, NOISE, TARGET = 0.1, 1.0, 1.0  # λ, q and the entries of a⋆ in the simulation: a run does not tell them [I]
END, DT = 10.0, 0.1  # of the simulation: 2λt at its end; its step in t


def scaled_matrices(model):
    """Each matrix W of the blocks whose input is s ⊙ x + shift, s = c · gain[places], shift a vector or None: (name of
    W, of the slot with the gain, places (n_in,), c, shift). For q, k, v, gate, up it is the gain of the pre norm or
    their own (HG), and c is LNS's; o has the gain after v, down that after SwiGLU's up (DP, DNP)."""
    names = {module: name for name, module in model.named_modules()}
    for name in (name.removesuffix(".weight") for name in matrix_types(model)):
        *path, part = name.split(".")
        owner, matrix = model.get_submodule(".".join(path)), model.get_submodule(name)
        pre, c, shift = model.get_submodule(".".join(path[:3])).pre, 1.0, None
        if part in ("o", "down"):
            if part == "down" and owner.gate is None:
                continue  # an activation stands between
            slot = owner.v.out if part == "o" else owner.up.out
        else:
            slot, c = matrix.pre if pre.gain_vector() is None else pre, pre.const
        gain = slot.gain_vector()
        if gain is None:
            continue
        if part not in ("o", "down") and pre.bias is not None:
            shift = c * pre.bias * (1 if slot is pre else gain)
        shared = matrix.in_features // gain.numel()  # grouped-query attention: so many heads read one of v
        places = torch.arange(gain.numel()).view(-1, 1 if shared == 1 else model.config.head_dim)
        yield name, names[slot], places.repeat_interleave(shared, 0).flatten(), c, shift


def gain_step(slot, name: str, gradients: dict) -> torch.Tensor:
    """How the gain of slot `name` changes, to first order, when a step of rate −1 along the gradients {parameter name:
    gradient} is made on what it is made of: itself, OR's β and α, ER's b and α."""
    if slot.direction is None:
        return gradients[f"{name}.gain"]
    per_rms = slot.direction.square().mean().rsqrt()
    by_size, size = (slot.magnitude.exp(),) * 2 if slot.param == "expmagdir" else (1.0, slot.magnitude)
    of_size, of_direction = (gradients[f"{name}.{part}"].to(per_rms) for part in ("magnitude", "direction"))
    return (by_size * of_size * slot.direction + size * of_direction) * per_rms  # that gradient is orthogonal to α


@torch.no_grad()
def precondition(model, gradients: dict) -> dict:
    """{type of MATRICES: {…: [one per block, nan without a gain]}} for V = W diag(s), s = c γ. A step of gradient
    descent on W and γ moves column v of V by −P g, not −g, with g the loss's gradient by v, P = s² I + c² w wᵀ. "low"
    s² and "high" s² + c² ‖w‖² are P's two eigenvalues, medians over the columns; "condition" is the largest over the
    smallest of all; "trained" ‖ΔV‖ / ‖∂L/∂V‖ of that step, with all that trains a shared γ, "fixed" with γ held fixed;
    "gain" the mean of γ². `gradients`: of `compute_gradients`."""
    found = {}
    for name, slot_name, places, c, shift in scaled_matrices(model):
        slot, matrix = model.get_submodule(slot_name), model.get_submodule(name)
        gain, d_gain = (g.double().cpu()[places] for g in (slot.gain_vector(), gain_step(slot, slot_name, gradients)))
        w, d_w, s = matrix.weight.double().cpu(), gradients[f"{name}.weight"].double(), c * gain
        by_v = d_w  # times s; the norm's bias has its own part in the gradient, which is known if W has a bias too
        if shift is not None:
            d_bias = gradients[f"{name}.bias"] if matrix.bias is not None else d_w[..., 0] * np.nan
            by_v = d_w - d_bias[..., None] * shift.double().cpu()
        low = s.square().expand_as(w[..., 0, :])
        columns = low, low + c**2 * w.square().sum(-2), gain.square()
        steps = d_w * s + c * w * d_gain, d_w * s, by_v / s
        block = found.setdefault(MATRICES[name.split(".")[-1]], {}).setdefault(int(name.split(".")[1]), [])
        block.append([*(t.flatten() for t in columns), *(t.square().sum()[None] for t in steps)])
    keys = "low", "high", "condition", "gain", "trained", "fixed"
    return {
        kind: dict(zip(keys, np.array([summary(its.get(i)) for i in range(len(model.blocks))]).T.tolist(), strict=True))
        for kind, its in found.items()
    }


def summary(matrices: list | None) -> list:
    """The numbers of `precondition` for the matrices of one block and type."""
    if not matrices:
        return [np.nan] * 6
    low, high, gain, trained, fixed, by_v = (torch.cat(parts) for parts in zip(*matrices, strict=True))
    ratios = ((step.sum() / by_v.sum()).sqrt() for step in (trained, fixed))
    return [t.item() for t in (low.median(), high.median(), high.max() / low.min(), gain.mean(), *ratios)]


# ------------------------------------------------------------------------- the process of the appendix, and its theorem


def process(mu: float, dt: float, size: tuple, seed: int = 0):
    """The paper's noise model, step by step in t: yields entries (γ, w), arrays of `size`, of

        dγ = −(w ⊙ (a − a⋆) + µγ) dt + √q dB,   dw = −(γ ⊙ (a − a⋆) + λw) dt + √q dB′,   a = γ ⊙ w,

    which is what eq. 30 and the line before it differentiate. γ = w = 1 at first [I]. Given w, γ is a linear process,
    whose step is exact, and so is w's, given γ: taken in turn they keep the stationary distribution."""
    random, gain, w = np.random.default_rng(seed), np.ones(size), np.ones(size)

    def step(x, other, decay):
        rate = other**2 + decay
        kept = np.exp(-rate * dt)
        spread = np.sqrt(NOISE * (1 - kept**2) / (2 * rate))
        return kept * x + (1 - kept) * TARGET * other / rate + spread * random.standard_normal(size)

    while True:
        yield gain, w
        gain = step(gain, w, mu)
        w = step(w, gain, DECAY)


def bound(mu: float, t):
    """E γ² of an entry is at most this at time t: eq. 30, d/dt E‖γ‖² = −2µ E‖γ‖² − 2 E aᵀ(a − a⋆) + dq, with
    −2 aᵀ(a − a⋆) ≤ ‖a⋆‖²/2. Our copy of the proof ends at eq. 30; the last step is ours [I]."""
    rate = NOISE + TARGET**2 / 2
    return 1 + rate * t if mu == 0 else np.exp(-2 * mu * t) + rate * (1 - np.exp(-2 * mu * t)) / (2 * mu)


def stationary(mu: float) -> float:
    """E γ² of an entry at the end of time, µ > 0: the process is a gradient flow with noise, so its density is
    exp(−2U/q), U = (γw − a⋆)²/2 + µγ²/2 + λw²/2, here integrated over w in closed form and over γ on a grid [I].
    Without decay, µ = 0, it falls as 1/γ and has no integral: sup E‖γ‖² = ∞."""
    squares = np.linspace(0, 12 * np.sqrt(NOISE / mu), 200_001) ** 2
    density = np.exp(-(mu * squares + TARGET**2 * DECAY / (squares + DECAY)) / NOISE) / np.sqrt(squares + DECAY)
    return float((squares * density).sum() / density.sum())


@cache
def simulate(mu: float) -> dict:
    """{"time": 2λt, "mean", "std": of ‖γ‖²/d over 32 vectors of d = 64, "bound", "limit": `stationary`, or None}."""
    steps, paths = round(END / (2 * DECAY * DT)), process(mu, DT, (32, 64))
    rows = [(i, np.square(gain).mean(1)) for i, (gain, _) in zip(range(steps + 1), paths, strict=False) if i % 10 == 0]
    t = np.array([i * DT for i, _ in rows])
    found = {"time": 2 * DECAY * t, "bound": bound(mu, t) * np.ones_like(t)}
    found |= {"mean": np.array([x.mean() for _, x in rows]), "std": np.array([x.std() for _, x in rows])}
    return {key: values.tolist() for key, values in found.items()} | {"limit": stationary(mu) if mu else None}


def decays(model, run) -> tuple:
    """({type of MATRICES: weight decay of the gain before it}, 2λt of the matrices at the end of the run, t = the sum
    of its learning rates), of the settings of its training; ({}, nan) without a record of them."""
    if not (saved := getattr(run, "train_config", None)):
        return {}, np.nan
    config = TrainConfig(**{f.name: saved[f.name] for f in fields(TrainConfig) if f.name in saved})
    fill_defaults(config)
    groups = {group["role"]: group for group in make_groups(model, config)}
    of_slot = {
        n.rpartition(".")[0]: groups[r]["weight_decay"] for r in GAINS if r in groups for n, _ in groups[r]["params"]
    }
    steps = range(0, config.max_iters, max(1, config.max_iters // 1000))
    t = np.mean([lr_at(step, config, groups["vo"]) for step in steps] or [0]) * config.max_iters
    its = {MATRICES[name.split(".")[-1]]: of_slot[slot] for name, slot, *_ in scaled_matrices(model)}
    return its, 2 * groups["vo"]["weight_decay"] * float(t)


def measure_preconditioner(model, batches, run):
    if model.config.sigma_reparam:
        raise NotApplicable("σReparam divides W by a norm of it, which the paper's preconditioner does not know")
    if not any(True for _ in scaled_matrices(model)):
        raise NotApplicable("no scale vector before a matrix of the blocks")
    of_gains, time = decays(model, run)
    found = {"types": precondition(model, compute_gradients(model, batches)), "decay": of_gains, "time": time}
    return found | {"process": {"without decay": simulate(0.0), "with decay": simulate(DECAY)}}


@register("preconditioner", measure_preconditioner, tokens=4096, over_training=True)
def draw_preconditioner(measured):
    """Scale vectors as preconditioners of the matrices after them, and their growth (scale vectors, eq. 30)."""
    last, (eigenvalues, at_end, sizes, conditions, update, growth) = measured[-1], ([] for _ in range(6))
    for kind, its in last["types"].items():
        color, label = COLORS[kind], f", decay {last['decay'][kind]:g}" if last["decay"] else ""
        means = {key: [np.nanmean(m["types"][kind][key]) for m in measured] for key in its}
        for lines, key, style in ((eigenvalues, "high", "o-"), (eigenvalues, "low", "--"), (at_end, "trained", "o-")):
            lines.append(by_block(its[key], style, color=color, label=kind if style == "o-" else None))
        at_end.append(by_block(its["fixed"], "--", color=color))
        sizes.append(over_steps(measured, means["gain"], color=color, label=kind + label))
        conditions.append(over_steps(measured, means["condition"], color=color))
        update += [over_steps(measured, means["trained"], color=color)]
        update += [over_steps(measured, means["fixed"], "--", color=color)]
    for (name, found), color in zip(last["process"].items(), ("C3", "C0"), strict=True):
        x, mean, std = (np.array(found[key]) for key in ("time", "mean", "std"))
        growth.append(line(x, mean, "-", color=color, label=f"γ {name}, mean ± std"))
        growth += [line(x, mean + sign * std, "-", color=color, alpha=0.3) for sign in (1, -1)]
        growth.append(line(x, found["bound"], ":", color=color, label="bound of eq. 30"))
        growth += [line(x[[0, -1]], [found["limit"]] * 2, "k--", label="its limit")] if found["limit"] else []
    ends = f"\nthis run ends at 2λt = {last['time']:.2g}" if last["decay"] else ""
    upper = [Panel("eigenvalues of P (medians):\nγ² (dashed), γ² + ‖w‖²", "block", eigenvalues, log="y")]
    upper += [Panel("‖ΔV‖ / ‖∂L/∂V‖,\nγ held fixed: dashed", "block", at_end), Panel("mean γ²", "step", sizes)]
    lower = [Panel("condition number of P", "step, mean over blocks", conditions, log="y")]
    lower += [Panel("‖ΔV‖ / ‖∂L/∂V‖", "step, mean over blocks", update)]
    lower += [Panel(f"‖γ‖² / d, simulated{ends}", "2λt, t = sum of learning rates", growth, log="y")]
    return [upper, lower]
