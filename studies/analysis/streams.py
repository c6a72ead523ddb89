"""The residual stream and the attention logits, measured and drawn: after LNS (arXiv 2502.05795). What the paper leaves
open, and what we chose: docs/analysis.md."""

import math
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import SymLogNorm

from layers.ops import upcast
from layers.slot import CENTRES
from model import Attention, Transformer
from nanodnt.generate import KVCache
from nanodnt.run.tracking import probe, watch
from nanodnt.weights import without_block
from studies.analysis.figure import BRANCHES, Panel, by_block, over_steps, register, shades
from studies.analysis.runs import WINDOW, pick_evenly, target_shares

THEORY = dict(pre_norm="both", mid_norm="none", post_norm="none", post_norm_blocks=0, branch_scale="none", fixup=False)
THEORY |= dict(lns_power=0.5, lns_branches="both", lns_learn=False)  # what the theory is about: Pre-LN, and LNS
MAX_UNIT = 1 << 24  # numbers that `token_angles` holds at a time, in float64: 128 MiB, and a copy or two


@torch.no_grad()
def walk(model: Transformer, batches, modules, note):
    """Of each batch, a list: what note(*inputs) returns of each module, in the forward's order, final norm last."""
    for inputs, _ in batches:
        found = []
        with watch([(module, lambda args, y, found=found: found.append(note(*args))) for module in modules]):
            model.final_norm(model.stream(inputs))
        yield found


def collect_streams(model: Transformer, batches):
    """Of each batch L + 1 CPU tensors (B, T, C): the stream into block 1 and after each, before the final norm."""
    return walk(model, batches, [*model.blocks, model.final_norm], lambda x, *_: x.cpu())


def moments(x: torch.Tensor, *_) -> tuple:
    """(number, mean, variance) of the elements of x. The variance divides by their number."""
    variance, mean = torch.var_mean(upcast(x), correction=0)
    return x.numel(), mean.item(), variance.item()


def joint_variance(parts: list) -> float:
    """The variance of all elements of several tensors, of which `parts` has the `moments`."""
    n, mean, variance = np.array(parts, float).T
    shift = mean - np.average(mean, weights=n)
    return float(np.average(variance + shift**2, weights=n))


def theory_curves(config, variance: list) -> dict:
    """How σ², the variance of the stream after blocks 1 … L, grows by the theory of LNS: lists [L] from `variance` [L].
    "Θ(L)": the lower bound of eqs. 7 and 14; "law": eqs. 6 and 13, σ₁² Π (1 + u), with u = c / (s σ) of each block, σ
    that of the stream into it, s = 1, or for LNS √ℓ; "lower bound": σ₁² exp Σ (u − u²/2), below eq. 34 and in eq. 56;
    "upper bound": σ₁² (1 + c / σ₁)ᵏ after k blocks more, eq. 33 with eq. 34's 1/σ, or for LNS Θ(ℓ^(2−ε)), eq. 14, at
    its smallest ε, 1/2. The paper has c = 1, leaves Θ's constants open, and starts at the embedding. Ours start after
    block 1, which often raises the variance many times, and all but "lower bound" pass through the measured value after
    block 2 [I]. {} for other layouts, and where block 2 does not raise the variance."""
    about = config.norm in CENTRES and config.lns in ("off", "norm")
    about &= all(getattr(config, flag) == value for flag, value in THEORY.items())
    if not about or len(variance) < 2 or not 0 < variance[0] < variance[1]:
        return {}
    x, (start, second, *_), block = np.array(variance), variance, np.arange(1, len(variance) + 1)
    u, upper = (second / start - 1) * np.sqrt(start / x[:-1]), start * (second / start) ** (block - 1.0)
    if config.lns == "norm":
        u, power = u * np.sqrt(2 / block[1:]), (block + 1) ** 1.5  # x_ℓ is what leaves block ℓ − 1
        upper = start + (second - start) * (power - power[0]) / (power[1] - power[0])
    law, lower = (start * np.exp(np.append(0, np.cumsum(steps))) for steps in (np.log1p(u), u - u**2 / 2))
    linear = start + (second - start) * (block - 1)
    curves = {"Θ(L)": linear, "lower bound": lower, "law": law, "upper bound": upper}
    return {name: curve.tolist() for name, curve in curves.items()}


