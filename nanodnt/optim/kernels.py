"""The updates of AdamW and SGD, by torch's fused kernels where these do all that we rely on.

A step clips and skips through two optional arguments of a kernel, `grad_scale` and `found_inf`. The kernels of MPS in
torch 2.11 and 2.12 take both and ignore them. So on every device that is neither a CPU nor a CUDA GPU each kernel is
tried on one number; where it ignores an argument, or does not exist, plain operators compute the same.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from layers.sharding import local_shard
from nanodnt.optim.registry import divide_gradients, if_finite

TRUSTED = ("cpu", "cuda", "meta")  # the first two are what the tests run on; nothing is computed on meta
NO_DECAY = dict(weight_decay=0.0)  # SGD's decay is added to the gradient, which is not what our rules do


def update_adamw(params, grads, averages, squares, steps, grad_scale, found_inf, **numbers) -> None:
    """The equations of adamw.py, in place, also g ← g / grad_scale. All but the last three are lists of tensors;
    `numbers`: lr, beta1, beta2, weight_decay, eps."""
    update = fused_adamw if can_use(fused_adamw, params[0].device) else plain_adamw
    update(params, grads, averages, squares, steps, grad_scale, found_inf, **numbers)


def update_sgd(params, grads, momenta, grad_scale, found_inf, **numbers) -> None:
    """In place:  g ← g / grad_scale;  m ← momentum m + (1 − dampening) (g + λ w);  w ← w − lr m, with Nesterov
    w ← w − lr (g + λ w + momentum m). Without momentum m is g + λ w, and `momenta` are not used.
    `numbers`: lr, momentum, dampening, nesterov, weight_decay, which is λ."""
    update = fused_sgd if can_use(fused_sgd, params[0].device) else plain_sgd
    update(params, grads, momenta, grad_scale, found_inf, **numbers)


def average_gradients(params: list, grads: list, averages: list, beta: float, grad_scale, found_inf) -> None:
    """g ← g / grad_scale;  m ← β m + (1 − β) g, in one pass. Where found_inf is true, nothing changes.

    SGD does just this before it updates the weights: w ← w − lr m. With lr = 0 they stay as they are."""
    params, grads, averages = (list(map(local_shard, tensors)) for tensors in (params, grads, averages))
    momentum = beta or 1e-300  # at 0 the kernel would not write m; 1e-300 is 0 in fp32
    numbers = dict(lr=0.0, momentum=momentum, dampening=beta, nesterov=False)
    update_sgd(params, grads, averages, grad_scale, found_inf, **numbers, **NO_DECAY)


def plain_kernels(device: torch.device) -> list:
    """The updates for which plain operators are used on this device, by name."""
    updates = {"AdamW": fused_adamw, "SGD": fused_sgd}
    return [name for name, update in updates.items() if not can_use(update, device)]


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


def can_use(update: Callable, device: torch.device) -> bool:
    """Whether a fused update follows grad_scale and found_inf on this device."""
    return device.type in TRUSTED or follows(update, device)


@cache
def follows(update: Callable, device: torch.device) -> bool:
    """`can_use`, by steps on one number."""
    if update is fused_adamw:
        state, numbers = [0.0, 0.0, 0.0], dict(beta1=0.5, beta2=0.5, eps=1e-8)
    else:
        state, numbers = [0.0], dict(momentum=0.5, dampening=0.0, nesterov=False)

    def step(gradient: float, grad_scale, found_inf) -> list:
        """Parameter, gradient and state after a step, all of which change in it."""
        tensors = [torch.tensor(x, device=device) for x in (1.0, gradient, *state)]
        lists = [[tensor] for tensor in tensors]
        update(*lists, grad_scale, found_inf, lr=1.0, weight_decay=0.0, **numbers)
        return [tensor.item() for tensor in tensors]

    zero, one, two = (torch.tensor(x, device=device) for x in (0.0, 1.0, 2.0))
    try:
        divides = step(1.0, two, zero) == step(0.5, None, None)
        return divides and step(1.0, one, one) == [1.0, 1.0, *state]
    except RuntimeError:  # NotImplementedError is one: there is no such kernel
        return False


# ------------------------------------------------------------------------------------------------- plain operators


def plain_adamw(
    params, grads, averages, squares, steps, grad_scale, found_inf, *, lr, beta1, beta2, weight_decay, eps
) -> None:
    divide_gradients(grads, grad_scale)
    for p, g, m, v, t in zip(params, grads, averages, squares, steps, strict=True):
        set_if_finite(t, t + 1, found_inf)
        set_if_finite(m, beta1 * m + (1 - beta1) * g, found_inf)
        set_if_finite(v, beta2 * v + (1 - beta2) * g.square(), found_inf)
        size = (v / (1 - beta2**t)).sqrt() + eps
        change = lr / (1 - beta1**t) * m / size
        set_if_finite(p, p * (1 - lr * weight_decay) - change, found_inf)


def plain_sgd(
    params, grads, momenta, grad_scale, found_inf, *, lr, momentum, dampening, nesterov, weight_decay
) -> None:
    divide_gradients(grads, grad_scale)
    for p, g, m in zip(params, grads, momenta, strict=True):
        direction = g + weight_decay * p
        if momentum:
            average = momentum * m + (1 - dampening) * direction
            set_if_finite(m, average, found_inf)
            direction = direction + momentum * average if nesterov else average
        set_if_finite(p, p - lr * direction, found_inf)


def set_if_finite(tensor, new, found_inf) -> None:
    """tensor ← new, but not where found_inf is true, whatever `new` is then."""
    tensor.copy_(if_finite(found_inf, new, tensor))
