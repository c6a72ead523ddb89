"""The numbers behind the papers' figures. analyze.py draws them; they can be called on any model, on any device.

Everywhere `model` is a GPT in eval mode, of whatever layout, computing in fp32 or better, idx (B, T) are token ids and
targets (B, T) the next ones, −1 = ignored, on the model's device. Results are Python floats, lists and dicts, or CPU
tensors; nan stands for what is not defined, such as the kurtosis of zeros. Nothing here changes the model. Parameters
are sorted by the module they are in, never by their names.

    gradients, tail_statistics, log_histogram          DNT (arXiv 2507.17501) Fig. 1
    sharpness, …_by, …_by_layer, parameter_norms       Blockwise LR (2502.19002) eq. 4, Figs. 1–3, 6, 7, App. A.1
    dyt_alphas, norm_scatter                           DyT (2503.10622) Figs. 2, 4, 8
    streams, stream_variance, angular_distance,
      removal_drop, residual_jacobian                  LNS (2502.05795) Figs. 2–5, 7
    gain_statistics, qkv_cosines                       scale vectors (2605.26895) Fig. 4
    logit_max                                          no paper's figure: what QK-norm is there to bound

Marks: [I] our inference or choice, [U] not published where we could read it.

* Gradients. Published: histograms of |g| for Wq, Wk, Wv, Wo, W1, W2 early in training. Batch, pooling over layers,
  clipping and bins: [U]. Ours [I]: the gradient of the mean loss of a fixed batch before clipping, entries pooled over
  layers, W1 = up with SwiGLU's gate, W2 = down; and, as absolute ranges mix scale with shape, statistics without scale.
* Sharpness. h = n g², g the gradient of the mean loss on labels drawn from the model's own softmax: on average the
  diagonal of the Gauss-Newton matrix. n is the published B = 1024, of sequences or tokens: [U]; only the number of
  tokens makes a mean over tokens unbiased [I]. Of a block type the paper's eq. 4 has the arithmetic mean, its App. A.1
  averages log h: both are here. A single draw lowers the mean of ln h by 1.27 (Gaussian g), alike for all types.
* Variance by layer. The estimator is [U]. Ours [I]: over the channels of each token, then the mean over tokens; beside
  it the variance over all elements, and those of the branches as they are added.
* Angular distance. Published for one token, scaled to [0, 1] row by row in the code; here raw, the mean over tokens;
  the last stream is the one before the final norm [I].
* Removal. Published as a drop in task accuracy; here in validation loss [I].
* Jacobian. Published for a "token-averaged" residual block, the rest [U]. Ours [I]: of a token's output by the same
  token's input, the identity included.
* DyT's 1/std is over all elements of the input, as published. Norm scatter: the published points are before the affine
  part; the fit, and the spread of the tokens' RMS, are additions [I].
"""

import math
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from model import GPT, LOGITS_BYTES, MLP, Attention, KVCache, Slot, upcast
from tracking import largest_logit, variance

MICRO_TOKENS = 4096  # tokens of one forward and backward pass in here: bounds memory
MATRIX_TYPES = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "w1", "up": "w1", "down": "w2"}
TAIL = 1000  # the tail of the Hill estimator is one entry in so many …
TAIL_LEAST = 10  # … and at least so many
TANH_SLOPES = 1e-3, 1e2  # range of slope · rms(x) that the tanh fit searches

# ------------------------------------------------------------------------------------------------- what is what


def matrix_types(model: GPT) -> dict:
    """{name of a block's matrix: its type}, one of "q", "k", "v", "o", "w1" (up, and SwiGLU's gate), "w2" (down)."""
    types = {}
    for name, module in model.named_modules():
        for part, kind in MATRIX_TYPES.items() if isinstance(module, (Attention, MLP)) else ():
            if getattr(module, part, None) is not None:  # an MLP has no q, and a gate only under SwiGLU
                types[f"{name}.{part}.weight"] = kind
    return types


