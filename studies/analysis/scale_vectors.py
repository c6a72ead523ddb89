"""What a scale vector does to the matrix after it, measured, simulated and drawn: after scale vectors (arXiv
2605.26895), of which we have a part. What it leaves open, and what we chose: docs/analysis.md."""

from dataclasses import fields
from functools import cache

import numpy as np
import torch

from nanodnt.optim import lr_at
from nanodnt.optim.groups import make_groups
from nanodnt.run.tracking import MATRICES, gain_vectors, matrix_types
from nanodnt.settings import TrainConfig
from studies.analysis.figure import NotApplicable, Panel, by_block, line, over_steps, register
from studies.analysis.gradients import compute_gradients

COLORS = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(MATRICES.values()))}
NUMBERS = "low", "high", "condition", "gain", "trained", "fixed"  # of a block and type, in this order
DECAY, NOISE, TARGET = 0.1, 1.0, 1.0  # λ, q and the entries of a⋆ in the simulation: a run does not tell them [I]
END, DT = 50.0, 0.1  # t at the end of the simulation, so that 2λt is 10, and a step in t


def scaled_matrices(model):
    """Of each matrix of the blocks with a gain γ on its input: (its name, that of the slot with γ, the factor c beside
    γ, the bias beside it or None). q, k, v, gate and up have γ, bias and LNS's c of the pre norm, or a γ of their own
    (HG); o has the gain after v, down that after SwiGLU's up (DP, DNP)."""
    gains, others = gain_vectors(model), {"o": ["v.out"], "down": ["up.out"] if model.config.mlp == "swiglu" else []}
    for name in (weight.removesuffix(".weight") for weight in matrix_types(model)):
        *path, part = name.split(".")
        owner, pre = ".".join(path), ".".join([*path[:3], "pre"])
        norm, slots = model.get_submodule(pre), [f"{owner}.{slot}" for slot in others.get(part, [])]
        for slot in gains.keys() & (slots if part in others else [pre, f"{name}.pre"]):
            yield name, slot, *((1.0, None) if part in others else (norm.const, norm.bias))


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
    """{type of MATRICES: {each of NUMBERS: [one per block, nan without a gain]}} for V = W diag(s), s = c γ. A step of
    gradient descent on W and γ moves column v of V by −P g, not −g, with g the loss's gradient by v, P = s² I + c² w
    wᵀ. "low" s² and "high" s² + c² ‖w‖² are P's two eigenvalues, medians over the columns; "condition" is the largest
    over the smallest of all; "gain" the mean of γ²; "trained" ‖ΔV‖ / ‖∂L/∂V‖ of that step, with all that trains a
    shared γ, "fixed" with γ held fixed. `gradients`: of `compute_gradients`."""
    found, head_dim = {}, model.config.head_dim
    for name, slot_name, c, bias in scaled_matrices(model):
        slot, matrix = model.get_submodule(slot_name), model.get_submodule(name)
        w, d_w = matrix.weight.double().cpu(), gradients[f"{name}.weight"].double()
        gain, d_gain = (g.double().cpu() for g in (slot.gain_vector(), gain_step(slot, slot_name, gradients)))
        if shared := w.shape[-1] // len(gain) - 1:  # grouped-query attention: more heads read one of v
            gain, d_gain = (g.view(-1, head_dim).repeat_interleave(shared + 1, 0).flatten() for g in (gain, d_gain))
        s, by_v = c * gain, d_w / (c * gain)
        if bias is not None:  # its part in the gradient is known if W has a bias too
            d_bias = gradients[f"{name}.bias"] if matrix.bias is not None else d_w[..., 0] * np.nan
            by_v -= d_bias[..., None] * bias.double().cpu() / (1 if slot is matrix.pre else gain)
        low = s.square().expand_as(w[..., 0, :])
        columns = low, low + c**2 * w.square().sum(-2), gain.square()
        steps = d_w * s + c * w * d_gain, d_w * s, by_v
        blocks = found.setdefault(MATRICES[name.split(".")[-1]], [[] for _ in model.blocks])
        its = [*(t.flatten() for t in columns), *(t.square().sum()[None] for t in steps)]
        blocks[int(name.split(".")[1])].append(its)
    tables = {kind: np.array([summary(its) for its in blocks]).T.tolist() for kind, blocks in found.items()}
    return {kind: dict(zip(NUMBERS, table, strict=True)) for kind, table in tables.items()}


