"""Adam-mini (version 1.1.0 of its authors' code): AdamW with one second moment for each block of a parameter.

    w ← w (1 − ηλ);   m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) mean(g² over the block);   w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε = 1e-8. Blocks: the rows of one head for q and k; each row (an output
neuron, a token) for the other matrices and the embeddings, learned positions too [I]; the whole tensor for all else.
State: 4 bytes a parameter and 4 a block. Defaults: AdamW's, as its authors recommend.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from layers.roles import MATRICES
from layers.sharding import local_shard, shard_group, shard_rows
from nanodnt.optim.registry import RATIOS, if_finite, one_if_finite, register


def options(config, role, model):
    rows = model.config.head_dim if role == "qk" else 1 if role in MATRICES else 0  # of a block; 0: of the tensor
    return dict(betas=(config.beta1, config.beta2), eps=1e-8, block_rows=rows)


def state(p, group):
    rows = group["block_rows"] or len(p)
    if len(p) % rows:
        raise ValueError(f"Adam-mini: a tensor of {len(p)} rows does not divide into blocks of {rows}")
    v = torch.zeros(len(p) // rows, dtype=p.dtype, device=p.device)
    return dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), block_sq=v)


def step(work, found_inf):
    for group, params, grads, states in work:
        beta1, beta2 = group["betas"]
        shards, grads = shard_group(params[0]), list(map(local_shard, grads))
        m, v, steps = ([local_shard(s[key]) for s in states] for key in ("exp_avg", "block_sq", "step"))
        for g, mean in zip(grads, m, strict=True):
            mean.lerp_(if_finite(found_inf, g, mean), 1 - beta1)
        squares = zip(mean_squares(params, grads, v, shards), v, strict=True)
        torch._foreach_lerp_(v, [if_finite(found_inf, new, old) for new, old in squares], 1 - beta2)
        # a list, because a single tensor would make the host wait for it
        torch._foreach_add_(steps, 1.0 if found_inf is None else [one_if_finite(found_inf)] * len(steps))
        if group["weight_decay"]:
            shrink = 1 - group["lr"] * group["weight_decay"] * one_if_finite(found_inf)
            torch._foreach_mul_(list(map(local_shard, params)), shrink)
        for p, mean, size in zip(params, m, step_sizes(group, v, steps, found_inf), strict=True):
            if shards:
                size = size[block_numbers(p, len(size), shards)]  # one for each row of this process
            shape = len(size), p.numel() // (len(p) if shards else len(size))
            local_shard(p).view(shape).addcmul_(mean.view(shape), size[:, None], value=-1)


def step_sizes(group, v: list, steps: list, found_inf) -> list:
    """η / ((1 − β₁ᵗ) (√v̂ + ε)) of each block, shaped as v; 0 where found_inf is true."""
    beta1, beta2 = group["betas"]
    t = torch.stack(steps).clamp(min=1)  # 0 if no step had finite gradients so far
    sizes = torch._foreach_div(v, (1 - beta2**t).unbind())
    torch._foreach_sqrt_(sizes)
    torch._foreach_add_(sizes, group["eps"])
    torch._foreach_mul_(sizes, (1 - beta1**t).unbind())
    torch._foreach_reciprocal_(sizes)
    torch._foreach_mul_(sizes, group["lr"] * one_if_finite(found_inf))
    return sizes


def mean_squares(params: list, grads: list, v: list, shards) -> list:
    """The mean of g² over each block, shaped as v. Under FSDP2 the border between two processes may lie inside a block,
    so they add their sums up, in one message for all parameters."""
    norm, sums = torch.linalg.vector_norm, []
    if not shards:
        blocks = [g.reshape(len(s), -1) for g, s in zip(grads, v, strict=True)]
        return [norm(g, dim=1).square() / g.shape[1] for g in blocks]
    for p, g, s in zip(params, grads, v, strict=True):
        row_sums = norm(g.reshape(len(g), p.numel() // len(p)), dim=1).square()
        own, block = shard_rows(len(p), shards), len(p) // len(s)
        before, after = own.start % block, -own.stop % block  # rows on other processes, of this one's outer blocks
        block_sums = F.pad(row_sums, (before, after)).view(-1, block).sum(1)  # in a fixed order, on a GPU too
        first = own.start // block
        sums.append(F.pad(block_sums, (first, len(s) - first - len(block_sums))))
    all_sums = torch.cat(sums)
    dist.all_reduce(all_sums, group=shards)
    parts = all_sums.split([len(s) for s in v])
    return [part * (len(part) / p.numel()) for part, p in zip(parts, params, strict=True)]


def block_numbers(p, n: int, shards) -> torch.Tensor:
    """(rows of this process,): which of the n blocks of p each of them belongs to."""
    rows = shard_rows(len(p), shards)
    return torch.arange(rows.start, rows.stop, device=p.device) // (len(p) // n)


PAPER_RATIOS = RATIOS | {"emb": 4.0, "qk": 1.0, "ffn": 4.0}  # arXiv 2502.19002
DEFAULTS = dict(learning_rate=6e-4, weight_decay=0.1)
register("adam_mini", options, state, step, defaults=DEFAULTS, ratios=PAPER_RATIOS)
