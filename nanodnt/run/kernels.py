"""Which of the faster ways to compute compiled code takes. Triton operators are tried first."""

from functools import cache

import torch

from layers import loss
from nanodnt.files import reason_of

# {value of the flag: {name for `Runtime.kernels`: least compute capability}}
KERNELS = {"off": {}, "auto": dict(cross_entropy=(8, 0), qkv=(8, 0))}
KERNELS["all"] = KERNELS["auto"] | dict(ffn=(9, 0))


def choose_kernels(setting: str, env) -> tuple:
    """(names for `Runtime.kernels`, a text that says which and why) by the flag `kernels`."""
    if env.device.type != "cuda" or torch.version.hip:
        return (), "none (they need an NVIDIA GPU)"
    capability = torch.cuda.get_device_capability(env.device)
    names = []
    for name in possible_kernels(setting, capability, env.dtype):
        if name not in TRIALS or works(name, env.device, env.dtype):
            names.append(name)
    listed = ", ".join(names) or "none"
    return tuple(names), f"{listed} ({setting}, compute capability {capability[0]}.{capability[1]})"


def possible_kernels(setting: str, capability: tuple, dtype: torch.dtype) -> list:
    """The names for GPUs of this compute capability, and products in this dtype: in fp32 FFNs have no kernel."""
    least = KERNELS[setting]
    return [name for name in least if capability >= least[name] and (name != "ffn" or dtype.itemsize == 2)]


@cache
def works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a Triton operator computes in this dtype what plain code does; if not, one warning."""
    reason = "its results are wrong"
    try:
        right = TRIALS[name](device, dtype)
    except Exception as e:  # whatever Triton, or the compiler that it calls, raises
        right = False
        reason = reason_of(e)[:200]
    if not right:
        problem = f"warning: the kernel {name} does not work here ({reason})"
        print(f"{problem}: plain code takes its place", flush=True)
    return right


def try_cross_entropy(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a few long rows have the losses and gradients of plain code in float64."""
    vocab_size = 16_400
    width = 16_448  # more than a program reads at once, and padding
    draws = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, width, generator=draws)).to(dtype)
    targets = torch.tensor([0, vocab_size - 1, 9000, -1])
    exact = loss.cross_entropy(logits.double(), targets, vocab_size, torch.float64, with_grad=True)
    grad = logits.to(device)
    losses = loss.OPERATORS.cross_entropy(grad, targets.to(device), vocab_size)
    # ten roundings of fp32 at most; then the gradient is rounded to `dtype`
    allowed = 16 * torch.finfo(torch.float32).eps
    if not is_near(losses, exact[0][:, 0], allowed):
        return False
    return is_near(grad, exact[1], allowed + torch.finfo(dtype).eps)


def try_ffn(device: torch.device, dtype: torch.dtype, kernels=None) -> bool:
    """Whether the FFN's operators, or these `kernels`, give what plain code gives in float64, but for rounding."""
    from layers.ffn import DERIVATIVES, OPERATORS

    generator, width = torch.Generator().manual_seed(0), 72
    shapes = (300, width), (520, width), (width, 520)  # several tiles, some of which end beyond the matrices
    inputs = [(width**-0.25 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    x, up, down = (t.to(device) for t in inputs)
    exact_x, exact_up, exact_down = (t.double() for t in inputs)
    kernels = kernels or OPERATORS
    allowed = 16 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    right = []
    for act in DERIVATIVES:
        y, slope = kernels.multiply_and_activate(x, up, act)
        product = kernels.multiply_and_scale(x, down, slope)
        exact_y, exact_slope = OPERATORS.multiply_and_activate(exact_x, exact_up, act)
        exact = OPERATORS.multiply_and_scale(exact_x, exact_down, slope.cpu().double())
        right += [is_near(y, exact_y, allowed), is_near(slope, exact_slope, allowed), is_near(product, exact, allowed)]
    return all(right)


def is_near(found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> bool:
    """Whether the largest error is at most this share of the largest entry. NaN is not near."""
    errors = (found.cpu().double() - wanted).abs()
    return bool(errors.max() <= allowed * wanted.abs().max())


TRIALS = dict(cross_entropy=try_cross_entropy, ffn=try_ffn)  # {name of a Triton operator: trial(device, dtype)}
