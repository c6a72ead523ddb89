"""Gradients and sharpness, measured and drawn: after DNT (arXiv 2507.17501) and Blockwise LR (2502.19002). What the
papers leave open, and what we chose: docs/analysis.md."""

import math

import numpy as np
import torch

from layers.loss import LOGITS_BYTES
from model import MLP, Attention, Transformer
from studies.analysis.figure import TYPE_COLORS, make_panels, plot_by_block, plot_over_steps, register, rows_of
from studies.analysis.runs import target_shares

MATRICES = {"q": "$W_Q$", "k": "$W_K$", "v": "$W_V$", "o": "$W_O$", "w1": "$W_1$ (up, gate)", "w2": "$W_2$ (down)"}
MATRIX_TYPES = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "w1", "up": "w1", "down": "w2"}
TAIL_STATISTICS = ("kurtosis", "max_over_rms", "p999_over_p50", "hill", "participation")
MEANS = ("arithmetic", "geometric", "zero_fraction")  # the last: the share that the geometric mean leaves out
TAIL = 1000  # the Hill estimator's tail is the largest 1/1000 of the entries …
TAIL_LEAST = 10  # … but at least this many


def matrix_types(model: Transformer) -> dict:
    """{name of a block's matrix: its type}, one of "q", "k", "v", "o", "w1" (up, and SwiGLU's gate), "w2" (down)."""
    types = {}
    for name, module in model.named_modules():
        for part, kind in MATRIX_TYPES.items() if isinstance(module, (Attention, MLP)) else ():
            if getattr(module, part, None) is not None:  # an MLP has no q, and a gate only under SwiGLU
                types[f"{name}.{part}.weight"] = kind
    return types


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


# --------------------------------------------------------------------------------------------------- gradients


