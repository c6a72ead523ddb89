"""The residual stream and the attention logits, measured and drawn: after LNS (arXiv 2502.05795). What the paper leaves
open, and what we chose: docs/analysis.md."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import SymLogNorm
from matplotlib.ticker import MaxNLocator

from layers.ops import upcast
from model import Transformer
from nanodnt.generate import KVCache
from nanodnt.run.tracking import probe, watch
from studies.analysis.figure import (
    BRANCHES,
    dark_to_light,
    make_panels,
    plot_by_block,
    plot_over_steps,
    register,
    rows_of,
)
from studies.analysis.runs import WINDOW, pick_evenly, target_shares

JACOBIAN_LABELS = {"deviation": "‖J−I‖/√C", "off_diagonal": "off-diagonal share"}


class Moments:
    """`mean` and `variance` of all elements of what is added, part by part; 0 of nothing. The variance divides by their
    number `n`."""

    def __init__(self):
        self.n, self.mean, self.variance = 0, 0.0, 0.0

    def add(self, x: torch.Tensor) -> None:
        x = upcast(x)
        mean, variance = x.mean().item(), x.var(correction=0).item()
        n = self.n + x.numel()
        share, shift = x.numel() / n, mean - self.mean
        self.variance += share * (variance - self.variance) + share * (1 - share) * shift**2
        self.n, self.mean = n, self.mean + share * shift


@torch.no_grad()
def collect_streams(model: Transformer, inputs: torch.Tensor) -> list:
    """L + 1 CPU tensors (B, T, C): the stream that enters block 1, and the stream after each block; the last of them
    is before the final norm."""
    found = []
    first = [(model.blocks[0], lambda args, y: found.append(args[0].cpu()))]
    with watch(first + [(block, lambda args, y: found.append(y.cpu())) for block in model.blocks]):
        model.stream(inputs)
    return found


# ---------------------------------------------------------------------------------------------------- variance


def stream_variance(model: Transformer, batches) -> dict:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: stream_var and branch_var of the tracker, mean over all tokens;
    "stream_global" [L + 1]: variance over all elements of the stream."""
    sums, whole, n = 0.0, [Moments() for _ in range(len(model.blocks) + 1)], 0
    for inputs, _ in batches:
        found, streams = probe(model, inputs), collect_streams(model, inputs)
        tokens = streams[0][..., 0].numel()
        values = found["stream_var"] + found["branch_var"]["attn"] + found["branch_var"]["mlp"]
        sums, n = sums + tokens * torch.stack(values).double().cpu(), n + tokens
        for moments, x in zip(whole, streams, strict=True):
            moments.add(x)
    stream, attn, mlp = (sums / n).split([len(whole), len(model.blocks), len(model.blocks)])
    found = {"stream": stream.tolist(), "attn": attn.tolist(), "mlp": mlp.tolist()}
    return {**found, "stream_global": [moments.variance for moments in whole]}


@register("variance", lambda model, batches, run: stream_variance(model, batches), tokens=8192, over_training=True)
def draw_variance(results):
    """Variance of the residual stream after each block, over training (LNS, Figs. 4, 8, 9)."""
    figure, axes = make_panels(len(results), 2, 2.5, sharey="col")
    for (stream, branches), measured in rows_of(axes, results):
        for m, color in zip(measured, dark_to_light(len(measured)), strict=True):
            plot_by_block(stream, m["stream"], first=0, color=color, label=f"step {m['step']}")
        plot_by_block(stream, m["stream_global"], "k:", first=0, label="over all elements")
        for branch, label in BRANCHES.items():
            plot_by_block(branches, m[branch], label=label)
        stream.set(xlabel="after block (0: what enters the first)", ylabel="variance", yscale="log")
        branches.set(xlabel="block", ylabel="variance", yscale="log")
    axes[0, 0].set_title("residual stream")
    axes[0, 1].set_title("branch outputs, as they are added (at the end)")
    axes[0, 0].legend(ncols=2)
    axes[0, 1].legend()
    return figure


# -------------------------------------------------------------------------------------------- angular distance


def token_angles(streams: list) -> torch.Tensor:
    """(n, n, tokens): arccos(cosine) / π between each two of n streams (B, T, C): 0 = same direction, 0.5 = orthogonal,
    1 = opposite (LNS eq. 1)."""
    unit = F.normalize(torch.stack(streams).flatten(1, 2).double(), dim=-1, eps=1e-300)
    return torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1).arccos() / math.pi


def angular_distance(model: Transformer, batches) -> list:
    """d[a][b]: mean of `token_angles` between the L + 1 streams of the model, over all tokens."""
    total, n = 0.0, 0
    for inputs, _ in batches:
        angles = token_angles(collect_streams(model, inputs))
        total, n = total + angles.sum(-1), n + angles.shape[-1]
    return (total / n).fill_diagonal_(0.0).tolist()  # on the diagonal there is only rounding


