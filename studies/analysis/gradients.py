"""Gradients and sharpness, measured and drawn: after DNT (arXiv 2507.17501) and Blockwise LR
(2502.19002). What the papers leave open, and what we chose: docs/analysis.md."""

import math

import numpy as np
import torch

from model import Transformer
from nanodnt.run.tracking import MATRICES, matrix_types
from studies.analysis.figure import TYPE_COLORS, Panel, by_block, line, over_steps, register
from studies.analysis.runs import target_shares

# the last: the share that the geometric mean leaves out
MEANS = ("arithmetic", "geometric", "zero_fraction")


def trained_parameters(model: Transformer) -> dict:
    """{name: parameter} of those with a gradient: all but the biases on the choice of experts,
    which no loss trains."""
    roles = model.roles()
    return {name: p for name, p in model.named_parameters() if roles[name] != "balance"}


@torch.enable_grad()
def sum_gradients(model: Transformer, losses) -> dict:
    """{parameter name: sum of the gradients of the `losses`, an iterable, on the model's
    device}."""
    parameters = trained_parameters(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for t, g in zip(total.values(), gradients, strict=True):
            t += g
    return total


def pool_by_type(tensors: dict, types: dict) -> dict:
    """{type: all entries of that type as one vector}; tensors: {name: tensor}, types: {name: type,
    of all or some}."""
    pooled = {}
    for name, t in tensors.items():
        if name in types:
            pooled.setdefault(types[name], []).append(t.flatten())
    return {kind: torch.cat(parts) for kind, parts in pooled.items()}


def compute_gradients(model: Transformer, batches) -> dict:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over targets, unclipped.
    ValueError if none."""
    shares = target_shares(batches)
    losses = (model(*batch)[1] * share for batch, share in zip(batches, shares, strict=True))
    return {name: g.cpu() for name, g in sum_gradients(model, losses).items()}


def tail_statistics(g: torch.Tensor) -> dict:
    """How heavy the tail of the entries of g is: "n", "rms", and whatever their scale "kurtosis", E
    g⁴ / (E g²)², Gaussian 3, and "max_over_rms" [I]. These two are nan where all entries are 0, or
    one is not finite."""
    # holds fourth powers of the smallest and the largest fp32 numbers
    g = g.detach().cpu().double()
    rms = g.square().mean().sqrt()
    kurtosis = (g / rms).pow(4).mean()
    return {
        "n": g.numel(),
        "rms": rms.item(),
        "kurtosis": kurtosis.item(),
        "max_over_rms": (g.abs().max() / rms).item(),
    }


def log_histogram(g: torch.Tensor, bins: int, low: float, high: float) -> dict:
    """Histogram of |g| over bins even in log from low to high: their edges; density, the share of
    all entries per unit of |g|; ccdf, the share at or above each edge."""
    edges = np.geomspace(low, high, bins + 1)
    a = np.sort(g.detach().abs().flatten().float().cpu().numpy())
    below = np.searchsorted(a, edges) / max(1, a.size)  # share of the entries below each edge
    density = np.diff(below) / np.diff(edges)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below).tolist()}


def measure_gradients(model, batches, run):
    pooled = pool_by_type(compute_gradients(model, batches), matrix_types(model))
    types = {}
    for kind in dict.fromkeys(MATRICES.values()):
        statistics = tail_statistics(pooled[kind])
        histogram = log_histogram(pooled[kind] / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        types[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {"types": types}


@register("gradients", measure_gradients, tokens=65536, table=("rms", "kurtosis", "max_over_rms"))
def draw_gradients(measured):
    """Gradient entries by type of matrix: density, and share beyond a size (DNT, Fig. 1)."""
    panels = []
    for size in ("|g|", "|g| / RMS"):
        densities, shares = [], []
        for kind, found in measured[-1]["types"].items():
            edges, density, ccdf = map(np.array, found["histogram_of_g_over_rms"].values())
            x = edges * (found["rms"] if size == "|g|" else 1)
            per_decade = density * np.diff(edges) / np.diff(np.log10(edges))
            densities.append(line(np.sqrt(x[1:] * x[:-1]), per_decade, "-", label=kind))
            shares.append(line(x, ccdf, "-"))
        panels.append(Panel("density per decade", size, densities, log="xy"))
        panels.append(Panel("share of larger ones", size, shares, log="xy"))
    return [panels]


def estimate_sharpness(model: Transformer, batches, draws: int, generator: torch.Generator) -> dict:
    """{parameter name: h, a CPU tensor of its shape}: the mean over `draws` of n g², with n = B·T
    tokens, or B images, and g the gradient of their mean loss on labels drawn from softmax(logits),
    at temperature 1 (Blockwise LR eq. 3). An unbiased estimate of the diagonal of the mean loss's
    Gauss-Newton matrix: with such labels the gradients of different tokens are independent and have
    mean zero. The labels depend on the generator alone, of any device."""
    counts = []  # of labels in each batch
    h = dict.fromkeys(trained_parameters(model), 0.0)

    def losses():  # sums over the labels
        for inputs, _ in batches:
            x = model.stream(inputs)
            labels = sample_labels(model, x.detach(), generator)
            counts.append(labels.numel())
            yield model.loss(x, labels) * labels.numel()

    for _ in range(draws):
        counts.clear()
        for name, s in sum_gradients(model, losses()).items():
            h[name] += s.square() / (sum(counts) * draws)  # n (s/n)²
    return {name: t.cpu() for name, t in h.items()}


@torch.no_grad()
def sample_labels(model: Transformer, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One label per token (B, T), or per image (B,), drawn from softmax(logits) of x (B, T, C)."""
    labels = []
    for sequence in x.split(1):  # the logits of all would be the largest tensor
        p = model.logits(sequence).softmax(-1).to(generator.device)
        labels.append(
            torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])
        )
    return torch.cat(labels).to(x.device)