def block_types(model: GPT) -> dict:
    """{parameter name: block type} of Blockwise LR: "emb", "pos", "head", "qk", "vo", "ffn", "norm" (and the rest)."""
    return model.module_kinds()


def norm_slots(model: GPT) -> dict:
    """{name: Slot} of every norm on the residual path, in the order of the forward; QK-norm and DNP are not on it."""
    named = {"input_norm": model.input_norm}
    for i, block in enumerate(model.blocks):
        for branch, residual in (("attn", block.attn), ("mlp", block.mlp)):
            slots = {"pre": residual.pre, "mid": residual.mid, "post": residual.post}
            named |= {f"blocks.{i}.{branch}.{place}": slot for place, slot in slots.items()}
    return {name: slot for name, slot in {**named, "final_norm": model.final_norm}.items() if slot.norm != "none"}


@contextmanager
def watching(modules: dict, note):
    """Inside, note(name, inputs, output) is called after every forward of each of `modules`, {name: module}."""

    def hook_of(name):
        return lambda module, args, output: note(name, args, output)

    hooks = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --------------------------------------------------------------------------------------------------- gradients


def target_shares(batches: list) -> list:
    """The share that each of [(idx, targets), …] has in all targets that count. ValueError where none does."""
    counts = [int((targets != -1).sum()) for _, targets in batches]
    if not sum(counts):
        raise ValueError("no target counts: give at least one other than -1")
    return [count / sum(counts) for count in counts]


