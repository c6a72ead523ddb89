"""The residual stream and the attention logits, measured and drawn: after LNS (arXiv 2502.05795).
What the paper leaves open, and what we chose: docs/analysis.md."""

import math
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import SymLogNorm

from model import Attention, Transformer
from nanodnt.generate import KVCache
from nanodnt.run.tracking import probe, watch
from nanodnt.weights import without_block
from studies.analysis.figure import BRANCHES, Panel, by_block, over_steps, register, shades
from studies.analysis.runs import WINDOW, pick_evenly, target_shares


@torch.no_grad()
def walk(model: Transformer, batches, modules, note):
    """Of each batch, a list: what note(*inputs) returns of each module, in the forward's order,
    final norm last."""
    for inputs, _ in batches:
        found = []
        with watch(
            [(module, lambda args, y, found=found: found.append(note(*args))) for module in modules]
        ):
            model.final_norm(model.stream(inputs))
        yield found


def collect_streams(model: Transformer, batches):
    """Of each batch L + 1 CPU tensors (B, T, C): the stream into block 1 and after each, before the
    final norm."""
    return walk(model, batches, [*model.blocks, model.final_norm], lambda x, *_: x.cpu())


def stream_variance(model: Transformer, batches, run=None) -> dict:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: stream_var and branch_var of the tracker, mean
    over all tokens."""
    rows = []
    found = {"stream": [], "attn": [], "mlp": []}
    for inputs, _ in batches:
        probed = probe(model, inputs)
        rows.append(len(inputs))
        for name, variances in {"stream": probed["stream_var"], **probed["branch_var"]}.items():
            found[name].append(torch.stack(variances).tolist())
    return {name: np.average(variances, 0, rows).tolist() for name, variances in found.items()}


@register("variance", stream_variance, tokens=8192, over_training=True)
def draw_variance(measured):
    """Variance of the residual stream after each block, over training (LNS, Figs. 4, 8, 9)."""
    streams = []
    for m, color in zip(measured, shades(len(measured)), strict=True):
        streams.append(by_block(m["stream"], first=0, color=color, label=f"step {m['step']}"))
    branches = [by_block(measured[-1][branch], label=label) for branch, label in BRANCHES.items()]
    panels = [
        Panel(
            "residual stream",
            "after block (0: what enters the first)",
            streams,
            "variance",
            log="y",
        )
    ]
    panels += [Panel("branch outputs, as they are added (at the end)", "block", branches, log="y")]
    return [panels]


def token_angles(streams: list) -> torch.Tensor:
    """(n, n, tokens): arccos(cosine) / π between each two of n streams (…, C): 0 = same direction,
    0.5 = orthogonal, 1 = opposite (LNS eq. 1)."""
    unit = F.normalize(torch.stack(streams).flatten(1, -2).double(), dim=-1, eps=1e-300)
    return torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1).arccos() / math.pi


def angular_distance(model: Transformer, batches) -> list:
    """d[a][b]: mean of `token_angles` between the L + 1 streams of the model, over all tokens."""
    sequences = (
        sequence
        for streams in collect_streams(model, batches)
        for sequence in zip(*streams, strict=True)
    )
    angles = [token_angles(sequence).mean(-1) for sequence in sequences]
    # on the diagonal there is only rounding
    return torch.stack(angles).mean(0).fill_diagonal_(0.0).tolist()


def measure_angular(model, batches, run=None):
    return {"distance": angular_distance(model, batches)}


@register("angular", measure_angular, tokens=8192)
def draw_angular(measured):
    """Angular distance between the inputs of blocks ℓ and ℓ + n (LNS, Figs. 2, 3, 7)."""
    d = np.array(measured[-1]["distance"])
    blocks = len(d) - 1
    shown = np.full((blocks, blocks), math.nan)
    for n in range(1, blocks + 1):
        shown[n - 1, : blocks + 1 - n] = d.diagonal(n)
    edges = (0.5, blocks + 0.5)
    how = dict(cmap="viridis_r", vmin=0, vmax=1, origin="lower", extent=edges * 2, aspect="auto")
    title = "d(ℓ, ℓ + n) = arccos(cosine) / π"
    return [[Panel(title, "block ℓ", ylabel="n", paint=lambda ax: ax.imshow(shown, **how))]]


@torch.no_grad()
def removal_drop(model: Transformer, batches, run=None) -> dict:
    """{"loss": mean over the targets, "drop": [how much higher it is with block ℓ deleted]}, of
    images also {"top1": share whose class has the largest logit, "top1_drop": [how much lower]}.
    Other blocks keep LNS's constants."""
    shares = target_shares(batches)

    def measure():
        loss = top1 = 0.0
        for (inputs, targets), share in zip(batches, shares, strict=True):
            logits, its_loss = model(inputs, targets)
            loss += share * its_loss.item()
            if logits is not None:  # of images
                top1 += share * (logits.argmax(-1) == targets).double().mean().item()
        return loss, top1

    loss, top1 = measure()
    drop, top1_drop = [], []
    for block in range(1, len(model.blocks) + 1):
        with without_block(model, block):
            other_loss, other_top1 = measure()
        drop.append(other_loss - loss)
        top1_drop.append(top1 - other_top1)
    found = {"loss": loss, "drop": drop}
    return found if model.config.causal else found | {"top1": top1, "top1_drop": top1_drop}


@register("removal", removal_drop, tokens=32768)
def draw_removal(measured):
    """Rise of the loss, of images also fall of top-1, when one block is deleted (LNS, Figs. 2, 3,
    7)."""
    last = measured[-1]
    panels = [
        Panel(
            f"loss above the full model's {last['loss']:.3f}, nats",
            "deleted block",
            [by_block(last["drop"])],
        )
    ]
    if "top1" in last:
        title = f"top-1 below the full model's {last['top1']:.1%}"
        panels.append(Panel(title, "deleted block", [by_block(last["top1_drop"])]))
    return [panels]


