"""Gradients and sharpness: the numbers behind DNT's Fig. 1 and the figures of Blockwise LR.

    compute_gradients, tail_statistics, log_histogram        DNT (arXiv 2507.17501) Fig. 1, sec. 4.1
    estimate_sharpness, average_by_type, log10_density       Blockwise LR (2502.19002) eqs. 3, 4, Figs. 1–3, App. A.1
    average_by_block                                         Blockwise LR Fig. 7
    parameter_norms, block_norms, smallest_row               Blockwise LR Fig. 6

What the papers leave open, and what we chose:

* Gradients. Published: distributions of |g| for Wq, Wk, Wv, Wo, W1, W2 of ViTs, early in training. Batch, pooling over
  layers, clipping and bins: [U]. Ours [I]: the gradient of the mean loss of a fixed batch, before clipping; the entries
  of all layers, and experts, are pooled; W1 = up and SwiGLU's gate, W2 = down. Absolute ranges mix scale with the shape
  of the tail, so there are also statistics that do not depend on scale.
* Sharpness. h = n g², with g the gradient of the mean loss on labels drawn from the model's own softmax. Its mean over
  draws is the diagonal of the Gauss-Newton matrix. Published: n = B = 1024; whether sequences or tokens: [U]. Only the
  number of tokens makes the estimate for a mean over tokens unbiased, so we take that; of images, which have one label
  each, their number [I]. For a block type the paper's eq. 4 takes the arithmetic mean, its App. A.1 averages log h:
  both are here. log 0 is left out, and the share of zeros stands beside the mean [I]: an untied embedding has them in
  the rows of tokens that are not in the batch, which can be most of it. With a single draw the mean of ln h is too low
  by 1.27 (for Gaussian g), by the same amount for all types.
* Norms. Published: curves of ‖W‖ of the FFN, of attention and of the embedding's rows beside ‖γ‖. Which layer's, and
  what W1 is under SwiGLU: [U]. Ours [I]: every block; W1 = up and gate as one; γ = all gains of a branch as one.
"""

import math

import numpy as np
import torch

from layers.loss import LOGITS_BYTES
from layers.slot import Slot
from model import MLP, Attention, Transformer

MICRO_TOKENS = 4096  # tokens of one forward and backward pass in this package: bounds memory
MATRIX_TYPES = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "w1", "up": "w1", "down": "w2"}
TAIL = 1000  # the Hill estimator's tail is the largest 1/1000 of the entries …
TAIL_LEAST = 10  # … but at least this many


# ------------------------------------------------------------------------------------------- types of parameters


def matrix_types(model: Transformer) -> dict:
    """{name of a block's matrix: its type}, one of "q", "k", "v", "o", "w1" (up, and SwiGLU's gate), "w2" (down)."""
    types = {}
    for name, module in model.named_modules():
        for part, kind in MATRIX_TYPES.items() if isinstance(module, (Attention, MLP)) else ():
            if getattr(module, part, None) is not None:  # an MLP has no q, and a gate only under SwiGLU
                types[f"{name}.{part}.weight"] = kind
    return types


def block_types(model: Transformer) -> dict:
    """{parameter name: block type} of Blockwise LR: "emb", "pos", "head", "qk", "vo", "ffn", "norm" (all others); of
    mixtures of experts also "router" [I]."""
    return model.block_types()


def trained_parameters(model: Transformer) -> dict:
    """{name: parameter} of those with a gradient: all but the biases on the choice of experts, which no loss trains."""
    roles = model.roles()
    return {name: p for name, p in model.named_parameters() if roles[name] != "balance"}