@register("angular", lambda model, batches, run: {"distance": angular_distance(model, batches)}, tokens=8192)
def draw_angular(results):
    """Angular distance between the inputs of blocks ℓ and ℓ + n (LNS, Figs. 2, 3, 7)."""
    columns = min(3, len(results))
    figure, axes = make_panels(-(-len(results) // columns), columns, 3.0)
    for ax, (name, (*_, last)) in zip(axes.flat, results.items(), strict=False):
        d = np.array(last["distance"])
        blocks, edges = len(d) - 1, (0.5, len(d) - 0.5)
        shown = [[d[i, i + n] if i + n <= blocks else math.nan for i in range(blocks)] for n in range(1, blocks + 1)]
        image = ax.imshow(shown, cmap="viridis_r", vmin=0, vmax=1, origin="lower", extent=edges * 2, aspect="auto")
        ax.grid(False)
        ax.set(title=name, xlabel="ℓ", ylabel="n")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    for ax in axes.flat[len(results) :]:
        ax.set_visible(False)
    figure.colorbar(image, ax=axes, label="d(ℓ, ℓ + n) = arccos(cosine) / π", shrink=0.8)
    return figure


# ----------------------------------------------------------------------------------------------------- removal


@torch.no_grad()
def removal_drop(model: Transformer, batches) -> dict:
    """{"loss": mean loss over the targets of `batches`, [(inputs, targets), …], "drop": [how much higher it is with
    block ℓ deleted]}, and of images {"top1": share whose class has the largest logit, "top1_drop": [how much lower it
    is]}. The other blocks keep their constants, such as LNS's 1/√ℓ (LNS)."""

    def measure():
        """Mean loss, and where the model returns logits top-1."""
        total = [0.0, 0.0]
        for batch, share in zip(batches, shares, strict=True):
            (logits, loss), targets = model(*batch), batch[1]
            hits = math.nan if logits is None else (logits.argmax(-1) == targets).sum() / (targets != -1).sum()
            total = [t + share * float(value) for t, value in zip(total, (loss, hits), strict=True)]
        return total

    shares = target_shares(batches)
    blocks, (loss, top1), without = model.blocks, measure(), []
    try:
        for i in range(len(blocks)):
            model.blocks = torch.nn.ModuleList([*blocks[:i], *blocks[i + 1 :]])
            without.append(measure())
    finally:
        model.blocks = blocks
    found = {"loss": loss, "drop": [other - loss for other, _ in without]}
    return found if math.isnan(top1) else found | {"top1": top1, "top1_drop": [top1 - other for _, other in without]}


@register("removal", lambda model, batches, run: removal_drop(model, batches), tokens=32768)
def draw_removal(results):
    """Rise of the loss, of images also fall of top-1, when one block is deleted (LNS, Figs. 2, 3, 7)."""
    panels = [("drop", "loss", "loss above the full model's, nats", "{:.3f}")]
    if any("top1" in m[-1] for m in results.values()):
        panels.append(("top1_drop", "top1", "top-1 below the full model's", "{:.1%}"))
    figure, (axes,) = make_panels(1, len(panels), 3.0)
    for ax, (key, whole, label, text) in zip(axes, panels, strict=True):
        for i, (name, (*_, last)) in enumerate(results.items()):
            if key in last:
                x = np.arange(1, len(last[key]) + 1) + 0.8 * ((i + 0.5) / len(results) - 0.5)
                how = dict(color=f"C{i}", label=f"{name}, full {text.format(last[whole])}")
                ax.bar(x, last[key], 0.8 / len(results), **how)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(xlabel="deleted block", ylabel=label)
        ax.legend()
    return figure


# ---------------------------------------------------------------------------------------------------- Jacobian


def residual_jacobian(model: Transformer, batches, positions: list, block: int, branch: str) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the sequences (LNS Fig. 5).

    x enters and y leaves the residual sub-layer `branch` ("attn" or "mlp") of block `block`, counted from 0. Both are
    of the same token. The others that it sees, those before it or all of an image, are held fixed: their keys and
    values are put in a cache, so that C copies of the token give all rows in one backward pass."""
    module, total = getattr(model.blocks[block], branch), 0.0
    for (sequence, rope), t in zip(sequences_entering(module, model, batches), map(int, positions), strict=True):
        context, channels = (), torch.arange(sequence.shape[-1], device=sequence.device)
        if branch != "mlp":  # the FFN looks at no other token
            others = sequence[:t] if model.config.causal else torch.cat((sequence[:t], sequence[t + 1 :]))
            cache, spans = KVCache(len(others) + 1), (slice(t), slice(t, t + 1))
            before, here = (rope and tuple(angle[span] for angle in rope) for span in spans)
            if len(others):
                with torch.no_grad():
                    module(others[None], before, cache)
                cache.k, cache.v = (kv.repeat(len(channels), 1, 1, 1) for kv in (cache.k, cache.v))
            context = here, cache
        with torch.enable_grad():
            copies = sequence[t].expand(len(channels), 1, -1).clone().requires_grad_()  # (C, 1, C)
            y = module(copies, *context)
            (rows,) = torch.autograd.grad(y[channels, 0, channels].sum(), copies)
        total = total + rows[:, 0]
    return (total / len(positions)).cpu()


def sequences_entering(module: torch.nn.Module, model: Transformer, batches):
    """(x (T, C), the rotation of its positions or None) of each sequence as it enters `module` of the model."""
    for inputs, _ in batches:
        seen = []
        with torch.no_grad(), watch([(module, lambda args, y, seen=seen: seen.extend(args))]):
            model.stream(inputs)
        for sequence in seen[0]:
            yield sequence, seen[1] if len(seen) > 1 else None


def jacobian_statistics(jacobian: torch.Tensor) -> dict:
    """{"deviation": ‖J − I‖ / √C in the Frobenius norm, "off_diagonal": share of Σ J² that is off the diagonal}."""
    j = jacobian.double()
    energy, diagonal = j.square().sum().item(), j.diagonal().square().sum().item()
    deviation = (j - torch.eye(len(j), dtype=j.dtype)).norm().item() / len(j) ** 0.5
    return {"deviation": deviation, "off_diagonal": 1 - diagonal / energy if energy else math.nan}


def measure_jacobian(model, batches, run):
    positions = torch.randint(batches.length, (len(batches.starts),), generator=run.generator()).tolist()
    width, blocks = model.config.n_embd, len(model.blocks)
    channels = [i * width // min(64, width) for i in range(min(64, width))]
    shown, maps, layers = pick_evenly(list(range(blocks)), 3), {}, {"attn": [], "mlp": []}
    for branch, statistics in layers.items():
        for block in range(blocks):
            jacobian = residual_jacobian(model, batches, positions, block, branch)
            statistics.append(jacobian_statistics(jacobian))
            if block in shown:
                part = jacobian[channels][:, channels].tolist()
                maps.setdefault(branch, []).append({"block": block + 1, "map": part})
    return {"positions": positions, "channels": channels, "maps": maps, "layers": layers}


@register("jacobian", measure_jacobian, tokens=2048, window=WINDOW)
def draw_jacobian(results):
    """Jacobian of residual sub-layers, averaged over one token of each window (LNS, Fig. 5)."""
    most = max(len(m[-1]["maps"]["attn"]) for m in results.values())
    figure, axes = make_panels(2 * len(results), most + 1, 1.9)
    for rows, (name, (*_, last)) in zip(axes.reshape(-1, 2, most + 1), results.items(), strict=True):
        for (*panels, curves), (branch, label) in zip(rows, BRANCHES.items(), strict=True):
            statistics, maps = last["layers"][branch], last["maps"][branch]
            for ax, shown in zip(panels, maps, strict=False):
                image = ax.imshow(shown["map"], cmap="RdBu_r", norm=SymLogNorm(0.01, vmin=-1, vmax=1))
                ax.grid(False)
                deviation = statistics[shown["block"] - 1]["deviation"]
                ax.set_title(f"block {shown['block']}: ‖J−I‖/√C {deviation:.2f}", fontsize=8)
                ax.set(xticks=[], yticks=[])
            for ax in panels[len(maps) :]:
                ax.set_visible(False)
            panels[0].set_ylabel(f"{name}\n{label}")
            for key, style in (("deviation", "o-"), ("off_diagonal", "s--")):
                plot_by_block(curves, [s[key] for s in statistics], style, label=JACOBIAN_LABELS[key])
            curves.set_ylim(bottom=0)
            curves.set_xlabel("block")
    axes[0, -1].legend()
    figure.colorbar(image, ax=axes[:, :-1], label="∂y/∂x", shrink=0.5, aspect=40)
    return figure


# -------------------------------------------------------------------------------------------- attention logits


def largest_logits(model: Transformer, batches) -> list:
    """[L]: logit_max of the tracker, over all tokens."""
    found = [torch.stack(probe(model, inputs)["logit_max"]) for inputs, _ in batches]
    return torch.stack(found).amax(0).tolist()


@register(
    "logits", lambda model, batches, run: {"layers": largest_logits(model, batches)}, tokens=8192, over_training=True
)
def draw_logits(results):
    """Largest attention logit of each block."""
    figure, ((left, right),) = make_panels(1, 2, 2.8)
    for i, (name, measured) in enumerate(results.items()):
        plot_by_block(left, measured[-1]["layers"], label=name)
        plot_over_steps(right, measured, [max(m["layers"]) for m in measured], label=name, color=f"C{i}")
    left.set(xlabel="block", ylabel="largest |q·k| / √head_dim", title="at the end", yscale="log")
    right.set(xlabel="step", title="over training, the largest of all blocks", yscale="log")
    left.legend()
    return figure
