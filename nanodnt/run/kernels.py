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
    for name, least in KERNELS[setting].items():
        if capability >= least and (name not in TRIALS or works(name, env.device, env.dtype)):
            names.append(name)
    listed = ", ".join(names) or "none"
    return tuple(names), f"{listed} ({setting}, compute capability {capability[0]}.{capability[1]})"


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


def is_near(found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> bool:
    """Whether the largest error is at most this share of the largest entry. NaN is not near."""
    errors = (found.cpu().double() - wanted).abs()
    return bool(errors.max() <= allowed * wanted.abs().max())


TRIALS = dict(cross_entropy=try_cross_entropy)  # {name of a Triton operator: trial(device, dtype)}