def parts_of(model: Transformer, inputs):
    """`inputs` part by part, whole sequences or images of at most MICRO_TOKENS tokens (at least one of them). They are
    one tensor, or batches (inputs, targets) that are read in turn, so that memory does not grow with their number."""
    rows = max(1, MICRO_TOKENS // model.config.block_size)
    for batch in [(inputs,)] if isinstance(inputs, torch.Tensor) else inputs:
        yield from batch[0].split(rows)


# --------------------------------------------------------------------------------------------------- gradients


def target_shares(batches) -> list:
    """Each batch's share of all targets that are not ignored; batches: [(inputs, targets), …]. ValueError if all
    are."""
    counts = [int((targets != -1).sum()) for _, targets in batches]
    if not sum(counts):
        raise ValueError("every target is ignored (-1): give at least one that is not")
    return [count / sum(counts) for count in counts]


def compute_gradients(model: Transformer, batches) -> dict:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over all targets of `batches`, [(inputs, targets),
    …], before clipping. ValueError if all targets are ignored."""
    names, parameters = zip(*trained_parameters(model).items(), strict=True)
    shares = target_shares(batches)
    total = [torch.zeros_like(p) for p in parameters]
    for batch, share in zip(batches, shares, strict=True):
        with torch.enable_grad():
            loss = model(*batch)[1] * share
        for t, g in zip(total, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            t += g
    return {name: t.cpu() for name, t in zip(names, total, strict=True)}


def tail_statistics(g: torch.Tensor) -> dict:
    """How heavy the tail of the entries of g is. All but n and rms are independent of scale [I].

    max_over_rms; kurtosis E g⁴ / (E g²)², Gaussian 3; p999_over_p50, quantiles of |g|; hill, the Hill estimate of the
    tail's index α, P(|g| > x) ~ x^−α, from the top 0.1 % (at least 10 entries): smaller = heavier; participation
    (Σg²)² / (n Σg⁴), the share of the entries that carry the energy, Gaussian 1/3."""
    a = g.detach().abs().flatten().cpu().double().numpy()
    n, largest = a.size, a.max(initial=0.0)
    undefined = dict.fromkeys(("max_over_rms", "kurtosis", "p999_over_p50", "hill", "participation"), math.nan)
    if not n or not 0 < largest < math.inf:
        return {"n": n, "rms": float(largest), **undefined}
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

    density: share of all entries per unit of |g|, so that Σ density · width = 1 − zeros − the share outside the bins.
    ccdf: share of all entries at or above each edge. zeros: share of entries that are 0."""
    a = np.sort(g.detach().abs().flatten().float().cpu().numpy())
    edges = np.geomspace(low, high, bins + 1)
    below = np.searchsorted(a, edges)  # entries below each edge
    n = max(1, a.size)
    density = np.diff(below) / n / np.diff(edges)
    zeros = float((a == 0).sum() / n)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below / n).tolist(), "zeros": zeros}


# --------------------------------------------------------------------------------------------------- sharpness