def stream_variance(model: Transformer, batches, run=None) -> dict:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: stream_var and branch_var of the tracker, mean over all tokens;
    "stream_global" [L + 1]: variance over all elements of the stream; "theory": of `theory_curves`."""
    depth, rows, found = len(model.blocks), [], []
    for inputs, _ in batches:
        its = probe(model, inputs)
        rows.append(len(inputs))
        found.append(torch.stack([*its["stream_var"], *its["branch_var"]["attn"], *its["branch_var"]["mlp"]]).tolist())
    means = np.average(found, 0, rows).tolist()
    whole = zip(*walk(model, batches, [*model.blocks, model.final_norm], moments), strict=True)
    parts = {"stream": means[: depth + 1], "attn": means[depth + 1 : -depth], "mlp": means[-depth:]}
    theory = theory_curves(model.config, parts["stream"][1:])
    return parts | {"stream_global": [joint_variance(its) for its in whole], "theory": theory}


@register("variance", stream_variance, tokens=8192, over_training=True)
def draw_variance(measured):
    """Variance of the residual stream after each block, over training (LNS, Figs. 4, 8, 9)."""
    last, streams = measured[-1], []
    for m, color in zip(measured, shades(len(measured)), strict=True):
        streams.append(by_block(m["stream"], first=0, color=color, label=f"step {m['step']}"))
    streams.append(by_block(last["stream_global"], "k:", first=0, label="over all elements"))
    branches = [by_block(last[branch], label=label) for branch, label in BRANCHES.items()]
    blocks, theory = last["stream"][1:], []
    for (name, curve), style in zip(last["theory"].items(), ("k:", "C0--", "C2-", "C3--"), strict=False):
        near = [v if min(blocks) / 10 < v < 10 * max(blocks) else math.nan for v in curve]
        theory.append(by_block(near, style, label=name))
    title = "at the end, beside LNS's theory" if theory else "at the end: a case outside\nLNS's theory"
    panels = [Panel("residual stream", "after block (0: what enters the first)", streams, "variance", log="y")]
    panels += [Panel("branch outputs, as they are added (at the end)", "block", branches, log="y")]
    return [[*panels, Panel(title, "after block", [*theory, by_block(blocks, "ko-", label="measured")], log="y")]]


def token_angles(streams: list) -> torch.Tensor:
    """(n, n, tokens): arccos(cosine) / π between each two of n streams (…, C): 0 = same direction, 0.5 = orthogonal,
    1 = opposite (LNS eq. 1)."""
    unit = F.normalize(torch.stack(streams).flatten(1, -2).double(), dim=-1, eps=1e-300)
    return torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1).arccos() / math.pi


def angular_distance(model: Transformer, batches) -> list:
    """d[a][b]: mean of `token_angles` between the L + 1 streams of the model, over all tokens, some at a time."""
    total, count = 0.0, 0
    for streams in collect_streams(model, batches):
        some = max(1, MAX_UNIT // (len(streams) * streams[0].shape[-1]))
        for part in zip(*(x.flatten(0, 1).split(some) for x in streams), strict=True):
            total, count = total + token_angles(part).sum(-1), count + len(part[0])
    return (total / count).fill_diagonal_(0.0).tolist()  # on the diagonal there is only rounding


def measure_angular(model, batches, run=None):
    """{"distance", "summary": shares of the blocks}: of d(ℓ, ℓ + 1), from what enters a block to what leaves it, two
    numbers as LNS quotes them: nearly half below 0.2 in Qwen3-8B (sec. 2.1), most above 0.6 with LNS (sec. 5.5)."""
    distance = angular_distance(model, batches)
    steps = np.array(distance).diagonal(1)
    shares = {"below 0.2": float((steps < 0.2).mean()), "above 0.6": float((steps > 0.6).mean())}
    return {"distance": distance, "summary": shares}


def say_angular(found: dict) -> str:
    low, high = found["summary"].values()
    return f"d(ℓ, ℓ + 1) is below 0.2 in {low:.0%} of the blocks, above 0.6 in {high:.0%}"


@register("angular", measure_angular, tokens=8192, says=say_angular)
def draw_angular(measured):
    """Angular distance between the inputs of blocks ℓ and ℓ + n (LNS, Figs. 2, 3, 7)."""
    d = np.array(measured[-1]["distance"])
    blocks, edges = len(d) - 1, (0.5, len(d) - 0.5)
    shown = [[d[i, i + n] if i + n <= blocks else math.nan for i in range(blocks)] for n in range(1, blocks + 1)]
    how = dict(cmap="viridis_r", vmin=0, vmax=1, origin="lower", extent=edges * 2, aspect="auto")
    title = "d(ℓ, ℓ + n) = arccos(cosine) / π"
    return [[Panel(title, "block ℓ", ylabel="n", paint=lambda ax: ax.imshow(shown, **how))]]


@torch.no_grad()
def removal_drop(model: Transformer, batches, run=None) -> dict:
    """{"loss": mean over the targets, "drop": [how much higher it is with block ℓ deleted]}, of images also {"top1":
    share whose class has the largest logit, "top1_drop": [how much lower]}. Other blocks keep LNS's constants."""

    def measure(gone):
        total = np.zeros(2)
        with without_block(model, gone):
            for batch, share in zip(batches, shares, strict=True):
                (logits, loss), targets = model(*batch), batch[1]
                hits = math.nan if logits is None else (logits.argmax(-1) == targets).sum() / (targets != -1).sum()
                total += share * np.array([float(loss), float(hits)])
        return total.tolist()

    shares = target_shares(batches)
    (loss, top1), *without = [measure(gone) for gone in (None, *range(1, len(model.blocks) + 1))]
    found = {"loss": loss, "drop": [other - loss for other, _ in without]}
    return found if math.isnan(top1) else found | {"top1": top1, "top1_drop": [top1 - other for _, other in without]}


