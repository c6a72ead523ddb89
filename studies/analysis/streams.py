"""The residual stream and the attention logits: the numbers behind the figures of LNS (arXiv 2502.05795).

    stream_variance                                               LNS Figs. 4, 8, 9, sec. 5.4
    collect_streams, angular_distance, mean_angular_distance      LNS eq. 1, Figs. 2, 3, 7
    removal_drop                                                  LNS sec. 2.1, Figs. 2, 3, 7
    residual_jacobian, jacobian_statistics                        LNS Fig. 5
    largest_logits                                                no figure of a paper; QK-norm bounds them

What the paper leaves open, and what we chose:

* Variance by layer. The estimator is [U]. Ours [I]: the variance over the channels of each token, averaged over tokens;
  also the variance over all elements, and that of the branch outputs as they are added.
* Angular distance. Published: the mean over 256K tokens of C4, between the inputs of layers ℓ and ℓ + n. Fig. 3 is
  "scaled to the range [0, 1]": whether beyond eq. 1's 1/π is [U]; the authors' code scales each row. Ours: not scaled
  [I]; the last stream is the one before the final norm [I].
* Removal. Published as a drop in task accuracy (MMLU, SQuAD, ARC-e). Ours [I]: the rise of the validation loss.
* Jacobian. Published for a "token-averaged" residual block; the rest is [U]. Ours [I]: the derivative of a token's
  output by the same token's input, the skip connection's identity included.
"""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from layers.ops import upcast
from model import Transformer
from nanodnt.generate import KVCache
from nanodnt.run.tracking import largest_logit, variance
from studies.analysis.gradients import MICRO_TOKENS, parts_of, target_shares


@contextmanager
def watch_outputs(modules: dict, note):
    """Inside, note(name, inputs, output) is called after every forward of each of `modules`, {name: module}."""

    def hook_of(name):
        return lambda module, args, output: note(name, args, output)

    hooks = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


# ---------------------------------------------------------------------------------------------- depth by depth


@torch.no_grad()
def collect_streams(model: Transformer, inputs: torch.Tensor) -> list:
    """L + 1 CPU tensors (B, T, C): the stream that enters block 1, and the stream after each block; the last of them
    is before the final norm."""
    found = []

    def note(name, args, output):
        found.extend([args[0].cpu()] if name == 0 else [])
        found.append(output.cpu())

    with watch_outputs(dict(enumerate(model.blocks)), note):
        model.stream(inputs)
    return found


@torch.no_grad()
def stream_variance(model: Transformer, inputs) -> dict:
    """{"stream": [L + 1], "attn": [L], "mlp": [L]}: variance over the channels of a token, mean over tokens, of the
    stream and of the branch outputs as they are added (after the mid slot); "stream_global" [L + 1]: over all elements.
    Variances divide by the number of elements."""
    depths = {("stream", 0): model.blocks[0]}  # what enters block 1; all others are what leaves the module
    for i, block in enumerate(model.blocks):
        depths |= {("attn", i): block.attn.mid, ("mlp", i): block.mlp.mid, ("stream", i + 1): block}
    sums, whole = dict.fromkeys(depths, 0.0), {depth: Moments() for depth in depths if depth[0] == "stream"}

    def note(depth, args, output):
        x = args[0] if depth == ("stream", 0) else output
        sums[depth] += variance(x).item() * x[..., 0].numel()
        if depth in whole:
            whole[depth].add(x)

    with watch_outputs(depths, note):
        for part in parts_of(model, inputs):
            model.stream(part)
    tokens = whole["stream", 0].n // model.config.n_embd
    found = {kind: [sums[depth] / tokens for depth in depths if depth[0] == kind] for kind in ("stream", "attn", "mlp")}
    return {**found, "stream_global": [moments.variance for moments in whole.values()]}


def angular_distance(streams: list) -> list:
    """d[a][b] = arccos(cosine) / π between streams a and b, each (B, T, C), the mean over tokens: 0 = same direction,
    0.5 = orthogonal, 1 = opposite (LNS)."""
    total, n = torch.zeros(len(streams), len(streams), dtype=torch.float64), 0
    for part in zip(*(x.cpu().flatten(0, 1).split(MICRO_TOKENS) for x in streams), strict=True):
        unit = F.normalize(torch.stack(part).double(), dim=-1, eps=1e-300)  # (L + 1, n, C)
        cosine = torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1)
        total, n = total + cosine.arccos().sum(-1), n + unit.shape[1]
    return (total / n / math.pi).fill_diagonal_(0.0).tolist()  # on the diagonal there is only rounding


def mean_angular_distance(model: Transformer, inputs) -> list:
    """`angular_distance` between the L + 1 streams of the model, over all tokens of `inputs`."""
    total, n = 0.0, 0
    for part in parts_of(model, inputs):
        streams = collect_streams(model, part)
        total = total + torch.tensor(angular_distance(streams), dtype=torch.float64) * streams[0][..., 0].numel()
        n += streams[0][..., 0].numel()
    return (total / n).tolist()


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


# ---------------------------------------------------------------------------------------------------- Jacobian


def residual_jacobian(model: Transformer, inputs, positions: list, block: int, branch: str) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the sequences (LNS Fig. 5).

    x enters and y leaves the residual sub-layer `branch` ("attn", "mlp", or "block" for both) of block `block`, counted
    from 0. Both are of the same token. The others that it sees, those before it or all of an image, are held fixed:
    their keys and values are put in a cache, so that C copies of the token give all rows in one backward pass."""
    module, total = model.blocks[block] if branch == "block" else getattr(model.blocks[block], branch), 0.0
    for (sequence, rope), t in zip(sequences_entering(module, model, inputs), map(int, positions), strict=True):
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


def sequences_entering(module: torch.nn.Module, model: Transformer, inputs):
    """(x (T, C), the rotation of its positions or None) of each sequence as it enters `module` of the model."""
    for part in parts_of(model, inputs):
        seen = []
        with torch.no_grad(), watch_outputs({"": module}, lambda name, args, output, seen=seen: seen.extend(args)):
            model.stream(part)
        for sequence in seen[0]:
            yield sequence, seen[1] if len(seen) > 1 else None


def jacobian_statistics(jacobian: torch.Tensor) -> dict:
    """{"deviation": ‖J − I‖ / √C in the Frobenius norm, "off_diagonal": share of Σ J² that is off the diagonal}."""
    j = jacobian.double()
    energy, diagonal = j.square().sum().item(), j.diagonal().square().sum().item()
    deviation = (j - torch.eye(len(j), dtype=j.dtype)).norm().item() / len(j) ** 0.5
    return {"deviation": deviation, "off_diagonal": 1 - diagonal / energy if energy else math.nan}


# -------------------------------------------------------------------------------------------- attention logits


class LargestLogit(TorchFunctionMode):
    """Inside, every attention product appends max |q·k| / √head_dim, over heads and pairs of a query and a key that it
    sees, to `found`. It gets q and k as the product does, so after the norms and the rotation of any layout."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal, self.found = causal, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.found.append(largest_logit(*(upcast(x) for x in args[:2]), causal=self.causal).item())
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def largest_logits(model: Transformer, inputs) -> list:
    """[L]: the largest |q·k| / √head_dim of each block, over heads and pairs of which one sees the other, after QK-norm
    and RoPE."""
    with LargestLogit(model.config.causal) as mode:
        for part in parts_of(model, inputs):
            model.stream(part)
    return torch.tensor(mode.found).view(-1, len(model.blocks)).amax(0).tolist()