def gradients(model: GPT, batches: list) -> dict:
    """{parameter name: gradient, fp32, on the CPU} of the mean loss over all targets of `batches`, [(idx, targets), …],
    before any clipping. ValueError where no target counts."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    shares = target_shares(batches)
    total = [torch.zeros_like(p) for p in parameters]
    for (idx, targets), share in zip(batches, shares, strict=True):
        with torch.enable_grad():
            loss = model(idx, targets)[1] * share
        for t, g in zip(total, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            t += g
    return {name: t.cpu() for name, t in zip(names, total, strict=True)}


def tail_statistics(g: torch.Tensor) -> dict:
    """How heavy the tail of the entries of g is. All but n and rms are free of scale [I].

    max_over_rms; kurtosis E g⁴ / (E g²)², Gaussian 3; p999_over_p50, quantiles of |g|; hill, the Hill estimate of the
    tail's index α, P(|g| > x) ~ x^−α, from the top 0.1 % (at least 10 entries): smaller = heavier; participation
    (Σg²)² / (n Σg⁴), the share of the entries that carry the energy, Gaussian 1/3."""
    a = g.detach().abs().flatten().cpu().double().numpy()
    n, largest = a.size, a.max(initial=0.0)
    nothing = dict.fromkeys(("max_over_rms", "kurtosis", "p999_over_p50", "hill", "participation"), math.nan)
    if not n or not 0 < largest < math.inf:
        return {"n": n, "rms": float(largest), **nothing}
    a = a / largest  # fourth powers of small gradients would be 0
    square, fourth = np.square(a).mean(), np.square(np.square(a)).mean()
    p50, p999 = np.quantile(a, (0.5, 0.999))
    return {
        "n": n,
        "rms": float(largest * square**0.5),
        "max_over_rms": float(square**-0.5),
        "kurtosis": float(fourth / square**2),
        "p999_over_p50": float(p999 / p50) if p50 else math.inf,
        "hill": hill(a, max(TAIL_LEAST, n // TAIL)),
        "participation": float(square**2 / fourth),
    }


def hill(a: np.ndarray, k: int) -> float:
    """1 / mean of ln(aᵢ / aₖ₊₁) over the k largest entries of a ≥ 0; nan where there are not k + 1 positive ones."""
    if len(a) <= k:
        return math.nan
    top = np.partition(a, len(a) - k - 1)[-k - 1 :]  # the smallest of these first
    if top[0] == 0:
        return math.nan
    mean = np.log(top[1:] / top[0]).mean()
    return float(1 / mean) if mean else math.inf


def log_histogram(g: torch.Tensor, bins: int, low: float, high: float) -> dict:
    """|g| over `bins` bins whose edges, bins + 1, lie evenly in log from low to high > low > 0.

    density: share of all entries per unit of |g|, so Σ density · width = 1 − zeros − what lies outside. ccdf: share of
    all entries at or above each edge. zeros: share of entries that are 0."""
    a = np.sort(g.detach().abs().flatten().float().cpu().numpy())
    edges = np.geomspace(low, high, bins + 1)
    below = np.searchsorted(a, edges)  # entries below each edge
    n = max(1, a.size)
    density = np.diff(below) / n / np.diff(edges)
    zeros = float((a == 0).sum() / n)
    return {"edges": edges.tolist(), "density": density.tolist(), "ccdf": (1 - below / n).tolist(), "zeros": zeros}


# --------------------------------------------------------------------------------------------------- sharpness


def sharpness(model: GPT, idx: torch.Tensor, draws: int, generator: torch.Generator) -> dict:
    """{parameter name: h, a CPU tensor like it}: the mean over `draws` of n g², for n = B·T tokens, and g the gradient
    of the mean loss over them on labels drawn from softmax(logits), at temperature 1 (Blockwise LR eq. 4).

    Without bias for the diagonal of the Gauss-Newton matrix of the mean loss: labels so drawn make the gradients of
    different tokens independent with mean zero. The generator, of any device, decides the labels."""
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for _ in range(draws):
        sums = [torch.zeros_like(p) for p in parameters]  # of the gradients of the tokens' losses
        for part in idx.split(max(1, MICRO_TOKENS // idx.shape[1])):
            with torch.enable_grad():
                x = model.stream(part)
                loss = model.loss(x, sampled_labels(model, x.detach(), generator)) * part.numel()
            for s, g in zip(sums, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
                s += g
        for t, s in zip(total, sums, strict=True):
            t += s.square() / (idx.numel() * draws)  # n (s/n)²
    return {name: t.cpu() for name, t in zip(names, total, strict=True)}


@torch.no_grad()
def sampled_labels(model: GPT, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One label a token, (B, T), drawn from softmax(logits) of the stream x (B, T, C), with few logits at a time."""
    rows = max(1, LOGITS_BYTES // (8 * x.shape[1] * model.config.padded_vocab_size))
    labels = []
    for part in x.split(rows):
        p = model.logits(part).softmax(-1).flatten(0, 1).to(generator.device)
        labels.append(torch.multinomial(p, 1, generator=generator).view(part.shape[:2]))
    return torch.cat(labels).to(x.device)


def without_padding(model: GPT, h: dict) -> dict:
    """`h`, {parameter name: tensor}, without the rows that pad the vocabulary, which no token reaches."""
    types, vocab = block_types(model), model.config.vocab_size
    return {name: t[:vocab] if types[name] in ("emb", "head") and t.ndim > 1 else t for name, t in h.items()}


def sharpness_by(h: dict, types: dict) -> dict:
    """{type: {"arithmetic", "geometric": means over all entries of that type, "zero_fraction", "n"}}.

    h: {name: tensor}, types: {name: type}. The geometric mean is over what is not 0: an untied
    embedding has rows that no token asked for."""
    found = {}
    for kind in dict.fromkeys(types[name] for name in h):
        values = torch.cat([t.flatten().double() for name, t in h.items() if types[name] == kind])
        positive = values[values > 0]
        geometric = positive.log().mean().exp().item() if len(positive) else math.nan
        zeros = 1 - len(positive) / len(values)
        found[kind] = dict(arithmetic=values.mean().item(), geometric=geometric, zero_fraction=zeros, n=len(values))
    return found


def sharpness_by_layer(model: GPT, h: dict) -> dict:
    """{type: [arithmetic mean of h in each block]} for "qk", "vo", "ffn", "norm", as far as the blocks have them;
    nan in a block without (Blockwise LR Fig. 7)."""
    types, layers = block_types(model), []
    for i, block in enumerate(model.blocks):
        names = [f"blocks.{i}.{name}" for name, _ in block.named_parameters()]
        layers.append(sharpness_by({name: h[name] for name in names}, types))
    kinds = [kind for kind in ("qk", "vo", "ffn", "norm") if any(kind in layer for layer in layers)]
    return {kind: [layer.get(kind, {}).get("arithmetic", math.nan) for layer in layers] for kind in kinds}


def log10_density(values: torch.Tensor, bins: int) -> dict:
    """Density of log₁₀ of the positive entries of `values` over `bins` even bins: {"edges" (bins + 1, in log₁₀),
    "density" (per decade, integral 1)}, both empty where there are none (Blockwise LR Fig. 2)."""
    logs = values.flatten().cpu().double()
    logs = logs[logs > 0].log10().numpy()
    if not len(logs):
        return {"edges": [], "density": []}
    density, edges = np.histogram(logs, bins, density=True)
    return {"edges": edges.tolist(), "density": density.tolist()}


@torch.no_grad()
def parameter_norms(model: GPT) -> dict:
    """{block type: L2 norm of all its parameters together} (Blockwise LR Fig. 6)."""
    types, squares = block_types(model), {}
    for name, p in model.named_parameters():
        squares[types[name]] = squares.get(types[name], 0.0) + torch.linalg.vector_norm(p).item() ** 2
    return {kind: square**0.5 for kind, square in squares.items()}


# --------------------------------------------------------------------------------------------- residual stream


@torch.no_grad()
def streams(model: GPT, idx: torch.Tensor) -> list:
    """L + 1 CPU tensors (B, T, C): the stream that enters block 1, and after each block; the last is before the final
    norm."""
    found = []

    def note(name, args, output):
        found.extend([args[0].cpu()] if name == 0 else [])
        found.append(output.cpu())

    with watching(dict(enumerate(model.blocks)), note):
        model.stream(idx)
    return found


@torch.no_grad()
def stream_variance(model: GPT, idx: torch.Tensor) -> dict:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: variance over the channels of a token, mean over tokens, of the
    stream and of the branch outputs as they are added (after the mid slot); "stream_global" [L + 1]: over all elements.
    Variances divide by the number of elements."""
    found = {"stream": [], "stream_global": [], "attn": [], "mlp": []}

    def note(name, args, output):
        kind, block = name
        for x in (args[0], output) if (kind, block) == ("stream", 0) else (output,):
            found[kind].append(variance(x).item())
            if kind == "stream":
                found["stream_global"].append(upcast(x).var(correction=0).item())

    modules = {}
    for i, block in enumerate(model.blocks):
        modules |= {("attn", i): block.attn.mid, ("mlp", i): block.mlp.mid, ("stream", i): block}
    with watching(modules, note):
        model.stream(idx)
    return found


def angular_distance(streams: list) -> list:
    """d[a][b] = arccos(cosine) / π between streams a and b, each (B, T, C), the mean over tokens: 0 = same direction,
    0.5 = orthogonal, 1 = opposite (LNS)."""
    total, n = torch.zeros(len(streams), len(streams), dtype=torch.float64), 0
    for part in zip(*(x.cpu().flatten(0, 1).split(MICRO_TOKENS) for x in streams), strict=True):
        unit = F.normalize(torch.stack(part).double(), dim=-1, eps=1e-300)  # (L + 1, n, C)
        cosine = torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1)
        total, n = total + cosine.arccos().sum(-1), n + unit.shape[1]
    return (total / n / math.pi).fill_diagonal_(0.0).tolist()  # the diagonal: rounding apart


@torch.no_grad()
def removal_drop(model: GPT, batches: list) -> dict:
    """{"loss": mean loss over the targets of `batches`, [(idx, targets), …], "drop": [how much higher it is with
    block ℓ deleted]}. The other blocks keep their constants, such as LNS's 1/√ℓ (LNS)."""

    def mean_loss():
        losses = [model(idx, targets)[1].item() for idx, targets in batches]
        return sum(loss * share for loss, share in zip(losses, shares, strict=True))

    shares = target_shares(batches)
    blocks, loss, drop = model.blocks, mean_loss(), []
    try:
        for i in range(len(blocks)):
            model.blocks = torch.nn.ModuleList([*blocks[:i], *blocks[i + 1 :]])
            drop.append(mean_loss() - loss)
    finally:
        model.blocks = blocks
    return {"loss": loss, "drop": drop}


def residual_jacobian(model: GPT, idx: torch.Tensor, positions: list, block: int, branch: str) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j], the mean over sequences b of that at token positions[b]; x what enters the residual
    sub-layer `branch` ("attn", "mlp", or "block" for both) of block `block`, from 0, and y what leaves it (LNS Fig. 7).

    Same token, the earlier ones held: with these in a cache, C copies of it give all rows in one backward pass."""
    module = model.blocks[block] if branch == "block" else getattr(model.blocks[block], branch)
    seen, total = [], 0.0
    with torch.no_grad(), watching({branch: module}, lambda name, args, output: seen.extend(args)):
        model.stream(idx)
    x, rope = seen[0], seen[1] if len(seen) > 1 else None
    channels = torch.arange(x.shape[-1], device=x.device)
    for sequence, t in zip(x, map(int, positions), strict=True):
        context = ()
        if branch != "mlp":  # which looks at no other token
            cache, part = KVCache(), lambda low, high: rope and tuple(angle[low:high] for angle in rope)
            if t:
                with torch.no_grad():
                    module(sequence[None, :t], part(0, t), cache)
                cache.k, cache.v = (kv.expand(len(channels), -1, -1, -1) for kv in (cache.k, cache.v))
            context = part(t, t + 1), cache
        with torch.enable_grad():
            copies = sequence[t].expand(len(channels), 1, -1).clone().requires_grad_()  # (C, 1, C)
            y = module(copies, *context)
            (rows,) = torch.autograd.grad(y[channels, 0, channels].sum(), copies)
        total = total + rows[:, 0]
    return (total / len(x)).cpu()


def jacobian_statistics(jacobian: torch.Tensor) -> dict:
    """{"deviation": ‖J − I‖ / √C in the Frobenius norm, "off_diagonal": share of Σ J² that is off the diagonal}."""
    j = jacobian.double()
    energy, diagonal = j.square().sum().item(), j.diagonal().square().sum().item()
    deviation = (j - torch.eye(len(j), dtype=j.dtype)).norm().item() / len(j) ** 0.5
    return {"deviation": deviation, "off_diagonal": 1 - diagonal / energy if energy else math.nan}


# ------------------------------------------------------------------------------------------------ norms and DyT


@torch.no_grad()
def dyt_alphas(model: GPT, idx: torch.Tensor) -> list:
    """[{"slot": name, "alpha": α, "inv_std": 1 / std over all elements of the slot's input}] of every DyT, in the order
    of the forward (DyT Figs. 4, 8)."""
    slots = {name: slot for name, slot in norm_slots(model).items() if slot.norm == "dyt"}
    found = []

    def note(name, args, output):
        std = upcast(args[0]).std(correction=0).item()
        found.append({"slot": name, "alpha": float(slots[name].alpha), "inv_std": 1 / std if std else math.inf})

    with watching(slots, note):
        final_stream(model, idx)
    return found


@torch.no_grad()
def final_stream(model: GPT, idx: torch.Tensor) -> None:
    """The forward of idx (B, T) up to the final norm, which `stream` leaves out, without the logits."""
    model.final_norm(model.stream(idx))


@torch.no_grad()
def norm_scatter(model: GPT, idx: torch.Tensor, slot_name: str, n: int, generator: torch.Generator) -> dict:
    """What norm slot `slot_name` (a name of `norm_slots`) does to the elements of its input (DyT Fig. 2).

    {"x", "y", "token", "channel": at most n elements drawn without replacement: input, output before the affine part,
    number of the token in idx, channel; "amplitude", "slope", "r2": the least-squares y ≈ A tanh(a x) of these, a > 0;
    "linear_r2": of the line y ≈ c x; "token_rms_cv": standard deviation over mean of the RMS of all tokens' inputs}."""
    slots, inputs = norm_slots(model), []
    if slot_name not in slots:
        raise ValueError(f"{slot_name!r} is no norm of the residual path: there are {', '.join(slots) or 'none'}")
    slot = slots[slot_name]
    with watching({slot_name: slot}, lambda name, args, output: inputs.append(upcast(args[0]))):
        final_stream(model, idx)
    x = inputs[0].flatten(0, 1)  # (tokens, C)
    y = slot.normalise(slot, x if slot.const_in == 1.0 else slot.const_in * x)
    chosen = torch.randperm(x.numel(), generator=generator, device=generator.device)[:n].sort().values.to(x.device)
    rms, xs, ys = x.square().mean(-1).sqrt(), x.flatten()[chosen].cpu(), y.flatten()[chosen].cpu()
    return {
        "x": xs.tolist(),
        "y": ys.tolist(),
        "token": (chosen // x.shape[1]).tolist(),
        "channel": (chosen % x.shape[1]).tolist(),
        **fit_tanh(xs.double().numpy(), ys.double().numpy()),
        "token_rms_cv": (rms.std(correction=0) / rms.mean()).item(),
    }


def fit_tanh(x: np.ndarray, y: np.ndarray) -> dict:
    """The least-squares fit y ≈ A tanh(a x), as "amplitude", "slope", "r2", and "linear_r2" of y ≈ c x.

    For each a the best A is known; a is searched on a grid that narrows, within TANH_SLOPES / rms(x)."""
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


@torch.no_grad()
def gain_statistics(model: GPT) -> dict:
    """{slot name: {"rms", "min", "max", "std"}} of the gain, as it acts, of every slot with more than one entry: norms
    of all kinds, LayerScale, Admin, HG, DP, DNP (scale vectors, Fig. 4)."""
    slots = {name: module for name, module in model.named_modules() if isinstance(module, Slot)}
    gains = {name: slot.gain_vector() for name, slot in slots.items()}
    return {name: vector_statistics(g) for name, g in gains.items() if g is not None and g.numel() > 1}


def vector_statistics(g: torch.Tensor) -> dict:
    spread = {"min": g.min().item(), "max": g.max().item(), "std": g.std(correction=0).item()}
    return {"rms": g.square().mean().sqrt().item(), **spread}


@torch.no_grad()
def qkv_cosines(model: GPT) -> list:
    """[{"qk", "qv", "kv": cosine between the gains that HG gives q, k and v}] by block, nan in a block without a pre
    norm (Mix-LN's first); [] without HG (scale vectors, Fig. 4)."""
    found = []
    for block in model.blocks:
        gains = {part: getattr(block.attn.f, part).pre.gain_vector() for part in "qkv"}
        pairs = {a + b: (gains[a], gains[b]) for a, b in ("qk", "qv", "kv")}
        cosine = {ab: F.cosine_similarity(*pair, dim=0).item() for ab, pair in pairs.items() if pair[0] is not None}
        found.append({ab: cosine.get(ab, math.nan) for ab in pairs})
    return found if any(not math.isnan(cosines["qk"]) for cosines in found) else []


class LargestLogit(TorchFunctionMode):
    """Inside, `found` gains max |q·k| / √head_dim, over heads and causal pairs, for every attention product: of q and k
    as the product gets them, whatever norms and rotation a layout has."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.found.append(largest_logit(*(upcast(x) for x in args[:2])))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def logit_max(model: GPT, idx: torch.Tensor) -> list:
    """[L]: the largest |q·k| / √head_dim of each block, over heads and causal pairs, after QK-norm and RoPE."""
    with LargestLogit() as mode:
        model.stream(idx)
    return torch.stack(mode.found).tolist()