def summary(matrices: list) -> list:
    """NUMBERS of the matrices of one block and type."""
    if not matrices:
        return [np.nan] * len(NUMBERS)
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
    rate = 2 * max(mu, 1e-12)  # without decay 1 + (q + ‖a⋆‖²/2d) t
    return np.exp(-rate * t) - (NOISE + TARGET**2 / 2) * np.expm1(-rate * t) / rate


@cache
def simulate(mu: float) -> dict:
    """{"time": 2λt, "mean": ‖γ‖²/d, mean over 32 vectors of d = 64, "bound"}: lists."""
    t = np.arange(round(END / DT) + 1) * DT
    mean = [np.square(gain).mean() for _, (gain, _) in zip(t, process(mu, DT, (32, 64)), strict=False)]
    found = {"time": 2 * DECAY * t, "mean": np.array(mean), "bound": bound(mu, t)}
    return {key: values[::10].tolist() for key, values in found.items()}


def decays(model, saved: dict) -> tuple:
    """({type of MATRICES: weight decay of the gain before it}, 2λt of the matrices at the end of the run, t = the sum
    of its learning rates); `saved`: the settings of its training. ({}, nan) without."""
    if not saved:
        return {}, np.nan
    config = TrainConfig(**{f.name: saved[f.name] for f in fields(TrainConfig) if f.name in saved})
    groups = make_groups(model, config)
    matrices = next(group for group in groups if group["role"] == "vo")
    gains = [group for group in groups if group["role"] in ("gain_in", "gain_out")]
    decay = {name.rpartition(".")[0]: group["weight_decay"] for group in gains for name, _ in group["params"]}
    steps = range(0, config.max_iters, max(1, config.max_iters // 1000))
    t = np.mean([lr_at(step, config, matrices) for step in steps] or [0]) * config.max_iters
    its = {MATRICES[name.split(".")[-1]]: decay[slot] for name, slot, *_ in scaled_matrices(model)}
    return its, 2 * matrices["weight_decay"] * float(t)


def measure_preconditioner(model, batches, run):
    if model.config.sigma_reparam:
        raise NotApplicable("σReparam divides W by a norm of it, which the paper's preconditioner does not know")
    if not list(scaled_matrices(model)):
        raise NotApplicable("no scale vector before a matrix of the blocks")
    of_gains, time = decays(model, run.train_config)
    found = {"types": precondition(model, compute_gradients(model, batches)), "decay": of_gains, "time": time}
    return found | {"process": {"without decay": simulate(0.0), "with decay": simulate(DECAY)}}


@register("preconditioner", measure_preconditioner, tokens=4096, over_training=True)
def draw_preconditioner(measured):
    """Scale vectors as preconditioners of the matrices after them, and their growth (scale vectors, eq. 30)."""
    last, (eigenvalues, at_end, sizes, conditions, update, growth) = measured[-1], ([] for _ in range(6))
    for kind, its in last["types"].items():
        color, decay = COLORS[kind], f", decay {last['decay'][kind]:g}" if last["decay"] else ""
        means = {key: np.ma.masked_invalid([m["types"][kind][key] for m in measured]).mean(1) for key in its}
        eigenvalues.append(by_block(its["high"], color=color, label=kind))
        eigenvalues.append(by_block(its["low"], "--", color=color))
        sizes.append(over_steps(measured, means["gain"], color=color, label=kind + decay))
        conditions.append(over_steps(measured, means["condition"], color=color))
        for key, style in (("trained", "o-"), ("fixed", "--")):
            at_end.append(by_block(its[key], style, color=color))
            update.append(over_steps(measured, means[key], style, color=color))
    for (name, found), color in zip(last["process"].items(), ("C3", "C0"), strict=True):
        growth.append(line(found["time"], found["mean"], "-", color=color, label=f"γ {name}"))
        growth.append(line(found["time"], found["bound"], ":", color=color, label="bound of eq. 30"))
    ends = f"\nthe run's schedule ends at 2λt = {last['time']:.2g}" if last["decay"] else ""
    upper = [Panel("eigenvalues of P (medians):\nγ² (dashed), γ² + ‖w‖²", "block", eigenvalues, log="y")]
    upper += [Panel("‖ΔV‖ / ‖∂L/∂V‖,\nγ held fixed: dashed", "block", at_end), Panel("mean γ²", "step", sizes)]
    lower = [Panel("condition number of P", "step, mean over blocks", conditions, log="y")]
    lower += [Panel("‖ΔV‖ / ‖∂L/∂V‖", "step, mean over blocks", update)]
    lower += [Panel(f"‖γ‖² / d, simulated{ends}", "2λt, t = sum of learning rates", growth, log="y")]
    return [upper, lower]
