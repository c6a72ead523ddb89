"""Norms, DyT and scale vectors: the numbers behind their papers' figures.

    dyt_alphas                           DyT (arXiv 2503.10622) Fig. 8, sec. 6.3
    norm_scatter                         DyT Figs. 2, 4
    gain_statistics, qkv_cosines         scale vectors (2605.26895) Fig. 4, which the text that we have lacks [U]

DyT's 1/std is over all elements of the input [I]: the paper says of "the activations", which α treats "collectively".
In the norm scatter the published points are before the affine part; the fit and the spread of the tokens' RMS are our
additions [I].
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from layers.ops import upcast
from layers.slot import NORMALISE, Slot
from model import Transformer
from studies.analysis.gradients import parts_of
from studies.analysis.streams import Moments, watch_outputs

TANH_SLOPES = 1e-3, 1e2  # the tanh fit searches slope · rms(x) in this range


def norm_slots(model: Transformer) -> dict:
    """{name: Slot} of every norm on the residual path, in the order of the forward; QK-norm and DNP are not on it."""
    named = {"input_norm": model.input_norm}
    for i, block in enumerate(model.blocks):
        for branch, residual in (("attn", block.attn), ("mlp", block.mlp)):
            slots = {"pre": residual.pre, "mid": residual.mid, "post": residual.post}
            named |= {f"blocks.{i}.{branch}.{position}": slot for position, slot in slots.items()}
    return {name: slot for name, slot in {**named, "final_norm": model.final_norm}.items() if slot.norm != "none"}


@torch.no_grad()
def run_to_final_norm(model: Transformer, inputs: torch.Tensor) -> None:
    """The forward of `inputs` up to and including the final norm, which `model.stream` leaves out; no logits."""
    model.final_norm(model.stream(inputs))


# ----------------------------------------------------------------------------------------------- norms and DyT


@torch.no_grad()
def dyt_alphas(model: Transformer, inputs) -> list:
    """[{"slot": name, "alpha": α, "inv_std": 1 / std over all elements of the slot's input}] of every DyT, in the order
    of the forward (DyT Fig. 8)."""
    slots = {name: slot for name, slot in norm_slots(model).items() if slot.norm == "dyt"}
    seen = {name: Moments() for name in slots}
    with watch_outputs(slots, lambda name, args, output: seen[name].add(args[0])):
        for part in parts_of(model, inputs) if slots else ():
            run_to_final_norm(model, part)
    std = {name: moments.variance**0.5 for name, moments in seen.items()}
    return [
        {"slot": name, "alpha": float(slot.alpha), "inv_std": 1 / std[name] if std[name] else math.inf}
        for name, slot in slots.items()
    ]


@torch.no_grad()
def norm_scatter(model: Transformer, inputs, slot_name: str, n: int, generator: torch.Generator) -> dict:
    """What norm slot `slot_name` (a name of `norm_slots`) does to the elements of its input (DyT Figs. 2, 4).

    {"x", "y", "token", "channel": input, output before the affine part, index of the token in all inputs, and channel
    of at most n elements, drawn without replacement, of each part in proportion; "amplitude", "slope", "r2": their
    least-squares fit y ≈ A tanh(a x), a > 0; "linear_r2": of the line y ≈ c x; "token_rms_cv": standard deviation over
    mean of the RMS of all tokens' inputs}. ValueError for a name that is not there."""
    slots, seen, rms, points, done = norm_slots(model), [], Moments(), [], 0
    if slot_name not in slots:
        raise ValueError(f"{slot_name!r} is not a norm of the residual path: there are {', '.join(slots) or 'none'}")
    slot, rows = slots[slot_name], sum(len(part) for part in parts_of(model, inputs))
    for part in parts_of(model, inputs):
        with watch_outputs({slot_name: slot}, lambda name, args, output: seen.append(upcast(args[0]))):
            run_to_final_norm(model, part)
        x = seen.pop().flatten(0, 1)  # (tokens, C)
        y = NORMALISE[slot.norm](slot, x if slot.const_in == 1.0 else slot.const_in * x)
        most = n * (done + len(part)) // rows - n * done // rows
        chosen = torch.randperm(x.numel(), generator=generator, device=generator.device)[:most].sort().values
        token, channel = (i.to(x.device) for i in (chosen // x.shape[1], chosen % x.shape[1]))
        points.append([t.cpu() for t in (x[token, channel], y[token, channel], token + rms.n, channel)])
        rms.add(x.square().mean(-1).sqrt())
        done += len(part)
    xs, ys, token, channel = map(torch.cat, zip(*points, strict=True))
    return {
        "x": xs.tolist(),
        "y": ys.tolist(),
        "token": token.tolist(),
        "channel": channel.tolist(),
        **fit_tanh(xs.double().numpy(), ys.double().numpy()),
        "token_rms_cv": rms.variance**0.5 / rms.mean if rms.mean else math.nan,
    }


def fit_tanh(x: np.ndarray, y: np.ndarray) -> dict:
    """The least-squares fit y ≈ A tanh(a x), as "amplitude", "slope", "r2", and "linear_r2" of y ≈ c x.

    For each a the best A has a closed form; a is searched on a grid that narrows, within TANH_SLOPES / rms(x)."""
    size, spread = np.square(x).mean() ** 0.5, np.square(y - y.mean()).sum()
    if not size or not spread:
        return dict.fromkeys(("amplitude", "slope", "r2", "linear_r2"), math.nan)

    def fit(basis):
        factor = (basis @ y) / (basis @ basis)
        return np.square(y - factor * basis).sum(), factor

    low, high = np.log(np.array(TANH_SLOPES) / size)
    for _ in range(6):
        grid = np.linspace(low, high, 33)
        errors = [fit(np.tanh(np.exp(a) * x))[0] for a in grid]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    slope = math.exp(grid[best])
    error, amplitude = fit(np.tanh(slope * x))
    r2, linear_r2 = (float(1 - e / spread) for e in (error, fit(x)[0]))
    return {"amplitude": float(amplitude), "slope": slope, "r2": r2, "linear_r2": linear_r2}


# ----------------------------------------------------------------------------------------------- scale vectors


@torch.no_grad()
def gain_statistics(model: Transformer) -> dict:
    """{slot name: {"rms", "min", "max", "std"}} of the gain, as it acts, of every slot with more than one entry: norms
    of all kinds, LayerScale, Admin, HG, DP, DNP (scale vectors, Fig. 4)."""
    slots = {name: module for name, module in model.named_modules() if isinstance(module, Slot)}
    gains = {name: slot.gain_vector() for name, slot in slots.items()}
    return {name: vector_statistics(g) for name, g in gains.items() if g is not None and g.numel() > 1}


def vector_statistics(g: torch.Tensor) -> dict:
    """{"rms", "min", "max", "std"} of the entries of g; std divides by their number."""
    spread = {"min": g.min().item(), "max": g.max().item(), "std": g.std(correction=0).item()}
    return {"rms": g.square().mean().sqrt().item(), **spread}


@torch.no_grad()
def qkv_cosines(model: Transformer) -> list:
    """[{"qk", "qv", "kv": cosine between the gains that HG gives q, k and v}] by block; nan in a block without a pre
    norm (Mix-LN's first blocks); [] without HG (scale vectors, Fig. 4)."""
    found = []
    for block in model.blocks:
        gains = {part: getattr(block.attn.f, part).pre.gain_vector() for part in "qkv"}
        pairs = {a + b: (gains[a], gains[b]) for a, b in ("qk", "qv", "kv")}
        cosine = {ab: F.cosine_similarity(*pair, dim=0).item() for ab, pair in pairs.items() if pair[0] is not None}
        found.append({ab: cosine.get(ab, math.nan) for ab in pairs})
    return found if any(not math.isnan(cosines["qk"]) for cosines in found) else []
