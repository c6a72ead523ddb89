"""Gradients and sharpness, measured and drawn: after DNT (arXiv 2507.17501) and Blockwise LR (2502.19002). What the
papers leave open, and what we chose: docs/analysis.md."""

import math

import numpy as np
import torch

from layers.loss import LOGITS_BYTES
from model import Transformer
from nanodnt.run.tracking import MATRICES, matrix_types
from studies.analysis.figure import TYPE_COLORS, Panel, blocks_over_steps, by_block, line, over_steps, register
from studies.analysis.runs import target_shares

TAIL_STATISTICS = ("kurtosis", "max_over_rms", "p999_over_p50", "hill", "participation")
MEANS = ("arithmetic", "geometric", "zero_fraction")  # the last: the share that the geometric mean leaves out
RATIOS = {"arithmetic": "ratio", "geometric": "geo_ratio"}  # S(Norm) / S(type) of each mean
TABLE = (*MEANS, *RATIOS.values(), "lr_ratio")


def trained_parameters(model: Transformer) -> dict:
    """{name: parameter} of those with a gradient: all but the biases on the choice of experts, which no loss trains."""
    roles = model.roles()
    return {name: p for name, p in model.named_parameters() if roles[name] != "balance"}


@torch.enable_grad()
def sum_gradients(model: Transformer, losses) -> dict:
    """{parameter name: sum of the gradients of the `losses`, an iterable, on the model's device}."""
    parameters = trained_parameters(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for t, g in zip(total.values(), gradients, strict=True):
            t += g
    return total


def pool_by_type(tensors: dict, types: dict) -> dict:
    """{type: all entries of that type as one vector}; tensors: {name: tensor}, types: {name: type, of all or some}."""
    pooled = {}
    for name, t in tensors.items():
        if name in types:
            pooled.setdefault(types[name], []).append(t.flatten())
    return {kind: torch.cat(parts) for kind, parts in pooled.items()}


def compute_gradients(model: Transformer, batches) -> dict:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over targets, unclipped. ValueError if none."""
    shares = target_shares(batches)
    losses = (model(*batch)[1] * share for batch, share in zip(batches, shares, strict=True))
    return {name: g.cpu() for name, g in sum_gradients(model, losses).items()}


def tail_statistics(g: torch.Tensor) -> dict:
    """How heavy the tail of the entries of g is. All but n and rms are independent of scale [I]: max_over_rms;
    kurtosis E g⁴ / (E g²)², Gaussian 3; p999_over_p50, quantiles of |g|; participation (Σg²)² / (n Σg⁴), the share of
    the entries that carry the energy, Gaussian 1/3; hill, the Hill estimate of the index α of the tail
    P(|g| > x) ~ x^−α: 1 / mean of ln(aᵢ / aₖ₊₁) over the k largest |g|, 0.1 % of them, at least 10. Smaller = heavier;
    nan if fewer than k + 1 are not 0."""
    a = g.detach().abs().flatten().cpu().double().numpy()
    n, largest = a.size, a.max(initial=0.0)
    if not 0 < largest < math.inf:
        return {"n": n, "rms": float(largest), **dict.fromkeys(TAIL_STATISTICS, math.nan)}
    a = a / largest  # fourth powers of small gradients would be 0
    square, fourth = np.square(a).mean(), np.square(np.square(a)).mean()
    p50, p999 = np.quantile(a, (0.5, 0.999))
    k = max(10, n // 1000)
    top = np.partition(a, n - k - 1)[-k - 1 :] if n > k else np.zeros(1)  # the k + 1 largest, the smallest first
    excess = np.log(top[1:] / top[0]).mean() if top[0] else math.nan
    found = dict(rms=largest * square**0.5, max_over_rms=square**-0.5, kurtosis=fourth / square**2)
    found |= dict(p999_over_p50=p999 / p50 if p50 else math.inf, hill=1 / excess if excess else math.inf)
    found["participation"] = square**2 / fourth
    return {"n": n} | {name: float(value) for name, value in found.items()}


def log_histogram(g: torch.Tensor, bins: int, low: float, high: float) -> dict:
    """Histogram of |g| over bins even in log from low to high: their edges; density, the share of all entries per unit
    of |g|; ccdf, the share at or above each edge."""
    edges, a = np.geomspace(low, high, bins + 1), np.sort(g.detach().abs().flatten().float().cpu().numpy())
    below = np.searchsorted(a, edges) / max(1, a.size)  # share of the entries below each edge
    density = np.diff(below) / np.diff(edges)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below).tolist()}


def measure_gradients(model, batches, run):
    pooled, types = pool_by_type(compute_gradients(model, batches), matrix_types(model)), {}
    for kind in dict.fromkeys(MATRICES.values()):
        statistics = tail_statistics(pooled[kind])
        histogram = log_histogram(pooled[kind] / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        types[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {"types": types}


@register("gradients", measure_gradients, tokens=65536, table=("rms", *TAIL_STATISTICS))
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
    """{parameter name: h, a CPU tensor of its shape}: the mean over `draws` of n g², with n = B·T tokens, or B images,
    and g the gradient of their mean loss on labels drawn from softmax(logits), at temperature 1 (Blockwise LR eq. 3).
    An unbiased estimate of the diagonal of the mean loss's Gauss-Newton matrix: with such labels the gradients of
    different tokens are independent and have mean zero. The labels depend on the generator alone, of any device."""
    counts, h = [], dict.fromkeys(trained_parameters(model), 0.0)

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
    """One label per token (B, T), or per image (B,), drawn from softmax(logits) of x (B, T, C); few exist at a time."""
    rows = max(1, LOGITS_BYTES // (8 * x.shape[1] * len((model.head or model.wte).weight)))
    labels = []
    for part in x.split(rows):
        p = model.logits(part).softmax(-1).to(generator.device)
        labels.append(torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1]))
    return torch.cat(labels).to(x.device)


def average_by_type(h: dict, types: dict) -> dict:
    """{type: {"arithmetic": mean over all n entries (Blockwise LR eq. 4), "geometric": over those that are not 0 [I]
    (App. A.1), "zero_fraction": the share that it leaves out, "n"}}; h: {name: tensor}, types: {name: type}."""
    found = {}
    for kind, values in pool_by_type(h, types).items():
        values = values.double()
        positive = values[values > 0]
        geometric = positive.log().mean().exp().item()
        zeros = 1 - len(positive) / len(values)
        found[kind] = dict(arithmetic=values.mean().item(), geometric=geometric, zero_fraction=zeros, n=len(values))
    return found


def average_by_block(model: Transformer, h: dict) -> dict:
    """{type: {each of MEANS: [one per block]}} of `average_by_type`, nan for a block that lacks the type. Types: "all",
    all parameters of a block (Blockwise LR Fig. 7), and those that the blocks have."""
    types, layers = model.block_types(), []
    for i in range(len(model.blocks)):
        mine = {name: t for name, t in h.items() if name.startswith(f"blocks.{i}.")}
        layers.append(average_by_type(mine, dict.fromkeys(mine, "all")) | average_by_type(mine, types))
    kinds = [kind for kind in ("all", "qk", "vo", "ffn", "router", "norm") if any(kind in layer for layer in layers)]
    return {kind: {m: [layer.get(kind, {}).get(m, math.nan) for layer in layers] for m in MEANS} for kind in kinds}


def log10_density(values: torch.Tensor, bins: int) -> dict:
    """{"edges": of `bins` even bins, in log₁₀, "density": of the positive entries, per decade, integral 1}; both empty
    if none is positive (Blockwise LR Fig. 2)."""
    logs = values[values > 0].double().log10().numpy()
    density, edges = np.histogram(logs, bins, density=True) if len(logs) else (logs, logs)
    return {"edges": edges.tolist(), "density": density.tolist()}


def compare_to_norm(types: dict, train_config: dict) -> dict:
    """`types`, of `average_by_type`, with "ratio": S(Norm) / S(type) of arithmetic means, to which LR ratios are
    proportional by Blockwise LR sec. 5, Norm's own being 1; "geo_ratio": that of geometric means; "lr_ratio": in use by
    the run, nan without one. A ratio is nan without gains, inf over 0."""
    found, norm = {}, types.get("norm", dict.fromkeys(MEANS, math.nan))
    for kind, its in types.items():
        found[kind] = its | {name: norm[mean] / its[mean] if its[mean] else math.inf for mean, name in RATIOS.items()}
        blockwise = train_config.get("blockwise_lr", True)
        found[kind]["lr_ratio"] = train_config.get(f"lr_ratio_{kind}", math.nan) if blockwise else 1.0
    return found


def describe_ratios(found: dict) -> str:
    """What LR ratios the principle has for a checkpoint, as flags of training: a line for each mean."""
    lines = ["lr ratios by the principle, S(Norm)/S(type); the paper tunes by hand from there (Blockwise LR, sec. 5)"]
    for mean, name in RATIOS.items():
        ratios = [(kind, its[name]) for kind, its in found["types"].items() if math.isfinite(its[name])]
        flags = ["--blockwise_lr=True", *(f"--lr_ratio_{kind}={ratio:.3g}" for kind, ratio in ratios)]
        lines.append(f"  {mean}: {' '.join(flags) if ratios else 'none, without gains'}")
    return "\n".join(lines)


def measure_sharpness(model, batches, run):
    draws, types, vocab = run.config.draws, model.block_types(), model.config.vocab_size or None  # images have none
    h = estimate_sharpness(model, batches, draws, run.generator(run.device))
    for name in [name for name, t in h.items() if types[name] in ("emb", "head") and t.ndim > 1]:
        h[name] = h[name][:vocab]  # the rows that pad the vocabulary belong to no token
    means, layers = compare_to_norm(average_by_type(h, types), run.train_config), average_by_block(model, h)
    density = {kind: log10_density(values, 60) for kind, values in pool_by_type(h, types).items()}
    return {"draws": draws, "types": means, "layers": layers, "log10_density": density}


@register("sharpness", measure_sharpness, tokens=4096, over_training=True, table=TABLE, says=describe_ratios)
def draw_sharpness(measured):
    """Sharpness by block type and block: average, over training, density (Blockwise LR, Figs. 1-3, 7)."""
    last, ticks, training, densities, blocks = measured[-1], [], [], [], []
    kinds = [kind for kind in TYPE_COLORS if kind in last["types"]]
    ends = [line(kinds, [last["types"][kind][mean] for kind in kinds], "o", label=mean) for mean in MEANS[:2]]
    fits = [its["arithmetic"] * its["ratio"] / (its["lr_ratio"] or math.nan) for its in map(last["types"].get, kinds)]
    ends.append(line(kinds, fits, "kx", label="S(Norm) / LR ratio in use"))
    for kind in kinds:
        color, zeros = TYPE_COLORS[kind], 100 * last["types"][kind]["zero_fraction"]
        ticks.append(f"{kind}\n{zeros:.2g}% zeros" if zeros else kind)
        means = [m["types"][kind]["arithmetic"] for m in measured]
        training.append(over_steps(measured, means, color=color, label=kind))
        edges, density = map(np.array, last["log10_density"][kind].values())
        densities.append(line((edges[1:] + edges[:-1]) / 2, density, "-", color=color))
        if kind in last["layers"]:
            blocks.append(by_block(last["layers"][kind]["arithmetic"], color=color))
    for mean, style in (("arithmetic", "ko-"), ("geometric", "ko:")):
        blocks.append(by_block(last["layers"]["all"][mean], style, label=f"whole block, {mean}"))
    panels = [Panel("mean h, the geometric\nwithout the zeros", "", ends, log="y", ticks=ticks)]
    panels += [Panel("arithmetic mean h", "step", training, log="y")]
    panels += [Panel("density of log₁₀ h\n(at the end)", "log₁₀ h", densities)]
    panels += [Panel("mean h by block (at the end)", "block", blocks, log="y")]
    steps, lower = [m["step"] for m in measured], []
    for kind in [kind for kind in last["layers"] if kind != "all"]:
        lines = blocks_over_steps(steps, [m["layers"][kind]["arithmetic"] for m in measured])
        lower.append(Panel(f"mean h of {kind}, by block", "step", lines, log="y"))
    return [panels, lower]
