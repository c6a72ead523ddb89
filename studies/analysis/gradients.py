"""Gradients and sharpness, measured and drawn: after DNT (arXiv 2507.17501) and Blockwise LR
(2502.19002). Questions that the papers leave open, and our choices: docs/analysis.md."""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from model import Transformer
from nanodnt.run.tracking import MATRICES, matrix_types
from studies.analysis.figure import (
    TYPE_COLORS,
    Measured,
    Panel,
    PanelRows,
    by_block,
    line,
    over_steps,
    register,
)
from studies.analysis.runs import Batch, Batches, CheckpointedRun, target_shares

Tensors = dict[str, Tensor]  # {name of a parameter, or type: tensor}
Types = dict[str, str]  # {name of a parameter: type}
Means = dict[str, float]  # a statistic each

MEANS = ("arithmetic", "geometric", "zero_fraction")  # the geometric mean leaves out the zeros


def trained_parameters(model: Transformer) -> Tensors:
    """{name: parameter} without the biases on the choice of experts, which no loss trains."""
    roles = model.roles()
    return {name: p for name, p in model.named_parameters() if roles[name] != "balance"}


@torch.enable_grad()
def sum_gradients(model: Transformer, losses: Iterable[Tensor]) -> Tensors:
    """{parameter name: sum of the gradients of the losses, on the model's device}."""
    parameters = trained_parameters(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for t, g in zip(total.values(), gradients, strict=True):
            t += g
    return total


def pool_by_type(tensors: Tensors, types: Types) -> Tensors:
    """{type: all entries of that type as one vector}, of the tensors that have a type."""
    pooled = {}
    for name, t in tensors.items():
        if name in types:
            pooled.setdefault(types[name], []).append(t.flatten())
    return {kind: torch.cat(parts) for kind, parts in pooled.items()}


def compute_gradients(model: Transformer, batches: Iterable[Batch]) -> Tensors:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over targets, unclipped.
    ValueError without targets."""
    shares = target_shares(batches)
    losses = (model(*batch)[1] * share for batch, share in zip(batches, shares, strict=True))
    return {name: g.cpu() for name, g in sum_gradients(model, losses).items()}


def tail_statistics(g: Tensor) -> Means:
    """Statistics of the tail of g's entries: "n", "rms", and two that do not depend on their scale:
    "kurtosis", E g⁴ / (E g²)², Gaussian 3, and, our choice, "max_over_rms". These two are nan
    where all entries are 0, or one is not finite."""
    g = g.detach().cpu().double()  # its range holds fourth powers of any fp32 number
    rms = g.square().mean().sqrt()
    kurtosis = (g / rms).pow(4).mean()
    return {
        "n": g.numel(),
        "rms": rms.item(),
        "kurtosis": kurtosis.item(),
        "max_over_rms": (g.abs().max() / rms).item(),
    }


def log_histogram(g: Tensor, bins: int, low: float, high: float) -> dict[str, list[float]]:
    """Histogram of |g| over bins even in log from low to high: their edges; density, the share of
    all entries per unit of |g|; ccdf, the share at or above each edge."""
    edges = np.geomspace(low, high, bins + 1)
    a = np.sort(g.detach().abs().flatten().float().cpu().numpy())
    below = np.searchsorted(a, edges) / max(1, a.size)  # share of the entries below each edge
    density = np.diff(below) / np.diff(edges)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below).tolist()}


def measure_gradients(model: Transformer, batches: Batches, run: CheckpointedRun) -> Measured:
    pooled = pool_by_type(compute_gradients(model, batches), matrix_types(model))
    types = {}
    for kind in dict.fromkeys(MATRICES.values()):
        statistics = tail_statistics(pooled[kind])
        histogram = log_histogram(pooled[kind] / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        types[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {"types": types}


@register("gradients", measure_gradients, tokens=65536, table=("rms", "kurtosis", "max_over_rms"))
def draw_gradients(measured: list[Measured]) -> PanelRows:
    """Gradient entries by type of matrix: density, and share beyond a size (DNT, Fig. 1)."""
    panels = []
    for size in ("|g|", "|g| / RMS"):
        densities = []
        shares = []
        for kind, tail in measured[-1]["types"].items():
            edges, density, ccdf = map(np.array, tail["histogram_of_g_over_rms"].values())
            x = edges * tail["rms"] if size == "|g|" else edges
            per_decade = density * np.diff(edges) / np.diff(np.log10(edges))
            densities.append(line(np.sqrt(x[1:] * x[:-1]), per_decade, "-", label=kind))
            shares.append(line(x, ccdf, "-", label=kind))
        panels.append(Panel("density per decade", size, densities, log="xy"))
        panels.append(Panel("share of larger ones", size, shares, log="xy"))
    return [panels]


def estimate_sharpness(
    model: Transformer, batches: Iterable[Batch], draws: int, generator: torch.Generator
) -> Tensors:
    """{parameter name: h, a CPU tensor of its shape}: the mean over `draws` of n g², with n = B·T
    tokens, or B images, and g the gradient of their mean loss on labels drawn from softmax(logits),
    at temperature 1 (Blockwise LR eq. 3). An unbiased estimate of the diagonal of the mean loss's
    Gauss-Newton matrix: with such labels the gradients of different tokens are independent and have
    mean zero. The labels depend on the generator alone, of any device."""
    counts = []  # number of labels in each batch
    h = dict.fromkeys(trained_parameters(model), 0.0)

    def losses() -> Iterator[Tensor]:
        """Sums over the labels of each batch."""
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
def sample_labels(model: Transformer, x: Tensor, generator: torch.Generator) -> Tensor:
    """One label per token (B, T), or per image (B,), drawn from softmax(logits) of x (B, T, C)."""
    labels = []
    for sequence in x.split(1):  # the logits of all would be the largest tensor
        p = model.logits(sequence).softmax(-1).to(generator.device)
        drawn = torch.multinomial(p.flatten(0, -2), 1, generator=generator)
        labels.append(drawn.view(p.shape[:-1]))
    return torch.cat(labels).to(x.device)


def average_by_type(h: Tensors, types: Types) -> dict[str, Means]:
    """{type: {"arithmetic": mean over all n entries (Blockwise LR eq. 4), "geometric": mean over
    those that are not 0 (App. A.1; our choice), "zero_fraction": share of the zeros, "n"}}."""
    means = {}
    for kind, values in pool_by_type(h, types).items():
        values = values.double()
        positive = values[values > 0]
        means[kind] = {
            "arithmetic": values.mean().item(),
            "geometric": positive.log().mean().exp().item(),
            "zero_fraction": 1 - len(positive) / len(values),
            "n": len(values),
        }
    return means


def average_by_block(model: Transformer, h: Tensors) -> dict[str, dict[str, list[float]]]:
    """{type: {each of MEANS: [one per block]}} by `average_by_type`, nan for a block without the
    type. The types are those in the blocks, and "all", all parameters of a block (Blockwise LR Fig.
    7)."""
    types = model.block_types()
    blocks = []
    for i in range(len(model.blocks)):
        inside = {name: t for name, t in h.items() if name.startswith(f"blocks.{i}.")}
        all_in_one = average_by_type(inside, dict.fromkeys(inside, "all"))
        blocks.append(all_in_one | average_by_type(inside, types))
    missing = dict.fromkeys(MEANS, math.nan)
    means = {}
    for kind in ("all", *TYPE_COLORS):
        if any(kind in block for block in blocks):
            means[kind] = {}
            for mean in MEANS:
                means[kind][mean] = [block.get(kind, missing)[mean] for block in blocks]
    return means


def log10_density(values: Tensor, bins: int) -> dict[str, list[float]]:
    """{"edges": those of `bins` even bins, in log₁₀, "density": of the positive entries, per
    decade, integral 1} (Blockwise LR Fig. 2)."""
    logs = values[values > 0].double().log10().numpy()
    density, edges = np.histogram(logs, bins, density=True)
    return {"edges": edges.tolist(), "density": density.tolist()}


def compare_to_norm(types: dict[str, Means], train_config: dict[str, object]) -> None:
    """Add three ratios to the means of `average_by_type`.

    "ratio": S(Norm) / S(type) of arithmetic means, to which LR ratios are proportional by Blockwise
    LR sec. 5, with 1 for Norm; "geo_ratio": the same of geometric means. Both are nan without
    gains, inf over 0. "lr_ratio": the run's ratio of learning rates, nan without one."""
    norm = dict(types.get("norm", dict.fromkeys(MEANS, math.nan)))
    for kind, means in types.items():
        for name, mean in (("ratio", "arithmetic"), ("geo_ratio", "geometric")):
            means[name] = norm[mean] / means[mean] if means[mean] else math.inf
        means["lr_ratio"] = train_config.get(f"lr_ratio_{kind}", math.nan)
        if not train_config.get("blockwise_lr", True):
            means["lr_ratio"] = 1.0


def measure_sharpness(model: Transformer, batches: Batches, run: CheckpointedRun) -> Measured:
    draws = run.config.draws
    types = model.block_types()
    h = estimate_sharpness(model, batches, draws, run.generator(run.device))
    vocab_size = model.config.vocab_size  # 0 for images
    for name, t in h.items():
        if types[name] in ("emb", "head") and t.ndim > 1 and vocab_size:
            h[name] = t[:vocab_size]  # the rows that pad the vocabulary belong to no token
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
def draw_sharpness(measured: list[Measured]) -> PanelRows:
    """Sharpness by block type and block: average, over training, density (Blockwise LR, Figs. 1-3,
    7)."""
    last = measured[-1]
    kinds = [kind for kind in TYPE_COLORS if kind in last["types"]]
    averages = []
    for mean in ("arithmetic", "geometric"):
        values = [last["types"][kind][mean] for kind in kinds]
        averages.append(line(kinds, values, "o", label=f"{mean} mean"))
    blocks = [by_block(last["layers"]["all"]["arithmetic"], "o-", color="k", label="whole block")]
    training = []
    densities = []
    for kind in kinds:
        means = [m["types"][kind]["arithmetic"] for m in measured]
        training.append(over_steps(measured, means, label=kind))
        edges, density = map(np.array, last["log10_density"][kind].values())
        densities.append(line((edges[1:] + edges[:-1]) / 2, density, "-", label=kind))
        if kind in last["layers"]:
            blocks.append(by_block(last["layers"][kind]["arithmetic"], label=kind))
    upper = [
        Panel("mean h, the geometric without the zeros", "", averages, log="y"),
        Panel("arithmetic mean h over training", "step", training, log="y"),
    ]
    lower = [
        Panel("density of log₁₀ h, at the end", "log₁₀ h", densities),
        Panel("arithmetic mean h by block, at the end", "block", blocks, log="y"),
    ]
    return [upper, lower]