def compute_gradients(model: Transformer, batches) -> dict:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over all targets of `batches`, [(inputs, targets),
    …], before clipping. ValueError if all targets are ignored."""
    shares = target_shares(batches)
    losses = (model(*batch)[1] * share for batch, share in zip(batches, shares, strict=True))
    return {name: g.cpu() for name, g in sum_gradients(model, losses).items()}


def tail_statistics(g: torch.Tensor) -> dict:
    """How heavy the tail of the entries of g is. All but n and rms are independent of scale [I].

    max_over_rms; kurtosis E g⁴ / (E g²)², Gaussian 3; p999_over_p50, quantiles of |g|; hill, the Hill estimate of the
    tail's index α, P(|g| > x) ~ x^−α, from the top 0.1 % (at least 10 entries): smaller = heavier; participation
    (Σg²)² / (n Σg⁴), the share of the entries that carry the energy, Gaussian 1/3."""
    a = g.detach().abs().flatten().cpu().double().numpy()
    n, largest = a.size, a.max(initial=0.0)
    if not n or not 0 < largest < math.inf:
        return {"n": n, "rms": float(largest), **dict.fromkeys(TAIL_STATISTICS, math.nan)}
    a = a / largest  # fourth powers of small gradients would be 0
    square, fourth = np.square(a).mean(), np.square(np.square(a)).mean()
    p50, p999 = np.quantile(a, (0.5, 0.999))
    return {
        "n": n,
        "rms": float(largest * square**0.5),
        "max_over_rms": float(square**-0.5),
        "kurtosis": float(fourth / square**2),
        "p999_over_p50": float(p999 / p50) if p50 else math.inf,
        "hill": hill_index(a, max(TAIL_LEAST, n // TAIL)),
        "participation": float(square**2 / fourth),
    }


def hill_index(a: np.ndarray, k: int) -> float:
    """1 / mean of ln(aᵢ / aₖ₊₁) over the k largest entries of a ≥ 0; nan if fewer than k + 1 are positive."""
    if len(a) <= k:
        return math.nan
    top = np.partition(a, len(a) - k - 1)[-k - 1 :]  # the k + 1 largest, the smallest of them first
    if top[0] == 0:
        return math.nan
    mean = np.log(top[1:] / top[0]).mean()
    return float(1 / mean) if mean else math.inf


def log_histogram(g: torch.Tensor, bins: int, low: float, high: float) -> dict:
    """Histogram of |g| over `bins` bins; their bins + 1 edges are evenly spaced in log from low to high > low > 0.

    density: share of all entries per unit of |g|. ccdf: share of all entries at or above each edge."""
    a = np.sort(g.detach().abs().flatten().float().cpu().numpy())
    edges = np.geomspace(low, high, bins + 1)
    below = np.searchsorted(a, edges)  # entries below each edge
    n = max(1, a.size)
    density = np.diff(below) / n / np.diff(edges)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below / n).tolist()}


def pool_gradients(model: Transformer, batches) -> dict:
    """{type of `matrix_types`: the entries of its matrices' gradients, with all layers in one}."""
    found, types = compute_gradients(model, batches), matrix_types(model)
    return {kind: torch.cat([found[n].flatten() for n, its in types.items() if its == kind]) for kind in MATRICES}


def measure_gradients(model, batches, run):
    types = {}
    for kind, g in pool_gradients(model, batches).items():
        statistics = tail_statistics(g)
        histogram = log_histogram(g / (statistics["rms"] or 1), 80, 1e-6, 1e4)
        types[kind] = {**statistics, "histogram_of_g_over_rms": histogram}
    return {"types": types}


@register("gradients", measure_gradients, tokens=65536, table=("rms", *TAIL_STATISTICS))
def draw_gradients(results):
    """Gradient entries by type of matrix: density, and share beyond a size (DNT, Fig. 1)."""
    figure, axes = make_panels(len(MATRICES), 4, 1.5, sharex="col", sharey="col")
    for row, (kind, label) in zip(axes, MATRICES.items(), strict=True):
        for name, (*_, last) in results.items():
            found = last["types"][kind]
            edges, density, ccdf = (
                np.array(found["histogram_of_g_over_rms"][key]) for key in ("edges", "density", "ccdf")
            )
            per_decade = density * np.diff(edges) / np.diff(np.log10(edges))
            for i, scale in ((0, found["rms"]), (2, 1.0)):
                x, seen = edges * scale, per_decade > 0
                row[i].plot(np.sqrt(x[1:] * x[:-1])[seen], per_decade[seen], label=name)
                row[i + 1].plot(x[ccdf > 0], ccdf[ccdf > 0], label=name)
        for ax in row:
            ax.set(xscale="log", yscale="log")
            ax.set_ylim(bottom=1e-6)
        row[2].set_xlim(1e-3, 1e3)
        row[3].set_xlim(1e-3, 1e3)
        row[0].set_ylabel(label)
    for i, size in enumerate(("|g|", "|g|", "|g| / RMS", "|g| / RMS")):
        axes[0, i].set_title("share ≥ |g|" if i % 2 else "density per decade")
        axes[-1, i].set_xlabel(size)
    axes[0, 0].legend()
    return figure


# --------------------------------------------------------------------------------------------------- sharpness


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
    """One label per token (B, T), or per image (B,), drawn from softmax(logits) of the stream x (B, T, C); few logits
    exist at a time."""
    rows = max(1, LOGITS_BYTES // (8 * x.shape[1] * (model.config.padded_vocab_size or model.config.n_class)))
    labels = []
    for part in x.split(rows):
        p = model.logits(part).softmax(-1).to(generator.device)
        labels.append(torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1]))
    return torch.cat(labels).to(x.device)


def drop_padding_rows(model: Transformer, h: dict) -> dict:
    """`h`, {parameter name: tensor}, without the rows that pad the vocabulary: they belong to no token."""
    types, vocab = model.block_types(), model.config.vocab_size or None  # images have none
    return {name: t[:vocab] if types[name] in ("emb", "head") and t.ndim > 1 else t for name, t in h.items()}


def average_by_type(h: dict, types: dict) -> dict:
    """{type: {"arithmetic", "geometric": means over the entries of that type, "zero_fraction", "n"}}.

    h: {name: tensor}, types: {name: type}. The arithmetic mean is over all n entries (Blockwise LR eq. 4), the
    geometric one (App. A.1) over those that are not 0 [I]: `zero_fraction` is the share of n that it leaves out."""
    found = {}
    for kind in dict.fromkeys(types[name] for name in h):
        values = torch.cat([t.flatten().double() for name, t in h.items() if types[name] == kind])
        positive = values[values > 0]
        geometric = positive.log().mean().exp().item() if len(positive) else math.nan
        zeros = 1 - len(positive) / len(values)
        found[kind] = dict(arithmetic=values.mean().item(), geometric=geometric, zero_fraction=zeros, n=len(values))
    return found


