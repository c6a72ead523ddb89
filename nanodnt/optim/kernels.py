"""The updates of AdamW and SGD, and averages of gradients: by torch's fused kernels, or by plain
operators.

A step clips and skips through two optional arguments of a kernel, `grad_scale` and `found_inf`. The
kernels of MPS in torch 2.11 and 2.12 take both and ignore them. So on every device that is neither
a CPU nor a CUDA GPU plain operators compute the same updates.

On a CUDA GPU, runs that compile make one kernel of the plain operators for each shape of a matrix,
where fused kernels take more passes over memory (docs/optimizers.md has the counts).
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from nanodnt.optim.registry import Group, if_finite, one_if_finite

# Devices whose fused kernels are used. Tests run on the first two; nothing is computed on meta.
FUSED = ("cpu", "cuda", "meta")
# Devices on which a run that compiles does so with updates too. A CPU keeps the bits of the fused
# kernels.
COMPILED = ("cuda",)
LEAST = 1e-300  # is 0 in fp32


def update_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **numbers: float,
) -> None:
    """The equations of adamw.py, in place, and g ← g / grad_scale. `numbers`: lr, beta1, beta2,
    weight_decay, eps."""
    lists = (params, grads, averages, squares, steps)
    if params[0].device.type in FUSED:
        fused_adamw(*lists, grad_scale, found_inf, **numbers)
    else:
        count_step(steps, found_inf)
        update_each(plain_adamw, lists, grad_scale, found_inf, **numbers)


def update_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    compiled: bool = False,
    **numbers: float,
) -> None:
    """In place:

        g ← g / grad_scale;   w ← w (1 − lr λ);   m ← momentum m + g
        w ← w − lr m,  with Nesterov  w ← w − lr (g + momentum m)

    Without momentum m is g, and `momenta` are not used. `numbers`: lr, momentum, nesterov, and
    weight_decay, which is λ. `compiled`: see `can_compile`; then gradients may have another dtype
    than the weights."""
    if compiled or params[0].device.type not in FUSED:
        lists = (params, grads, momenta)
        return update_each(plain_sgd, lists, grad_scale, found_inf, compiled, **numbers)
    # the kernel would add λ w to g, and so to m too
    if numbers["momentum"] and numbers["weight_decay"]:
        shrink = 1 - numbers["lr"] * numbers["weight_decay"]
        if found_inf is not None:
            shrink = torch.where(found_inf, 1.0, shrink)
        torch._foreach_mul_(params, shrink)
        numbers["weight_decay"] = 0.0
    fused_sgd(params, grads, momenta, grad_scale, found_inf, **numbers, dampening=0.0)


def update_averages(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    ahead: list[Tensor] | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    beta: float,
    nesterov: bool,
    compiled: bool,
) -> None:
    """In place:

        g ← g / grad_scale;   m ← β m + (1 − β) g
        u ← m,  with Nesterov  u ← β m + (1 − β) g

    `ahead`: a list of u, of any dtype; empty or None where u is not needed. Where found_inf is
    true, m does not change.

    The trick of the fused kernel: torch's SGD with lr = 0 updates only its buffer, by the first
    line."""
    if compiled or params[0].device.type not in FUSED:
        lists = (grads, averages, ahead or [None] * len(grads))
        numbers = dict(beta=beta, nesterov=nesterov)
        return update_each(plain_average, lists, grad_scale, found_inf, compiled, **numbers)
    fused_sgd(
        params,
        grads,
        averages,
        grad_scale,
        found_inf,
        lr=0.0,
        weight_decay=0.0,
        momentum=beta or LEAST,  # at 0 the kernel would not write m
        dampening=beta,
        nesterov=False,
    )
    if ahead and nesterov:
        torch._foreach_copy_(ahead, torch._foreach_lerp(grads, averages, beta))
    elif ahead:
        torch._foreach_copy_(ahead, averages)


def decay_cautiously(
    group: Group, params: list[Tensor], updates: Iterable[Tensor], found_inf: Tensor | None
) -> float:
    """Cautious weight decay (arXiv 2510.12402, Algorithm 1) where the group has it, a pass before
    the step: p ← p (1 − lr λ) where the update u, which the step subtracts, moves p towards zero: u
    p ≥ 0. Returns the decay that the step has still to do."""
    decay = group["weight_decay"]
    if not group["cautious"] or not decay:
        return decay
    compiled = can_compile(group, params[0])
    rates = dict(lr=group["lr"], weight_decay=decay)
    update_each(masked_decay, (params, updates), None, found_inf, compiled, **rates)
    return 0.0


def count_step(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """t ← t + 1 for each t of `steps`, but not where found_inf is true."""
    if found_inf is None:
        torch._foreach_add_(steps, 1)
    else:  # a list, because the host would wait for a single tensor
        torch._foreach_add_(steps, [one_if_finite(found_inf)] * len(steps))


def can_compile(group: Group, p: Tensor) -> bool:
    """Whether the updates of this group, which holds p, are compiled. Vectors are small: one fused
    kernel takes them all."""
    return group["compiled"] and p.device.type in COMPILED and p.ndim > 1


# ------------------------------------------------------------------------------ torch's kernels


def fused_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **numbers: float,
) -> None:
    adamw(
        params,
        grads,
        averages,
        squares,
        [],
        steps,
        **numbers,
        amsgrad=False,
        maximize=False,
        fused=True,
        grad_scale=as_fp32(grad_scale),
        found_inf=as_fp32(found_inf),
    )


def fused_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **numbers: float,
) -> None:
    sgd(
        params,
        grads,
        momenta,
        **numbers,
        maximize=False,
        fused=True,
        grad_scale=as_fp32(grad_scale),
        found_inf=as_fp32(found_inf),
    )


def as_fp32(number: Tensor | None) -> Tensor | None:
    """The dtype in which torch's fused kernels read `grad_scale` and `found_inf`."""
    return None if number is None else number.float()


