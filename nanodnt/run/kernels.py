"""Which of the faster ways to compute compiled code takes. Triton operators are tried first."""

from functools import cache

import torch

from layers import loss
from nanodnt.files import reason_of

# {value of the flag: {name for `Runtime.kernels`: least compute capability}}
KERNELS = {"off": {}, "auto": dict(cross_entropy=(8, 0), qkv=(8, 0))}
KERNELS["all"] = KERNELS["auto"] | dict(ffn=(9, 0))


def choose_kernels(setting: str, device: torch.device, dtype: torch.dtype) -> tuple:
    """(names for `Runtime.kernels`, a text that says which and why) by the flag `kernels`."""
    if device.type != "cuda" or torch.version.hip:
        return (), "none (they need an NVIDIA GPU)"
    capability = torch.cuda.get_device_capability(device)
    names = []
    for name in possible_kernels(setting, capability, dtype):
        if name not in TRIALS or works(name, device, dtype):
            names.append(name)
    listed = ", ".join(names) or "none"
    return tuple(names), f"{listed} ({setting}, compute capability {capability[0]}.{capability[1]})"


def possible_kernels(setting: str, capability: tuple, dtype: torch.dtype) -> list:
    """The names for GPUs of this compute capability, and products in this dtype: in fp32 FFNs have
    no kernel."""
    least = KERNELS[setting]
    return [
        name
        for name in least
        if capability >= least[name] and (name != "ffn" or dtype.itemsize == 2)
    ]


@cache
def works(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a Triton operator computes in this dtype what plain code does; if not, one
    warning."""
    reason = "its results are wrong"
    try:
        right = try_kernel(name, device, dtype)
    except Exception as e:  # whatever Triton, or the compiler that it calls, raises
        right = False
        reason = reason_of(e)[:200]
    if not right:
        problem = f"warning: the kernel {name} does not work here ({reason})"
        print(f"{problem}: plain code takes its place", flush=True)
    return right


def try_kernel(name: str, device: torch.device, dtype: torch.dtype, **how) -> bool:
    """Whether the results of a trial are, but for rounding, those of plain code in float64."""
    compute, shapes = TRIALS[name]
    draws = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draws).to(dtype) for shape in shapes]
    exact = compute(*(x.double() for x in inputs))
    found = compute(*(x.to(device) for x in inputs), **how)
    return all(is_near(*pair) for pair in zip(found, exact, strict=True))


def compute_cross_entropy(logits: torch.Tensor) -> tuple:
    """(losses of a few long rows with padding, the gradient)."""
    vocab_size = 16_400
    targets = torch.tensor([0, vocab_size - 1, 9000, -1], device=logits.device)
    grad = 2 * logits  # until the operator has run
    return loss.OPERATORS.cross_entropy(grad, targets, vocab_size), grad


def compute_ffn(x, up, down, slope, operators=None) -> list:
    """Results of the FFN's operators, or of others of their names."""
    from layers import ffn

    operators = operators or ffn.OPERATORS
    return [
        operators.multiply_and_scale(x, down, slope),
        *operators.multiply_and_activate(x / 8, up),
    ]


def is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the largest error is, relative to the largest entry, at most 16 roundings of fp32 and
    one of the dtype of `found`. NaN is not near."""
    allowed = 16 * torch.finfo(torch.float32).eps + torch.finfo(found.dtype).eps
    errors = (found.cpu().double() - wanted).abs()
    return bool(errors.max() <= allowed * wanted.abs().max())


# {name of a Triton operator: (what its trial computes, of random tensors of which shapes)}. Rows
# are longer than what a program reads at once, matrices larger than a tile, and neither is a
# multiple.
TRIALS = {
    "cross_entropy": (compute_cross_entropy, [(4, 16_448)]),
    "ffn": (compute_ffn, [(300, 72), (520, 72), (72, 520), (300, 520)]),
}
