"""The updates of AdamW and SGD, and averages of gradients: by torch's fused kernels, or by plain
operators.

A step clips and skips through two optional arguments of a kernel, `grad_scale` and `found_inf`. The
kernels of MPS in torch 2.11 and 2.12 take both and ignore them. So on every device that is neither
a CPU nor a CUDA GPU plain operators compute the same.

On a CUDA GPU, runs that compile make one kernel of the plain operators for each shape of a matrix,
where fused kernels take more passes over memory (docs/optimizers.md has the counts).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from nanodnt.optim.registry import if_finite, one_if_finite

# the first two are what the tests run on; nothing is computed on meta
FUSED = ("cpu", "cuda", "meta")
# a run that compiles does so with updates too; a CPU keeps the bits of the fused kernels
COMPILED = ("cuda",)


def update_adamw(params, grads, averages, squares, steps, grad_scale, found_inf, **numbers) -> None:
    """The equations of adamw.py, in place, also g ← g / grad_scale. All but the last three are
    lists of tensors; `numbers`: lr, beta1, beta2, weight_decay, eps."""
    lists = params, grads, averages, squares, steps
    if params[0].device.type in FUSED:
        fused_adamw(*lists, grad_scale, found_inf, **numbers)
    else:
        count_step(steps, found_inf)
        update_each(plain_adamw, lists, grad_scale, found_inf, **numbers)


def update_sgd(
    params, grads, momenta, grad_scale, found_inf, compiled: bool = False, **numbers
) -> None:
    """In place:  g ← g / grad_scale;  w ← w (1 − lr λ);  m ← momentum m + g;  w ← w − lr m, with Nesterov
    w ← w − lr (g + momentum m). Without momentum m is g, and `momenta` are not used.
    `numbers`: lr, momentum, nesterov, weight_decay, which is λ. `compiled`: of `can_compile`; then gradients may be of
    another dtype than the weights."""
    if compiled or params[0].device.type not in FUSED:
        return update_each(
            plain_sgd, (params, grads, momenta), grad_scale, found_inf, compiled, **numbers
        )
    # the kernel would add λ w to g, and so to m too
    if numbers["momentum"] and numbers["weight_decay"]:
        shrink = 1 - numbers["lr"] * numbers["weight_decay"]
        torch._foreach_mul_(
            params, shrink if found_inf is None else torch.where(found_inf, 1.0, shrink)
        )
        numbers["weight_decay"] = 0.0
    fused_sgd(params, grads, momenta, grad_scale, found_inf, **numbers, dampening=0.0)


def update_averages(
    params,
    grads,
    averages,
    ahead,
    grad_scale,
    found_inf,
    *,
    beta: float,
    nesterov: bool,
    compiled: bool,
) -> None:
    """In place:  g ← g / grad_scale;  m ← β m + (1 − β) g;  u ← β m + (1 − β) g with Nesterov, else u ← m. `ahead`: a
    list of u, of any dtype; none where they are not needed. Where found_inf is true, m does not change.

    SGD does the first two before it updates the weights: w ← w − lr m. With lr = 0 they stay as
    they are."""
    if compiled or params[0].device.type not in FUSED:
        lists = grads, averages, ahead or [None] * len(grads)
        return update_each(
            plain_average, lists, grad_scale, found_inf, compiled, beta=beta, nesterov=nesterov
        )
    momentum = beta or 1e-300  # at 0 the kernel would not write m; 1e-300 is 0 in fp32
    numbers = dict(lr=0.0, weight_decay=0.0, momentum=momentum, dampening=beta, nesterov=False)
    fused_sgd(params, grads, averages, grad_scale, found_inf, **numbers)
    if ahead:
        torch._foreach_copy_(
            ahead, torch._foreach_lerp(grads, averages, beta) if nesterov else averages
        )


def count_step(steps: list, found_inf) -> None:
    """t ← t + 1 for each t of `steps`, but not where found_inf is true."""
    # a list, because a single tensor would make the host wait for it
    torch._foreach_add_(steps, 1 if found_inf is None else [one_if_finite(found_inf)] * len(steps))


def can_compile(group: dict, p) -> bool:
    """Whether the updates of this group, of which p is a parameter, are compiled. Vectors are
    small: one fused kernel takes them all."""
    return group["compiled"] and p.device.type in COMPILED and p.ndim > 1


# ------------------------------------------------------------------------------------------------- torch's kernels


def fused_adamw(params, grads, averages, squares, steps, grad_scale, found_inf, **numbers) -> None:
    how = dict(amsgrad=False, maximize=False) | for_kernel(grad_scale, found_inf)
    adamw(params, grads, averages, squares, [], steps, **numbers, **how)


def fused_sgd(params, grads, momenta, grad_scale, found_inf, **numbers) -> None:
    sgd(params, grads, momenta, **numbers, maximize=False, **for_kernel(grad_scale, found_inf))


def for_kernel(grad_scale, found_inf) -> dict:
    """The arguments of torch's fused kernels that make them follow both. They read fp32 numbers."""
    numbers = dict(grad_scale=grad_scale, found_inf=found_inf)
    as_fp32 = {key: None if number is None else number.float() for key, number in numbers.items()}
    return dict(fused=True, **as_fp32)