# ------------------------------------------------------------------------------ plain operators


def update_each(
    update: Callable,
    lists: tuple[Iterable, ...],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    compiled: bool = False,
    **numbers: float,
) -> None:
    """update(a tensor of each list, grad_scale, found_inf, **numbers) for one parameter after the
    other, eager or `compiled`."""
    if not compiled:
        for tensors in zip(*lists, strict=True):
            update(*tensors, grad_scale, found_inf, **numbers)
        return
    if "lr" in numbers:  # a number would be a constant of the compiled code
        numbers["lr"] = lists[0][0].new_full((), numbers["lr"])
    update = compile_update(update)
    with torch._dynamo.config.patch(recompile_limit=10_000):  # a model may have many shapes
        for tensors in zip(*lists, strict=True):
            update(*tensors, grad_scale, found_inf, **numbers)


@cache
def compile_update(update: Callable) -> Callable:
    return torch.compile(update, dynamic=False)


def plain_adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """AdamW after t ← t + 1. Where v has one number for each row of a matrix g, it averages g² over
    the row."""
    if grad_scale is not None:
        g.div_(grad_scale)
    square = g.square()
    if v.shape != g.shape:
        square = square.mean(1, keepdim=True)
    set_if_finite(m, m.lerp(g, 1 - beta1), found_inf)
    set_if_finite(v, v.lerp(square, 1 - beta2), found_inf)
    size = (v / (1 - beta2**t)).sqrt() + eps
    rate = lr / (1 - beta1**t) / size
    set_if_finite(p, p * (1 - lr * weight_decay) - rate * m, found_inf)


# Muon updates its momentum by plain_average and its weights by plain_sgd. In both, no sum has two
# products, of which a compiler might fuse either. So kernels of other shapes, or without u, round
# alike, and the bits do not depend on the number of processes.


def plain_sgd(
    p: Tensor,
    g: Tensor,
    m: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> None:
    if grad_scale is not None:
        g.div_(grad_scale)
    direction = g
    if momentum:
        average = g + momentum * m
        set_if_finite(m, average, found_inf)
        direction = g + momentum * average if nesterov else average
    set_if_finite(p, p - lr * (direction + weight_decay * p), found_inf)


def masked_decay(
    p: Tensor,
    u: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    shrinks = p.sign().mul_(u).ge_(0)  # 1 or 0; products of tiny u and p would be 0
    p.mul_(shrinks.mul_(-lr * weight_decay * one_if_finite(found_inf)).add_(1))


def plain_average(
    g: Tensor,
    m: Tensor,
    u: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    beta: float,
    nesterov: bool,
) -> None:
    if grad_scale is not None:
        g.div_(grad_scale)
    average = m.lerp(g, 1 - beta)
    set_if_finite(m, average, found_inf)
    if u is not None:
        u.copy_(g.lerp(average, beta) if nesterov else average)


def set_if_finite(tensor: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """tensor ← new, but not where found_inf is true, whatever `new` is then."""
    tensor.copy_(if_finite(found_inf, new, tensor))