@register("removal", removal_drop, tokens=32768)
def draw_removal(measured):
    """Rise of the loss, of images also fall of top-1, when one block is deleted (LNS, Figs. 2, 3, 7)."""
    last = measured[-1]
    panels = [Panel(f"loss above the full model's {last['loss']:.3f}, nats", "deleted block", [by_block(last["drop"])])]
    if "top1" in last:
        title = f"top-1 below the full model's {last['top1']:.1%}"
        panels.append(Panel(title, "deleted block", [by_block(last["top1_drop"])]))
    return [panels]


def token_functions(model: Transformer, batches, positions: list, modules: list):
    """Of each sequence b a list, for each of the residual sub-layers `modules`: (x (C,), function). x is the token at
    positions[b] as it enters, function(copies (n, 1, C), residual=True) → (n, 1, C) what leaves for so many variants of
    it, or without `residual` the branch output as it is added. The tokens that this one sees, those before it or all of
    an image, are held fixed: their keys and values are put in a cache."""
    entering = walk(model, batches, modules, lambda x, rope=None, *_: [(sequence, rope) for sequence in x])
    sequences = (its for found in entering for its in zip(*found, strict=True))
    for its, t in zip(sequences, map(int, positions), strict=True):
        pairs = zip(modules, its, strict=True)
        yield [(x[t], hold_others(module, x, rope, t, model.config.causal)) for module, (x, rope) in pairs]


def hold_others(module, sequence, rope, t: int, causal: bool):
    """The function of `token_functions` for token t of sequence (T, C)."""
    others = sequence[:t] if causal else torch.cat((sequence[:t], sequence[t + 1 :]))
    before, here = (rope and tuple(angle[span] for angle in rope) for span in (slice(t), slice(t, t + 1)))
    held = KVCache(len(others) + 1)
    if (looks := isinstance(module.f, Attention)) and len(others):  # the FFN looks at no other token
        with torch.no_grad():
            module(others[None], before, held)

    def function(copies, residual=True):
        cache, found = KVCache(held.size, held.length), []
        if held.k is not None:
            cache.k, cache.v = (kv.repeat(len(copies), 1, 1, 1) for kv in (held.k, held.v))
        with watch([(module.mid, lambda args, y: found.append(y))]):
            y = module(copies, here, cache) if looks else module(copies)
        return y if residual else found[0]

    return function


