"""Adam-mini (version 1.1.0 of its authors' code): AdamW with one second moment for each block of a
parameter.

    w ← w (1 − ηλ);   m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) mean(g² over the block)
    w ← w − η m̂ / (√v̂ + ε)

m̂ and v̂ are m / (1 − β₁ᵗ) and v / (1 − β₂ᵗ); ε is adam_eps. Blocks: the rows of one head for q and
k; each row (an output neuron, a token) for other matrices (our choice for positions, routers,
experts and patches); the tensor for all other parameters. State: 4 bytes a parameter and 4 a block.
Defaults: AdamW's, as its authors recommend.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from layers.roles import MATRICES
from layers.sharding import own_part, shard_group
from model import Transformer
from nanodnt.optim.kernels import can_compile, count_step, plain_adamw, update_averages, update_each
from nanodnt.optim.registry import (
    RATIOS,
    Group,
    State,
    Work,
    if_finite,
    local_shards,
    one_if_finite,
    refuse,
    register,
)
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    rows = 0  # the tensor is one block
    if role == "qk":
        rows = model.config.head_dim
    elif role in MATRICES:
        rows = 1
    return Group(betas=(config.beta1, config.beta2), eps=config.adam_eps, block_rows=rows)


def state(p: Tensor, group: Group) -> State:
    n = row_count(p)
    rows = group["block_rows"] or n
    if n % rows:
        refuse(f"Adam-mini: a tensor of {n} rows does not divide into blocks of {rows}")
    v = torch.zeros(n // rows, dtype=p.dtype, device=p.device)
    return dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), block_sq=v)


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    for part in work:
        count_step([s["step"] for s in part.states], found_inf)
        if can_compile(part.group, part.params[0]) and not shard_group(part.params[0]):
            compiled_step(part, grad_scale, found_inf)
        else:
            blockwise_step(part, grad_scale, found_inf)


def compiled_step(part: Work, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """AdamW of matrices whose rows are the blocks, with one v each."""
    group, params, grads, states = part
    m = [s["exp_avg"] for s in states]
    v = [s["block_sq"] for s in states]
    lists = []
    for tensors in (params, grads, m, v):
        lists.append([t.view(len(x), -1) for t, x in zip(tensors, v, strict=True)])
    beta1, beta2 = group["betas"]
    update_each(
        plain_adamw,
        (*lists, [s["step"] for s in states]),
        grad_scale,
        found_inf,
        True,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        beta1=beta1,
        beta2=beta2,
    )


def blockwise_step(part: Work, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """The same for blocks of any size and for shards."""
    group, params, grads, states = part
    beta1, beta2 = group["betas"]
    m = [s["exp_avg"] for s in states]
    v = [s["block_sq"] for s in states]
    update_averages(
        local_shards(params),
        local_shards(grads),
        local_shards(m),
        None,
        grad_scale,
        found_inf,
        beta=beta1,
        nesterov=False,
        compiled=can_compile(group, params[0]),
    )
    # v of all blocks of the group, one after the other
    counts = [len(x) for x in v]
    averages = torch.cat(v)
    squares = mean_squares(group, params, grads, counts)
    averages.lerp_(if_finite(found_inf, squares, averages), 1 - beta2)
    torch._foreach_copy_(v, averages.split(counts))
    taken = one_if_finite(found_inf)
    if group["weight_decay"]:
        shrink = 1 - group["lr"] * group["weight_decay"] * taken
        torch._foreach_mul_(local_shards(params), shrink)
    steps = [s["step"].expand(n) for s, n in zip(states, counts, strict=True)]
    t = torch.cat(steps).clamp(min=1)  # it is 0 where no gradient was finite yet
    sizes = averages.div_(1 - beta2**t).sqrt_().add_(group["eps"]).mul_(1 - beta1**t).reciprocal_()
    subtract(group, params, m, sizes.mul_(group["lr"] * taken))


def mean_squares(
    group: Group, params: list[Tensor], grads: list[Tensor], counts: list[int]
) -> Tensor:
    """(number of blocks,): the mean of g² over each block, for all parameters one after the other.
    `counts`: number of blocks of each parameter. Under FSDP2 processes add up their parts, in one
    message."""
    rows = group["block_rows"]
    shards = shard_group(params[0])
    norms = norms_of(local_shards(grads), by_row=rows > 0)
    # a block may lie on several processes, so norms of all rows are sent: 0 for rows of others
    if rows and shards:
        own_norms = norms
        row_counts = [row_count(p) for p in params]
        norms = own_norms[0].new_zeros(sum(row_counts)).split(row_counts)
        by_row = zip(params, norms, strict=True)
        own_parts = [own_part(part.view(p.shape[:-1]), p) for p, part in by_row]
        torch._foreach_copy_(own_parts, own_norms)
    squares = torch.cat([norm.view(-1) for norm in norms]).square()
    if shards:
        dist.all_reduce(squares, group=shards)
    squares = squares.view(-1, rows or 1).sum(1)
    block_sizes = [p.numel() / n for p, n in zip(params, counts, strict=True)]
    torch._foreach_div_(list(squares.split(counts)), block_sizes)
    return squares


def norms_of(tensors: list[Tensor], by_row: bool) -> list[Tensor]:
    """The norm of each tensor, (), or of each of its rows."""
    if by_row:
        return [torch.linalg.vector_norm(t, dim=-1) for t in tensors]
    return list(torch._foreach_norm(tensors))


def subtract(group: Group, params: list[Tensor], m: list[Tensor], sizes: Tensor) -> None:
    """w ← w − size · m, where `sizes` (number of blocks,) has one size for each block."""
    rows = group["block_rows"]
    weights = local_shards(params)
    means = local_shards(m)
    # One operator for each matrix: those on lists of tensors would need a size for each entry.
    if rows:
        row_sizes = sizes.repeat_interleave(rows).split([row_count(p) for p in params])
        for p, w, mean, size in zip(params, weights, means, row_sizes, strict=True):
            size = own_part(size.view(p.shape[:-1]), p)
            w.addcmul_(mean, size[..., None], value=-1)
        return
    counts = [mean.numel() for mean in means]
    steps = torch.cat([size.expand(n) for size, n in zip(sizes.unbind(), counts, strict=True)])
    steps.mul_(torch.cat([mean.flatten() for mean in means]))
    parts = zip(steps.split(counts), weights, strict=True)
    torch._foreach_sub_(weights, [part.view_as(w) for part, w in parts])


def row_count(p: Tensor) -> int:
    """The rows of a matrix, or of all matrices of a stack; of other tensors the entries."""
    return p.shape[:-1].numel() if p.ndim > 1 else len(p)


register(
    "adam_mini",
    options,
    state,
    step,
    defaults=dict(learning_rate=6e-4, weight_decay=0.1, adam_eps=1e-8),
    ratios=RATIOS | {"emb": 4.0, "qk": 1.0, "ffn": 4.0},  # arXiv 2502.19002, A.3
)