def estimate_sharpness(model: Transformer, inputs, draws: int, generator: torch.Generator) -> dict:
    """{parameter name: h, a CPU tensor of its shape}: the mean over `draws` of n g², with n = B·T tokens, or B images,
    and g the gradient of their mean loss on labels drawn from softmax(logits), at temperature 1 (Blockwise LR eq. 3).

    An unbiased estimate of the diagonal of the mean loss's Gauss-Newton matrix: with such labels the gradients of
    different tokens are independent and have mean zero. The labels depend on the generator alone, of any device."""
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    names, parameters = zip(*trained_parameters(model).items(), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for _ in range(draws):
        sums, n = [torch.zeros_like(p) for p in parameters], 0  # over the labels, of the gradients of their losses
        for part in parts_of(model, inputs):
            with torch.enable_grad():
                x = model.stream(part)
                labels = sample_labels(model, x.detach(), generator)
                loss, n = model.loss(x, labels) * labels.numel(), n + labels.numel()
            for s, g in zip(sums, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
                s += g
        for t, s in zip(total, sums, strict=True):
            t += s.square() / (n * draws)  # n (s/n)²
    return {name: t.cpu() for name, t in zip(names, total, strict=True)}


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
    types, vocab = block_types(model), model.config.vocab_size or None  # images have none
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
    types, layers = block_types(model), []
    for i, block in enumerate(model.blocks):
        names = [name for name, _ in block.named_parameters(prefix=f"blocks.{i}") if name in h]
        mine = {name: h[name] for name in names}
        layers.append(average_by_type(mine, dict.fromkeys(names, "all")) | average_by_type(mine, types))
    kinds = [kind for kind in ("all", "qk", "vo", "ffn", "router", "norm") if any(kind in layer for layer in layers)]
    means = ("arithmetic", "geometric", "zero_fraction")
    return {kind: {m: [layer.get(kind, {}).get(m, math.nan) for layer in layers] for m in means} for kind in kinds}


def log10_density(values: torch.Tensor, bins: int) -> dict:
    """Density of log₁₀ of the positive entries of `values` over `bins` even bins: {"edges" (bins + 1, in log₁₀),
    "density" (per decade, integral 1)}; both lists are empty if no entry is positive (Blockwise LR Fig. 2)."""
    logs = values.flatten().cpu().double()
    logs = logs[logs > 0].log10().numpy()
    if not len(logs):
        return {"edges": [], "density": []}
    density, edges = np.histogram(logs, bins, density=True)
    return {"edges": edges.tolist(), "density": density.tolist()}


@torch.no_grad()
def parameter_norms(model: Transformer) -> dict:
    """{block type: L2 norm of all its trained parameters as one vector}."""
    types, found = block_types(model), {}
    for name, p in trained_parameters(model).items():
        found.setdefault(types[name], []).append(p)
    return {kind: joint_norm(tensors) for kind, tensors in found.items()}


def joint_norm(tensors) -> float:
    """The L2 norm of all entries of the tensors as one vector; nan for none."""
    squares = [torch.linalg.vector_norm(t).item() ** 2 for t in tensors]
    return sum(squares) ** 0.5 if squares else math.nan


def joint_gain(module: torch.nn.Module) -> float:
    """‖γ‖: the L2 norm of all gains in `module`, as they act, as one vector; of those with more than one entry. nan for
    none."""
    gains = [slot.gain_vector() for slot in module.modules() if isinstance(slot, Slot)]
    return joint_norm([gain for gain in gains if gain is not None and gain.numel() > 1])


@torch.no_grad()
def block_norms(model: Transformer) -> dict:
    """{"q", "k", "v", "o", "w1", "w2": ‖W‖, the Frobenius norm of a block's matrices of that type (`matrix_types`) as
    one; "attn_gain", "mlp_gain": ‖γ‖ of the branch}: lists [L] (Blockwise LR Fig. 6 a, b)."""
    types, found = matrix_types(model), {}
    for i, block in enumerate(model.blocks):
        mine = {name: p for name, p in block.named_parameters(prefix=f"blocks.{i}") if name in types}
        for kind in dict.fromkeys(MATRIX_TYPES.values()):
            norm = joint_norm([p for name, p in mine.items() if types[name] == kind])
            found.setdefault(kind, []).append(norm)
        for branch in ("attn", "mlp"):
            found.setdefault(f"{branch}_gain", []).append(joint_gain(getattr(block, branch)))
    return found


@torch.no_grad()
def smallest_row(model: Transformer) -> dict:
    """{"rows": d, the size of the vocabulary; "smallest": min ‖w̃‖² over the rows w of the embedding, w̃ = w − mean(w);
    "gain": ‖γ‖ of the norm that comes next: the input norm, else block 1's first, else all gains of its attention [I]}.
    The paper sets d · smallest against ‖γ‖² (Blockwise LR Theorem 4.3, Fig. 6 c). {} for images, which have no such
    table."""
    if getattr(model, "wte", None) is None:
        return {}
    rows = model.wte.weight[: model.config.vocab_size]
    smallest = (rows - rows.mean(1, keepdim=True)).square().sum(1).min().item()
    first = model.blocks[0].attn
    gains = (joint_gain(module) for module in (model.input_norm, first.pre, first))
    gain = next((gain for gain in gains if not math.isnan(gain)), math.nan)
    return {"rows": len(rows), "smallest": smallest, "gain": gain}
