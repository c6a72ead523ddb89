"""Functions of tensors without parameters: precision, memory, activations, rotary positions."""

import math
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F


def upcast(x: torch.Tensor) -> torch.Tensor:
    """fp32 for half-precision tensors; fp32 and fp64 stay as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def cast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """x in `dtype` (None: its own). For what an autograd.Function returns: a cast that changes
    nothing would give the result a second name, and torch 2.11 compiles that to zero gradients
    (pytorch issue 180642)."""
    return x if dtype in (None, x.dtype) else x.to(dtype)


def forbid_second_derivative() -> None:
    """For backward passes written by hand: RuntimeError where autograd would differentiate them."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the network has no second derivatives: its backward passes are written by hand"
        )


def namespace_of(file: str) -> str:
    """The namespace of a file's operators, named after its content: cached compiled code is found
    by the names of its operators, which say nothing about what these do."""
    return f"nanodnt_{zlib.crc32(Path(file).read_bytes()):08x}"


NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)


def store_once(x):
    """Returns x. When compiled, writes it to memory once.

    Inductor would rather compute a sum, or a cosine, again in each kernel that reads it: a residual
    stream from up to seven branch outputs, the rotary angles in every layer."""
    return OPERATORS.store_once(x) if torch.compiler.is_compiling() else x


# a copy of this file, from an exported folder, uses what is there
if not hasattr(OPERATORS, "store_once"):

    @torch.library.custom_op(f"{NAMESPACE}::store_once", mutates_args=())
    def _operator(x: torch.Tensor) -> torch.Tensor:
        return x.clone()  # only for compilers other than inductor

    @_operator.register_fake
    def _(x):
        # slow to import, and there if inductor asks
        inductor = sys.modules.get("torch._inductor.lowering")
        if inductor and _operator._opoverload not in inductor.lowerings:
            copy = inductor.lowerings[torch.ops.aten.clone.default]

            def write(x):
                x = copy(x)
                x.realize()
                return x

            inductor.register_lowering(_operator._opoverload, type_promotion_kind=None)(write)
        return torch.empty_like(x)

    _operator.register_autograd(lambda ctx, grad: grad)


def stored(x, dtype: torch.dtype | None):
    """x in `dtype` (None: as it is), written to memory once."""
    return store_once(x if dtype is None else x.to(dtype))


def add(x, y, dtype: torch.dtype | None):
    """x + y, summed in fp32 at least, in `dtype` (None: as it is)."""
    return x + y if dtype is None else Sum.apply(x, y, dtype)


class Sum(torch.autograd.Function):
    """`add` whose gradient stays in `dtype`: autograd's would be cast to fp32 and back, and be kept
    twice."""

    @staticmethod
    def forward(ctx, x, y, dtype):
        ctx.dtypes = x.dtype, y.dtype
        return (upcast(x) + y).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        return *(grad.to(dtype) for dtype in ctx.dtypes), None


def drop_samples(x, rate):
    """Stochastic depth (Huang et al., 2016): samples of x (B, …) are 0 with probability `rate`,
    else / (1 − rate)."""
    keep = torch.rand((len(x),) + (1,) * (x.ndim - 1), device=x.device) >= rate
    return torch.where(keep, x / (1 - rate), 0.0)


def tanh(x):
    """tanh x. When compiled 2σ(2x) − 1, which differs by 2e-7 (absolute, x in fp32) and is far
    faster on a CPU."""
    return 2 * torch.sigmoid(2 * x) - 1 if torch.compiler.is_compiling() else torch.tanh(x)


def gelu(x):
    """GPT-2's GELU, ½x (1 + tanh z) with z = √(2/π) (x + 0.044715 x³). When compiled x σ(2z): the
    same function."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    y = upcast(x)
    return (y * torch.sigmoid((8 / math.pi) ** 0.5 * y * (1 + 0.044715 * (y * y)))).to(x.dtype)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple:
    """cos and sin of the rotary angles of positions (T,) or (B, T), each (…, T, 1, head_dim/2),
    fp32. Computed, not stored: no buffer can get lost."""
    frequency = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angle = (positions[..., None] * frequency).unsqueeze(-2)
    return store_once(angle.cos()), store_once(angle.sin())


def rotate(x, rope):
    """Rotate channel i against channel i + head_dim/2 (LLaMA's convention). x: (B, T, H,
    head_dim)."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