def average_by_block(model: Transformer, h: dict) -> dict:
    """{type: {"arithmetic", "geometric", "zero_fraction": [one per block]}}, as in `average_by_type`: for "all", all
    parameters of a block (Blockwise LR Fig. 7), and for those of "qk", "vo", "ffn", "router", "norm" that the blocks
    have; nan for a block that lacks the type."""
    types, layers = model.block_types(), []
    for i, block in enumerate(model.blocks):
        names = [name for name, _ in block.named_parameters(prefix=f"blocks.{i}") if name in h]
        mine = {name: h[name] for name in names}
        layers.append(average_by_type(mine, dict.fromkeys(names, "all")) | average_by_type(mine, types))
    kinds = [kind for kind in ("all", "qk", "vo", "ffn", "router", "norm") if any(kind in layer for layer in layers)]
    return {kind: {m: [layer.get(kind, {}).get(m, math.nan) for layer in layers] for m in MEANS} for kind in kinds}


def log10_density(values: torch.Tensor, bins: int) -> dict:
    """Density of log₁₀ of the positive entries of `values` over `bins` even bins: {"edges" (bins + 1, in log₁₀),
    "density" (per decade, integral 1)}; both lists are empty if no entry is positive (Blockwise LR Fig. 2)."""
    logs = values.flatten().cpu().double()
    logs = logs[logs > 0].log10().numpy()
    if not len(logs):
        return {"edges": [], "density": []}
    density, edges = np.histogram(logs, bins, density=True)
    return {"edges": edges.tolist(), "density": density.tolist()}


def measure_sharpness(model, batches, run):
    types, draws = model.block_types(), run.config.draws
    h = drop_padding_rows(model, estimate_sharpness(model, batches, draws, run.generator(run.device)))
    by_type = {
        kind: [t.flatten() for name, t in h.items() if types[name] == kind] for kind in dict.fromkeys(types.values())
    }
    density = {kind: log10_density(torch.cat(its), 60) for kind, its in by_type.items() if its}
    averages = {"types": average_by_type(h, types), "layers": average_by_block(model, h)}
    return {"draws": draws, **averages, "log10_density": density}


@register("sharpness", measure_sharpness, tokens=4096, over_training=True, table=MEANS)
def draw_sharpness(results):
    """Sharpness by block type and block: average, over training, density (Blockwise LR, Figs. 1-3, 7)."""
    figure, axes = make_panels(len(results), 4, 2.5, sharey="col")
    for (bars, steps, densities, blocks), measured in rows_of(axes, results):
        last = measured[-1]
        kinds = [kind for kind in TYPE_COLORS if kind in last["types"]]
        names = []
        for i, kind in enumerate(kinds):
            color, found = TYPE_COLORS[kind], last["types"][kind]
            bars.bar(i - 0.2, found["arithmetic"], 0.4, color=color)
            bars.bar(i + 0.2, found["geometric"], 0.4, color=color, alpha=0.45, hatch="///")
            zeros = 100 * found["zero_fraction"]
            names.append(f"{kind}\n{zeros:.2g}% zeros" if zeros else kind)
            arithmetic = [m["types"][kind]["arithmetic"] for m in measured]
            plot_over_steps(steps, measured, arithmetic, color=color, label=kind)
            edges, density = (np.array(last["log10_density"][kind][key]) for key in ("edges", "density"))
            densities.plot((edges[1:] + edges[:-1]) / 2, density, color=color)
            if kind in last["layers"]:
                plot_by_block(blocks, last["layers"][kind]["arithmetic"], color=color)
        for mean, style in (("arithmetic", "ko-"), ("geometric", "ko:")):
            plot_by_block(blocks, last["layers"]["all"][mean], style, label=f"whole block, {mean}")
        bars.set_xticks(range(len(kinds)), names, rotation=60, ha="right", rotation_mode="anchor")
        bars.set_yscale("log")
        steps.set(xlabel="step", yscale="log")
        densities.set_xlabel("log₁₀ h")
        blocks.set(xlabel="block", yscale="log")
    titles = ("mean h: arithmetic, hatched:\ngeometric, without the zeros", "arithmetic mean h")
    titles += ("density of log₁₀ h\n(at the end)", "mean h by block (at the end)")
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    axes[0, 1].legend(ncols=2)
    axes[0, 3].legend(fontsize=7)
    return figure
