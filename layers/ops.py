"""Functions of tensors without parameters: precision, memory, activations, rotary positions."""

import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """x in fp32 if it is in half precision; fp32 and fp64 stay as they are."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.float()
    return x


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in `dtype` (None: its own). For results of an autograd.Function: a cast that changes
    nothing would give the result a second name, and torch 2.11 compiles that to zero gradients
    (pytorch issue 180642)."""
    if dtype in (None, x.dtype):
        return x
    return x.to(dtype)


def forbid_second_derivative() -> None:
    """Raises RuntimeError where autograd would differentiate a backward pass written by hand."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the network has no second derivatives: its backward passes are written by hand"
        )


def namespace_of(file: str) -> str:
    """The namespace of a file's operators, named after the file's content. The cache of compiled
    code knows operators by their names only, so a changed operator needs a new name."""
    return f"nanodnt_{zlib.crc32(Path(file).read_bytes()):08x}"


NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)


def store_once(x: Tensor) -> Tensor:
    """Returns x. When compiled, writes it to memory once.

    Inductor would rather compute a sum, or a cosine, again in each kernel that reads it: a residual
    stream from up to seven branch outputs, the rotary angles in every layer."""
    if torch.compiler.is_compiling():
        return OPERATORS.store_once(x)
    return x


# A copy of this file, from an exported folder, uses the operator that is registered already.
if not hasattr(OPERATORS, "store_once"):

    @torch.library.custom_op(f"{NAMESPACE}::store_once", mutates_args=())
    def _operator(x: Tensor) -> Tensor:
        return x.clone()  # used by compilers other than inductor

    @_operator.register_fake
    def _(x: Tensor) -> Tensor:
        _lower_for_inductor()
        return torch.empty_like(x)

    def _lower_for_inductor() -> None:
        """Tell inductor to write x to a buffer, which later kernels read."""
        # slow to import, and loaded already if inductor is compiling
        inductor = sys.modules.get("torch._inductor.lowering")
        operator = _operator._opoverload
        if not inductor or operator in inductor.lowerings:
            return
        copy = inductor.lowerings[torch.ops.aten.clone.default]

        def write(x: Any) -> Any:  # a TensorBox of inductor
            x = copy(x)
            x.realize()
            return x

        inductor.register_lowering(operator, type_promotion_kind=None)(write)

    _operator.register_autograd(lambda ctx, grad: grad)


def stored(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in `dtype` (None: its own), written to memory once."""
    if dtype is not None:
        x = x.to(dtype)
    return store_once(x)


def add(x: Tensor, y: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x + y, summed in fp32 at least, in `dtype` (None: in the dtype of the sum)."""
    if dtype is None:
        return x + y
    return Sum.apply(x, y, dtype)


class Sum(torch.autograd.Function):
    """x + y whose gradient stays in `dtype`: autograd would cast its own to fp32 and back, and keep
    it twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.x_dtype = x.dtype
        ctx.y_dtype = y.dtype
        return (upcast(x) + y).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad.to(ctx.x_dtype), grad.to(ctx.y_dtype), None


def drop_samples(x: Tensor, rate: Tensor) -> Tensor:
    """Stochastic depth (Huang et al., 2016): each sample of x (B, …) is 0 with probability `rate`,
    a tensor (), else x / (1 − rate)."""
    shape = (len(x),) + (1,) * (x.ndim - 1)
    keep = torch.rand(shape, device=x.device) >= rate
    return torch.where(keep, x / (1 - rate), 0.0)


def tanh(x: Tensor) -> Tensor:
    """tanh x. When compiled 2σ(2x) − 1, which differs by 2e-7 (absolute, x in fp32) and is far
    faster on a CPU."""
    if torch.compiler.is_compiling():
        return 2 * torch.sigmoid(2 * x) - 1
    return torch.tanh(x)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, ½x (1 + tanh z) with z = √(2/π) (x + 0.044715 x³). When compiled x σ(2z): the
    same function."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    y = upcast(x)
    two_z = (8 / math.pi) ** 0.5 * y * (1 + 0.044715 * (y * y))
    return (y * torch.sigmoid(two_z)).to(x.dtype)


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {"swiglu": "silu", "geglu": "gelu"}  # {FFN with a gate: activation of its gate}


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of positions (T,) or (B, T), each (…, T, 1, head_dim/2),
    fp32. Computed, not stored: no buffer can get lost."""
    channel = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = theta ** (-channel / head_dim)  # (head_dim/2,)
    angle = (positions[..., None] * frequency).unsqueeze(-2)
    return store_once(angle.cos()), store_once(angle.sin())


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel i against channel i + head_dim/2 (LLaMA's convention) by the angles of
    `rotary`: x (B, T, H, head_dim)."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