# ------------------------------------------------------------------------------------------------- plain operators


def update_each(
    update: Callable, lists: tuple, grad_scale, found_inf, compiled: bool = False, **numbers
) -> None:
    """update(a tensor of each list, grad_scale, found_inf, **numbers) for one parameter after the
    other, as it is or `compiled`."""
    if compiled and "lr" in numbers:  # for each number it would be compiled anew
        numbers["lr"] = lists[0][0].new_full((), numbers["lr"])
    update = compile_update(update) if compiled else update
    # a model may have more shapes than torch expects
    with torch._dynamo.config.patch(recompile_limit=10_000) if compiled else nullcontext():
        for tensors in zip(*lists, strict=True):
            update(*tensors, grad_scale, found_inf, **numbers)


@cache
def compile_update(update: Callable) -> Callable:
    return torch.compile(update, dynamic=False)


def plain_adamw(
    p, g, m, v, t, grad_scale, found_inf, *, lr, beta1, beta2, weight_decay, eps
) -> None:
    """AdamW, but for t ← t + 1. Where v has one number for each row of a matrix g, that averages g²
    over the row."""
    if grad_scale is not None:
        g.div_(grad_scale)
    square = g.square() if v.shape == g.shape else g.square().mean(1, keepdim=True)
    set_if_finite(m, m.lerp(g, 1 - beta1), found_inf)
    set_if_finite(v, v.lerp(square, 1 - beta2), found_inf)
    size = (v / (1 - beta2**t)).sqrt() + eps
    rate = lr / (1 - beta1**t) / size
    set_if_finite(p, p * (1 - lr * weight_decay) - rate * m, found_inf)


# Muon's two: no sum has two products, of which a compiler might fuse either. So kernels of other
# shapes, or without u, round alike, and the bits do not depend on the number of processes.


def plain_sgd(p, g, m, grad_scale, found_inf, *, lr, momentum, nesterov, weight_decay) -> None:
    if grad_scale is not None:
        g.div_(grad_scale)
    direction = g
    if momentum:
        average = g + momentum * m
        set_if_finite(m, average, found_inf)
        direction = g + momentum * average if nesterov else average
    set_if_finite(p, p - lr * (direction + weight_decay * p), found_inf)


def plain_average(g, m, u, grad_scale, found_inf, *, beta, nesterov) -> None:
    if grad_scale is not None:
        g.div_(grad_scale)
    average = m.lerp(g, 1 - beta)
    set_if_finite(m, average, found_inf)
    if u is not None:
        u.copy_(g.lerp(average, beta) if nesterov else average)


def set_if_finite(tensor, new, found_inf) -> None:
    """tensor ← new, but not where found_inf is true, whatever `new` is then."""
    tensor.copy_(if_finite(found_inf, new, tensor))
