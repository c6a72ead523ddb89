"""Adam-mini (version 1.1.0 of its authors' code): AdamW with one second moment for each block of a
parameter.

    w ← w (1 − ηλ);   m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) mean(g² over the block);   w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε = 1e-8. Blocks: the rows of one head for q and k;
each row (an output neuron, a token) for other matrices (our choice for positions, routers, experts
and patches); the tensor for all else. State: 4 bytes a parameter and 4 a block. Defaults: AdamW's,
as its authors recommend.
"""

import torch
import torch.distributed as dist

from layers.roles import MATRICES
from layers.sharding import local_shard, own_rows, shard_dim, shard_group
from nanodnt.optim.kernels import can_compile, count_step, plain_adamw, update_averages, update_each
from nanodnt.optim.registry import RATIOS, if_finite, one_if_finite, register


def options(config, role, model):
    # of a block; 0: of the tensor
    rows = model.config.head_dim if role == "qk" else 1 if role in MATRICES else 0
    return dict(betas=(config.beta1, config.beta2), eps=1e-8, block_rows=rows)


def state(p, group):
    n = row_count(p)
    rows = group["block_rows"] or n
    if n % rows:
        raise ValueError(f"Adam-mini: a tensor of {n} rows does not divide into blocks of {rows}")
    v = torch.zeros(n // rows, dtype=p.dtype, device=p.device)
    return dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), block_sq=v)


def step(work, grad_scale, found_inf):
    taken = one_if_finite(found_inf)
    for group, params, grads, states in work:
        beta1, beta2 = group["betas"]
        m, v, steps = ([s[key] for s in states] for key in ("exp_avg", "block_sq", "step"))
        count_step(steps, found_inf)
        compiled = can_compile(group, params[0])
        # AdamW of matrices whose rows are blocks, with one v each
        if compiled and not shard_group(params[0]):
            lists = [
                [t.view(len(x), -1) for t, x in zip(tensors, v, strict=True)]
                for tensors in (params, grads, m, v)
            ]
            numbers = {key: group[key] for key in ("lr", "weight_decay", "eps")} | dict(
                beta1=beta1, beta2=beta2
            )
            update_each(plain_adamw, (*lists, steps), grad_scale, found_inf, compiled, **numbers)
            continue
        own, how = (
            (list(map(local_shard, ts)) for ts in (params, grads, m)),
            dict(nesterov=False, compiled=compiled),
        )
        update_averages(*own, None, grad_scale, found_inf, beta=beta1, **how)
        # of all blocks of the group, one after the other
        averages, counts = torch.cat(v), list(map(len, v))
        averages.lerp_(
            if_finite(found_inf, mean_squares(group, params, grads, counts), averages), 1 - beta2
        )
        torch._foreach_copy_(v, averages.split(counts))
        if group["weight_decay"]:
            shrink = 1 - group["lr"] * group["weight_decay"] * taken
            torch._foreach_mul_(list(map(local_shard, params)), shrink)
        # 0: none was finite yet
        t = torch.cat([s.expand(n) for s, n in zip(steps, counts, strict=True)]).clamp(min=1)
        sizes = (
            averages.div_(1 - beta2**t).sqrt_().add_(group["eps"]).mul_(1 - beta1**t).reciprocal_()
        )
        subtract(group, params, m, sizes.mul_(group["lr"] * taken))


def mean_squares(group, params: list, grads: list, counts: list) -> torch.Tensor:
    """(number of blocks,): the mean of g² over each block, for all parameters one after the other.
    `counts`: the blocks of each. Under FSDP2 processes add up their parts, in one message."""
    rows, shards, grads = group["block_rows"], shard_group(params[0]), list(map(local_shard, grads))
    norms = (
        [torch.linalg.vector_norm(g, dim=-1) for g in grads] if rows else torch._foreach_norm(grads)
    )
    # of all rows, since a block may lie on several processes; 0 for those of other processes
    if rows and shards:
        row_counts = list(map(row_count, params))
        own, norms = norms, grads[0].new_zeros(sum(row_counts)).split(row_counts)
        torch._foreach_copy_(
            [own_part(part, p) for p, part in zip(params, norms, strict=True)], own
        )
    squares = torch.cat([norm.view(-1) for norm in norms]).square()
    if shards:
        dist.all_reduce(squares, group=shards)
    squares = squares.view(-1, rows or 1).sum(1)
    torch._foreach_div_(
        list(squares.split(counts)), [p.numel() / n for p, n in zip(params, counts, strict=True)]
    )
    return squares


def subtract(group, params: list, m: list, sizes) -> None:
    """w ← w − size · m, with the size of the block, of `sizes` (number of blocks,)."""
    rows, own, m = group["block_rows"], list(map(local_shard, params)), list(map(local_shard, m))
    # one operator for each matrix: those on lists of tensors would need sizes written out for each
    # entry
    if rows:
        of_rows = sizes.repeat_interleave(rows).split(list(map(row_count, params)))
        for p, w, mean, size in zip(params, own, m, of_rows, strict=True):
            w.addcmul_(mean, own_part(size, p)[..., None], value=-1)
    else:
        counts = [mean.numel() for mean in m]
        steps = torch.cat([size.expand(n) for size, n in zip(sizes.unbind(), counts, strict=True)])
        steps.mul_(torch.cat([mean.flatten() for mean in m]))
        parts = [part.view_as(w) for part, w in zip(steps.split(counts), own, strict=True)]
        torch._foreach_sub_(own, parts)


def row_count(p) -> int:
    """The rows of a matrix, or of all matrices of a stack; of other tensors the entries."""
    return p.shape[:-1].numel() if p.ndim > 1 else len(p)


def own_part(of_rows, p) -> torch.Tensor:
    """Of a number for each row of p (`row_count`), those of the rows that this process holds: a
    view."""
    rows = own_rows(p)
    return of_rows.view(p.shape[:-1]).narrow(shard_dim(p), rows.start, len(rows))


PAPER_RATIOS = RATIOS | {"emb": 4.0, "qk": 1.0, "ffn": 4.0}  # arXiv 2502.19002, A.3
register(
    "adam_mini",
    options,
    state,
    step,
    defaults=dict(learning_rate=6e-4, weight_decay=0.1),
    ratios=PAPER_RATIOS,
)
