"""One step of Muon, one shape of matrices after the other: average the gradients, collect whole
matrices, orthogonalise them, spread the results, apply them.

With several processes each matrix has an owner, the rank that orthogonalises it. How matrices are
collected and results spread is in messages.py.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layers.sharding import is_sharded, local_shard, own_part, shard_dim
from nanodnt.optim.kernels import can_compile, decay_cautiously, update_averages, update_sgd
from nanodnt.optim.orthogonal.messages import (
    Alone,
    Batch,
    Matrix,
    all_rows,
    assign_owners,
    choose_processes,
)
from nanodnt.optim.orthogonal.newton_schulz import orthogonalize, split_into_stacks, stack_as
from nanodnt.optim.registry import State, Work, if_finite


def update_matrices(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Muon's `step`, see registry.py."""
    processes = choose_processes(work[0].params[0])
    started = []  # functions that apply the updates of a batch
    for batch in make_batches(work, processes):
        started.append(start_update(batch, processes, grad_scale, found_inf))
        if len(started) > processes.batches_under_way:
            started.pop(0)()
    for apply in started:
        apply()


def start_update(
    batch: Batch, processes: Alone, grad_scale: Tensor | None, found_inf: Tensor | None
) -> Callable[[], None]:
    """Everything but the last step, which the returned function does: apply the updates."""
    averages = average(batch, processes, grad_scale, found_inf)
    matrices = processes.collect(batch, averages)
    steps = batch.group["ns_steps"]
    coefficients = batch.group["coefficients"]
    stacks = split_into_stacks(matrices, batch.p)
    updates = [orthogonalize(stack, steps, coefficients) for stack in stacks]
    receive = processes.spread(batch, updates)
    return lambda: apply_updates(batch, receive(), found_inf)


def make_batches(work: list[Work], processes: Alone) -> Iterator[Batch]:
    """Yield the matrices of each group and shape, or parts of these."""
    groups = [(part.group, split_by_rows(part)) for part in work]
    params = [p for _, triples in groups for p, _, _ in triples]
    owners = iter(assign_owners(tuple(map(shape_of_work, params)), processes.count))
    for group, triples in groups:
        by_shape = {}
        for p, grad, state in triples:
            local = {key: local_shard(t) for key, t in state.items()}
            matrix = Matrix(next(owners), p, local_shard(grad), local)
            by_shape.setdefault(p.shape, []).append(matrix)
        for matrices in by_shape.values():
            yield from processes.split(Batch(group, matrices))


def split_by_rows(part: Work) -> list[tuple[Tensor, Tensor, State]]:
    """(parameter, gradient, state) of each parameter; of each of its matrices where FSDP2 splits a
    stack by the rows of the matrices."""
    triples = []
    for p, grad, state in zip(part.params, part.grads, part.states, strict=True):
        if shard_dim(p) == 0:
            triples.append((p, grad, state))
            continue
        for i in range(len(p)):
            triples.append((p[i], grad[i], {key: t[i] for key, t in state.items()}))
    return triples


def shape_of_work(p: Tensor) -> tuple[int, ...]:
    """The shape by which an owner is chosen. A sharded stack has an owner too, but no work for it:
    its matrices stay where they are."""
    if p.ndim > 2 and is_sharded(p):
        return (0, *p.shape[1:])
    return tuple(p.shape)


def average(
    batch: Batch, processes: Alone, grad_scale: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """Average the gradients. Returns u of the matrices that this process needs, or of its rows of
    them, as one stack in the dtype of the iteration."""
    needed = [x for x in batch.matrices if processes.needs(x)]
    others = [x for x in batch.matrices if not processes.needs(x)]
    shape = batch.matrices[0].grad.shape
    stack = batch.matrices[0].grad.new_empty((len(needed), *shape), dtype=batch.dtype)
    for matrices, ahead in ((others, []), (needed, list(stack))):
        if not matrices:
            continue
        params = [local_shard(x.p) for x in matrices]
        update_averages(
            params,
            [x.grad for x in matrices],
            [x.state["momentum_buffer"] for x in matrices],
            ahead,
            grad_scale,
            found_inf,
            beta=batch.group["momentum"],
            nesterov=batch.group["nesterov"],
            compiled=can_compile(batch.group, params[0]),
        )
    return stack


def apply_updates(batch: Batch, updates: Tensor | list[Tensor], found_inf: Tensor | None) -> None:
    """w ← w (1 − ηλ) − η s update, for this process's rows of every matrix. Where found_inf is
    true, updates may hold anything."""
    group = batch.group
    rows, columns = batch.p.shape[-2:]
    size = 0.2 * max(rows, columns) ** 0.5
    if group["adjust_lr"] == "original":
        size = max(1, rows / columns) ** 0.5
    compiled = can_compile(group, batch.p)
    pairs = list(zip(batch.matrices, updates, strict=True))
    for part in split_into_stacks(pairs, batch.p):
        params = [local_shard(matrix.p) for matrix, _ in part]
        steps = [update for _, update in part]
        averages = [m.state["row_squares"] for m, _ in part if "row_squares" in m.state]
        if averages or not compiled:
            steps = stack_as(params[0].dtype, steps)
        if averages:
            normalize_rows(steps, batch, averages, found_inf)
        steps = list(steps)
        decay = decay_cautiously(group, params, steps, found_inf)
        update_sgd(
            params,
            steps,
            [None] * len(params),
            None,
            found_inf,
            compiled,
            lr=group["lr"] * size,
            weight_decay=decay / size,
            momentum=0.0,
            nesterov=False,
        )


def normalize_rows(
    stack: Tensor, batch: Batch, averages: list[Tensor], found_inf: Tensor | None
) -> None:
    """NorMuon (arXiv 2510.05491). In place, for this process's rows of each update O of `stack`,
    with r rows and c columns; `averages` are their v, of all rows:

        v ← β₂ v + (1 − β₂) mean of O² over the columns;   O ← O / (√v + 1e-10)

    and then back to the norm that O had or, with match_rms_adamw, to √min(r, c): this is the norm
    of an orthogonal matrix, so that the step has an RMS of exactly 0.2 η."""
    group = batch.group
    rows, columns = batch.p.shape[-2:]
    squares = all_rows(torch.linalg.vector_norm(stack, dim=-1).square() / columns, batch.p)
    v = torch.stack(averages)
    v.lerp_(if_finite(found_inf, squares, v), 1 - group["row_beta"])
    torch._foreach_copy_(averages, list(v))
    sizes = v.sqrt() + 1e-10
    norm = (squares / sizes.square()).sum(-1, keepdim=True)  # both norms are squared, over columns
    target = squares.sum(-1, keepdim=True)
    if group["adjust_lr"] == "match_rms_adamw":
        target = min(1, rows / columns)
    factors = (target / norm.clamp(min=1e-12)).sqrt() / sizes
    stack.mul_(own_part(factors, batch.p)[..., None])