@torch.enable_grad()
def pull_back(function, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """rows (n, C) times the Jacobian ∂y[i]/∂x[j] of a `function` of `token_functions` at its x: one backward pass."""
    copies = x.expand(len(rows), 1, -1).clone().requires_grad_()
    return torch.autograd.grad(function(copies), copies, rows[:, None])[0][:, 0]


def residual_jacobian(model: Transformer, batches, positions: list, block: int, branch: str) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the sequences (LNS Fig. 5); x
    enters and y leaves the residual sub-layer `branch` ("attn" or "mlp") of block `block`, counted from 0."""
    tokens = token_functions(model, batches, positions, [getattr(model.blocks[block], branch)])
    jacobians = (pull_back(function, x, torch.eye(len(x)).to(x)) for ((x, function),) in tokens)
    return (sum(jacobians) / len(positions)).cpu()


def jacobian_statistics(jacobian: torch.Tensor) -> dict:
    """{"deviation": ‖J − I‖ / √C in the Frobenius norm, "off_diagonal": share of Σ J² that is off the diagonal}."""
    j = jacobian.double()
    energy, diagonal = j.square().sum().item(), j.diagonal().square().sum().item()
    deviation = (j - torch.eye(len(j), dtype=j.dtype)).norm().item() / len(j) ** 0.5
    return {"deviation": deviation, "off_diagonal": 1 - diagonal / energy if energy else math.nan}


def draw_positions(batches, run) -> list:
    """One random position in each sequence."""
    return torch.randint(batches.length, (len(batches.starts),), generator=run.generator()).tolist()


def measure_jacobian(model, batches, run):
    positions = draw_positions(batches, run)
    channels, blocks = pick_evenly(list(range(model.config.n_embd)), 64), range(len(model.blocks))
    maps, layers = ({branch: [] for branch in BRANCHES} for _ in range(2))
    for branch, block in product(BRANCHES, blocks):
        jacobian = residual_jacobian(model, batches, positions, block, branch)
        layers[branch].append(jacobian_statistics(jacobian))
        if block in pick_evenly(blocks, 3):
            maps[branch].append({"block": block + 1, "map": jacobian[channels][:, channels].tolist()})
    return {"positions": positions, "channels": channels, "maps": maps, "layers": layers}


@register("jacobian", measure_jacobian, tokens=2048, window=WINDOW)
def draw_jacobian(measured):
    """Jacobian of residual sub-layers, averaged over one token of each window (LNS, Fig. 5)."""
    rows, how = [], dict(cmap="RdBu_r", norm=SymLogNorm(0.01, vmin=-1, vmax=1))
    for branch, label in BRANCHES.items():
        row, statistics = [], measured[-1]["layers"][branch]
        for shown in measured[-1]["maps"][branch]:
            title = f"block {shown['block']}: ‖J−I‖/√C {statistics[shown['block'] - 1]['deviation']:.2f}"
            row.append(Panel(title, "", ylabel=label, paint=lambda ax, j=shown["map"]: ax.imshow(j, **how)))
        lines = [by_block([s["deviation"] for s in statistics], label="‖J−I‖/√C")]
        lines += [by_block([s["off_diagonal"] for s in statistics], "s--", label="off-diagonal share")]
        rows.append([*row, Panel("", "block", lines)])
    return rows


def largest_logits(model: Transformer, batches, run=None) -> dict:
    """{"layers": [L]}: logit_max of the tracker, over all tokens."""
    found = [torch.stack(probe(model, inputs)["logit_max"]) for inputs, _ in batches]
    return {"layers": torch.stack(found).amax(0).tolist()}


@register("logits", largest_logits, tokens=8192, over_training=True)
def draw_logits(measured):
    """Largest attention logit of each block."""
    at_end, largest = by_block(measured[-1]["layers"]), over_steps(measured, [max(m["layers"]) for m in measured])
    panels = [Panel("at the end", "block", [at_end], "largest |q·k| / √head_dim", log="y")]
    return [[*panels, Panel("over training, the largest of all blocks", "step", [largest], log="y")]]
