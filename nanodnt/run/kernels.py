"""Which faster ways to compute the compiled code uses. Triton operators are tried first."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from layers import loss
from nanodnt.files import reason_of
from nanodnt.run.hardware import Choice

# {value of the flag `kernels`: {name in `Runtime.kernels`: least compute capability}}
KERNELS = {
    "off": {},
    "auto": {"cross_entropy": (8, 0), "qkv": (8, 0)},
    "all": {"cross_entropy": (8, 0), "qkv": (8, 0), "ffn": (9, 0)},
}


def choose_kernels(setting: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """The names for `Runtime.kernels`, a tuple, by the flag `kernels`; the reason lists them."""
    if device.type != "cuda" or torch.version.hip:
        return Choice((), "none (they need an NVIDIA GPU)")
    capability = torch.cuda.get_device_capability(device)
    names = []
    for name in possible_kernels(setting, capability, dtype):
        if name not in TRIALS or works(name, device, dtype):
            names.append(name)
    listed = ", ".join(names) or "none"
    major, minor = capability
    return Choice(tuple(names), f"{listed} ({setting}, compute capability {major}.{minor})")


def possible_kernels(setting: str, capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    """The names for GPUs of this compute capability, and matrix multiplications in this dtype. The
    FFN has no kernel for fp32."""
    names = [name for name, least in KERNELS[setting].items() if capability >= least]
    if dtype.itemsize != 2:
        names = [name for name in names if name != "ffn"]
    return names


@cache
def works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a Triton operator computes the same as plain code in this dtype. If not, one warning
    is printed."""
    reason = "its results are wrong"
    try:
        is_right = try_kernel(name, device, dtype)
    except Exception as e:  # whatever Triton, or the compiler that it calls, raises
        is_right = False
        reason = reason_of(e)[:200]
    if not is_right:
        problem = f"warning: the kernel {name} does not work here ({reason})"
        print(f"{problem}: plain code takes its place", flush=True)
    return is_right


def try_kernel(name: str, device: torch.device, dtype: torch.dtype, **options: object) -> bool:
    """Whether the results of a trial equal, up to rounding, those of plain code in float64.
    `options`: keyword arguments of the trial's function."""
    compute, shapes = TRIALS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact_inputs = [x.double() for x in inputs]
    device_inputs = [x.to(device) for x in inputs]
    expected = compute(*exact_inputs)
    results = compute(*device_inputs, **options)
    return all(is_near(a, b) for a, b in zip(results, expected, strict=True))


def compute_cross_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(the losses of four long rows with padding, the gradient)."""
    vocab_size = 16_400
    targets = torch.tensor([0, vocab_size - 1, 9000, -1], device=logits.device)
    grad = 2 * logits  # overwritten by the operator
    losses = loss.OPERATORS.cross_entropy(grad, targets, vocab_size)
    return losses, grad


def compute_ffn(
    x: Tensor, up: Tensor, down: Tensor, slope: Tensor, operators: object = None
) -> list[Tensor]:
    """The results of the FFN's operators, or of `operators` with the same names."""
    from layers import ffn

    operators = operators or ffn.OPERATORS
    scaled = operators.multiply_and_scale(x, down, slope)
    return [scaled, *operators.multiply_and_activate(x / 8, up)]


def is_near(result: Tensor, expected: Tensor) -> bool:
    """Whether the largest error, relative to the largest entry, is at most 16 roundings of fp32 and
    one of the result's dtype. NaN is not near."""
    allowed = 16 * torch.finfo(torch.float32).eps + torch.finfo(result.dtype).eps
    errors = (result.cpu().double() - expected).abs()
    return bool(errors.max() <= allowed * expected.abs().max())


class Trial(NamedTuple):
    """A computation of `try_kernel`."""

    compute: Callable[..., tuple[Tensor, ...] | list[Tensor]]
    shapes: list[tuple[int, int]]  # shapes of its random arguments


# By the name of the Triton operator. Rows are longer than what a program reads at once, matrices
# larger than a tile, and neither is a multiple of it.
TRIALS = {
    "cross_entropy": Trial(
        compute_cross_entropy,
        [(4, 16_448)],
    ),
    "ffn": Trial(
        compute_ffn,
        [(300, 72), (520, 72), (72, 520), (300, 520)],
    ),
}