def average_by_type(h: dict, types: dict) -> dict:
    """{type: {"arithmetic": mean over all n entries (Blockwise LR eq. 4), "geometric": over those
    that are not 0 [I] (App. A.1), "zero_fraction": the share that it leaves out, "n"}}; h: {name:
    tensor}, types: {name: type}."""
    found = {}
    for kind, values in pool_by_type(h, types).items():
        values = values.double()
        positive = values[values > 0]
        geometric = positive.log().mean().exp().item()
        zeros = 1 - len(positive) / len(values)
        found[kind] = dict(
            arithmetic=values.mean().item(), geometric=geometric, zero_fraction=zeros, n=len(values)
        )
    return found


def average_by_block(model: Transformer, h: dict) -> dict:
    """{type: {each of MEANS: [one per block]}} of `average_by_type`, nan for a block that lacks the
    type. Types: "all", all parameters of a block (Blockwise LR Fig. 7), and those that the blocks
    have."""
    types = model.block_types()
    blocks = []
    for i in range(len(model.blocks)):
        inside = {name: t for name, t in h.items() if name.startswith(f"blocks.{i}.")}
        blocks.append(
            average_by_type(inside, dict.fromkeys(inside, "all")) | average_by_type(inside, types)
        )
    missing = dict.fromkeys(MEANS, math.nan)
    kinds = [kind for kind in ("all", *TYPE_COLORS) if any(kind in its for its in blocks)]
    return {
        kind: {mean: [its.get(kind, missing)[mean] for its in blocks] for mean in MEANS}
        for kind in kinds
    }


def log10_density(values: torch.Tensor, bins: int) -> dict:
    """{"edges": of `bins` even bins, in log₁₀, "density": of the positive entries, per decade,
    integral 1} (Blockwise LR Fig. 2)."""
    logs = values[values > 0].double().log10().numpy()
    density, edges = np.histogram(logs, bins, density=True)
    return {"edges": edges.tolist(), "density": density.tolist()}


def compare_to_norm(types: dict, train_config: dict) -> None:
    """Add to `types`, of `average_by_type`, "ratio": S(Norm) / S(type) of arithmetic means, to
    which LR ratios are proportional by Blockwise LR sec. 5, Norm's own being 1; "geo_ratio": that
    of geometric means; "lr_ratio": in use by the run, nan without one. A ratio is nan without
    gains, inf over 0."""
    norm = dict(types.get("norm", dict.fromkeys(MEANS, math.nan)))
    for kind, its in types.items():
        for name, mean in (("ratio", "arithmetic"), ("geo_ratio", "geometric")):
            its[name] = norm[mean] / its[mean] if its[mean] else math.inf
        its["lr_ratio"] = train_config.get(f"lr_ratio_{kind}", math.nan)
        if not train_config.get("blockwise_lr", True):
            its["lr_ratio"] = 1.0


def measure_sharpness(model, batches, run):
    draws = run.config.draws
    types = model.block_types()
    h = estimate_sharpness(model, batches, draws, run.generator(run.device))
    for name, t in h.items():
        # 0: images have none
        if types[name] in ("emb", "head") and t.ndim > 1 and model.config.vocab_size:
            # the rows that pad the vocabulary belong to no token
            h[name] = t[: model.config.vocab_size]
    means = average_by_type(h, types)
    compare_to_norm(means, run.train_config)
    density = {kind: log10_density(values, 60) for kind, values in pool_by_type(h, types).items()}
    return {
        "draws": draws,
        "types": means,
        "layers": average_by_block(model, h),
        "log10_density": density,
    }


@register(
    "sharpness",
    measure_sharpness,
    tokens=4096,
    over_training=True,
    table=(*MEANS, "ratio", "geo_ratio", "lr_ratio"),
)
def draw_sharpness(measured):
    """Sharpness by block type and block: average, over training, density (Blockwise LR, Figs. 1-3,
    7)."""
    last = measured[-1]
    kinds = [kind for kind in TYPE_COLORS if kind in last["types"]]
    averages = [
        line(kinds, [last["types"][kind][mean] for kind in kinds], "o", label=mean)
        for mean in MEANS[:2]
    ]
    blocks = [by_block(last["layers"]["all"]["arithmetic"], "ko-", label="whole block")]
    training, densities = [], []
    for kind in kinds:
        color = TYPE_COLORS[kind]
        means = [m["types"][kind]["arithmetic"] for m in measured]
        training.append(over_steps(measured, means, color=color, label=kind))
        edges, density = map(np.array, last["log10_density"][kind].values())
        densities.append(line((edges[1:] + edges[:-1]) / 2, density, "-", color=color))
        if kind in last["layers"]:
            blocks.append(by_block(last["layers"][kind]["arithmetic"], color=color))
    upper = [Panel("mean h, the geometric without the zeros", "", averages, log="y")]
    upper += [Panel("arithmetic mean h over training", "step", training, log="y")]
    lower = [Panel("density of log₁₀ h, at the end", "log₁₀ h", densities)]
    lower += [Panel("arithmetic mean h by block, at the end", "block", blocks, log="y")]
    return [upper, lower]