def token_functions(model: Transformer, batches, positions: list, modules: list):
    """Of each sequence b a list, for each of the residual sub-layers `modules`: (x (C,), function).
    x is the token at positions[b] as it enters, function(copies (n, 1, C), residual=True) → (n, 1,
    C) what leaves for so many variants of it, or without `residual` the branch output as it is
    added. The tokens that this one sees, those before it or all of an image, are held fixed: their
    keys and values are put in a cache."""
    positions = iter(positions)
    for entering in walk(model, batches, modules, lambda x, rope=None, *_: (x, rope)):
        for b in range(len(entering[0][0])):
            t = int(next(positions))
            found = []
            for module, (x, rope) in zip(modules, entering, strict=True):
                found.append((x[b, t], hold_others(module, x[b], rope, t, model.config.causal)))
            yield found


@torch.no_grad()
def hold_others(module, sequence, rope, t: int, causal: bool):
    """The function of `token_functions` for token t of sequence (T, C)."""
    others = sequence[:t] if causal else torch.cat((sequence[:t], sequence[t + 1 :]))
    before, here = (
        rope and tuple(angle[span] for angle in rope) for span in (slice(t), slice(t, t + 1))
    )
    held = KVCache(len(others) + 1)
    looks = isinstance(module.f, Attention)  # the FFN looks at no other token
    if looks and len(others):
        module(others[None], before, held)

    def function(copies, residual=True):
        context = ()
        if looks:
            cache = KVCache(held.size, held.length)
            if len(others):
                cache.k, cache.v = (kv.repeat(len(copies), 1, 1, 1) for kv in (held.k, held.v))
            context = here, cache
        found = []
        with watch([(module.mid, lambda args, y: found.append(y))]):
            y = module(copies, *context)
        return y if residual else found[0]

    return function


@torch.enable_grad()
def pull_back(function, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """rows (n, C) times the Jacobian ∂y[i]/∂x[j] of a `function` of `token_functions` at its x."""
    products = []
    for part in rows.split(512):  # bounds memory
        copies = x.expand(len(part), 1, -1).clone().requires_grad_()
        products += torch.autograd.grad(function(copies), copies, part[:, None])
    return torch.cat(products)[:, 0]


def residual_jacobian(
    model: Transformer, batches, positions: list, block: int, branch: str
) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the
    sequences (LNS Fig. 5); x enters and y leaves the residual sub-layer `branch` ("attn" or "mlp")
    of block `block`, counted from 0."""
    tokens = token_functions(model, batches, positions, [getattr(model.blocks[block], branch)])
    jacobians = (pull_back(function, x, torch.eye(len(x)).to(x)) for ((x, function),) in tokens)
    return (sum(jacobians) / len(positions)).cpu()


def deviation(jacobian: torch.Tensor) -> float:
    """‖J − I‖ / √C, in the Frobenius norm."""
    return (jacobian.double() - torch.eye(len(jacobian))).norm().item() / len(jacobian) ** 0.5


def draw_positions(batches, run) -> list:
    """One random position in each sequence."""
    return torch.randint(batches.length, (len(batches.starts),), generator=run.generator()).tolist()


def measure_jacobian(model, batches, run):
    positions = draw_positions(batches, run)
    channels = pick_evenly(list(range(model.config.n_embd)), 64)
    blocks = range(len(model.blocks))
    maps, layers = ({branch: [] for branch in BRANCHES} for _ in range(2))
    for branch, block in product(BRANCHES, blocks):
        jacobian = residual_jacobian(model, batches, positions, block, branch)
        layers[branch].append({"deviation": deviation(jacobian)})
        if block in pick_evenly(blocks, 3):
            maps[branch].append(
                {"block": block + 1, "map": jacobian[channels][:, channels].tolist()}
            )
    return {"positions": positions, "channels": channels, "maps": maps, "layers": layers}


@register("jacobian", measure_jacobian, tokens=2048, window=WINDOW)
def draw_jacobian(measured):
    """Jacobian of residual sub-layers, averaged over one token of each window (LNS, Fig. 5)."""
    rows = []
    for branch, label in BRANCHES.items():
        row = []
        for shown in measured[-1]["maps"][branch]:
            row.append(
                Panel(
                    f"block {shown['block']}",
                    "",
                    ylabel=label,
                    paint=partial(paint_map, shown["map"]),
                )
            )
        deviations = [its["deviation"] for its in measured[-1]["layers"][branch]]
        rows.append([*row, Panel("‖J−I‖/√C", "block", [by_block(deviations)])])
    return rows


def paint_map(jacobian: list, ax):
    return ax.imshow(jacobian, cmap="RdBu_r", norm=SymLogNorm(0.01, vmin=-1, vmax=1))


def largest_logits(model: Transformer, batches, run=None) -> dict:
    """{"layers": [L]}: logit_max of the tracker, over all tokens."""
    found = [torch.stack(probe(model, inputs)["logit_max"]) for inputs, _ in batches]
    return {"layers": torch.stack(found).amax(0).tolist()}


@register("logits", largest_logits, tokens=8192, over_training=True)
def draw_logits(measured):
    """Largest attention logit of each block."""
    at_end = by_block(measured[-1]["layers"])
    largest = over_steps(measured, [max(m["layers"]) for m in measured])
    panels = [Panel("at the end", "block", [at_end], "largest |q·k| / √head_dim", log="y")]
    return [
        [*panels, Panel("over training, the largest of all blocks", "step", [largest], log="y")]
    ]
