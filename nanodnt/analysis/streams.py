"""The residual stream and the attention logits: the numbers behind the figures of LNS (arXiv 2502.05795).

    collect_streams, stream_variance, angular_distance, removal_drop    LNS Figs. 2–5
    residual_jacobian, jacobian_statistics                              LNS Fig. 7
    largest_logits                                                      no figure of a paper; QK-norm bounds them

What the paper leaves open, and what we chose:

* Variance by layer. The estimator is [U]. Ours [I]: the variance over the channels of each token, averaged over tokens;
  also the variance over all elements, and that of the branch outputs as they are added.
* Angular distance. Published for one token; the authors' code scales each row to [0, 1]. Ours [I]: not scaled, the mean
  over tokens; the last stream is the one before the final norm.
* Removal. Published as a drop in task accuracy. Ours [I]: the rise of the validation loss.
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
from nanodnt.analysis.gradients import MICRO_TOKENS, target_shares
from nanodnt.generate import KVCache
from nanodnt.run.tracking import largest_logit, variance


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
def stream_variance(model: Transformer, inputs: torch.Tensor) -> dict:
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
    with watch_outputs(modules, note):
        model.stream(inputs)
    return found


def angular_distance(streams: list) -> list:
    """d[a][b] = arccos(cosine) / π between streams a and b, each (B, T, C), the mean over tokens: 0 = same direction,
    0.5 = orthogonal, 1 = opposite (LNS)."""
    total, n = torch.zeros(len(streams), len(streams), dtype=torch.float64), 0
    for part in zip(*(x.cpu().flatten(0, 1).split(MICRO_TOKENS) for x in streams), strict=True):
        unit = F.normalize(torch.stack(part).double(), dim=-1, eps=1e-300)  # (L + 1, n, C)
        cosine = torch.einsum("anc,bnc->abn", unit, unit).clamp(-1, 1)
        total, n = total + cosine.arccos().sum(-1), n + unit.shape[1]
    return (total / n / math.pi).fill_diagonal_(0.0).tolist()  # on the diagonal there is only rounding


@torch.no_grad()
def removal_drop(model: Transformer, batches: list) -> dict:
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


def residual_jacobian(
    model: Transformer, inputs: torch.Tensor, positions: list, block: int, branch: str
) -> torch.Tensor:
    """(C, C): ∂y[i]/∂x[j] for the token at positions[b] of each sequence b, averaged over the sequences (LNS Fig. 7).

    x enters and y leaves the residual sub-layer `branch` ("attn", "mlp", or "block" for both) of block `block`, counted
    from 0. Both are of the same token. The others that it sees, those before it or all of an image, are held fixed:
    their keys and values are put in a cache, so that C copies of the token give all rows in one backward pass."""
    module = model.blocks[block] if branch == "block" else getattr(model.blocks[block], branch)
    seen, total = [], 0.0
    with torch.no_grad(), watch_outputs({branch: module}, lambda name, args, output: seen.extend(args)):
        model.stream(inputs)
    x, rope = seen[0], seen[1] if len(seen) > 1 else None
    channels = torch.arange(x.shape[-1], device=x.device)
    for sequence, t in zip(x, map(int, positions), strict=True):
        context = ()
        if branch != "mlp":  # the FFN looks at no other token
            others = sequence[:t] if model.config.causal else torch.cat((sequence[:t], sequence[t + 1 :]))
            cache, part = KVCache(len(others) + 1), lambda low, high: rope and tuple(angle[low:high] for angle in rope)
            if len(others):
                with torch.no_grad():
                    module(others[None], part(0, t), cache)
                cache.k, cache.v = (kv.repeat(len(channels), 1, 1, 1) for kv in (cache.k, cache.v))
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


# -------------------------------------------------------------------------------------------- attention logits


class LargestLogit(TorchFunctionMode):
    """Inside, every attention product appends max |q·k| / √head_dim, over heads and pairs of a query and a key that it
    sees, to `found`. It gets q and k as the product does, so after the norms and the rotation of any layout."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal, self.found = causal, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.found.append(largest_logit(*(upcast(x) for x in args[:2]), causal=self.causal))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def largest_logits(model: Transformer, inputs: torch.Tensor) -> list:
    """[L]: the largest |q·k| / √head_dim of each block, over heads and pairs of which one sees the other, after QK-norm
    and RoPE."""
    with LargestLogit(model.config.causal) as mode:
        model.stream(inputs)
    return torch.stack(mode.found).tolist()
