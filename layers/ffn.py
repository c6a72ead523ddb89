"""An FFN gelu(x W1ᵀ) W2ᵀ without passes over the hidden activations: the products themselves apply
GELU and, backward, multiply by its derivative. For compiled code on Hopper."""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layers.linear import Linear, recomputed, scale_weight
from layers.ops import cast, forbid_second_derivative, namespace_of, upcast

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)

# the kernels take these dtypes, and sizes that are multiples of ALIGNED entries (16 bytes)
DTYPES = (torch.bfloat16, torch.float16)
ALIGNED = 8


def ffn(up: Linear, down: Linear, u: Tensor, in_scale: Tensor | None) -> Tensor:
    """down(gelu(up(u, in_scale))): u (…, C) → (…, C). The matrices have no biases, and no gains but
    those before `up`."""
    dtype = up.runtime.compute_dtype
    weight = up.effective_weight()
    scales = up.scales(in_scale)
    if any(scale is not None for scale in scales):
        weight, _ = recomputed(scale_weight, weight, dtype, weight, None, scales, dtype)
    x = u.to(dtype).flatten(0, -2).contiguous()
    return FFN.apply(x, weight, down.effective_weight()).view(u.shape)


class FFN(torch.autograd.Function):
    """gelu(x W1ᵀ) W2ᵀ in the dtype of x: x (N, C), W1 (n, C), W2 (C, n) → (N, C).

    It keeps gelu(h) and gelu'(h) of h = x W1ᵀ. Keeping h in place of gelu'(h) would take as many
    bytes, and the backward pass would compute that anew. Either way the hidden gradient is rounded
    twice, as by separate passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.up_dtype = up.dtype
        ctx.down_dtype = down.dtype
        up = up.to(x.dtype)
        down = down.to(x.dtype)
        hidden, slope = OPERATORS.multiply_and_activate(x, up)
        ctx.save_for_backward(x, up, down, hidden, slope)
        return F.linear(hidden, down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        forbid_second_derivative()
        x, up, down, hidden, slope = ctx.saved_tensors
        grad = grad.contiguous()
        d_hidden = OPERATORS.multiply_and_scale(grad, down, slope)
        d_up = weight_gradient(d_hidden, x, ctx.up_dtype)
        d_down = weight_gradient(grad, hidden, ctx.down_dtype)
        return d_hidden @ up, d_up, d_down


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """gradᵀ x in `dtype`: grad (N, n_out), x (N, n_in). Only CUDA can sum bf16 into fp32 without
    rounding between."""
    if x.is_cuda and dtype != x.dtype:
        return torch.mm(grad.T, x, out_dtype=dtype)
    return cast(grad.T @ x, dtype)


def kernels() -> ModuleType:
    """The Triton kernels of the operators below. Imported by name: an exported folder carries this
    file, and no Triton code."""
    return import_module("layers.kernels.ffn")


# A copy of this file, from an exported folder, uses the operators that are registered already.
if not hasattr(OPERATORS, "multiply_and_scale"):

    @torch.library.custom_op(f"{NAMESPACE}::multiply_and_activate", mutates_args=())
    def _activate(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """gelu(h) and gelu'(h) in the dtype of x, where h = x Wᵀ is not rounded: x (N, C), W (n, C)
        → (N, n) each."""
        if x.is_cuda:
            return kernels().multiply_and_activate(x, weight)
        h = upcast(x) @ upcast(weight).T
        slope = torch.ops.aten.gelu_backward(torch.ones_like(h), h, approximate="tanh")
        return F.gelu(h, approximate="tanh").to(x.dtype), slope.to(x.dtype)

    @torch.library.custom_op(f"{NAMESPACE}::multiply_and_scale", mutates_args=())
    def _scale(grad: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
        """(grad W) ⊙ slope, rounded once: grad (N, C), W (C, n), slope (N, n) → (N, n)."""
        if grad.is_cuda:
            return kernels().multiply_and_scale(grad, weight, slope)
        return (upcast(grad) @ upcast(weight) * slope).to(slope.dtype)

    @_activate.register_fake
    def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.new_empty(len(x), len(weight))
        return hidden, torch.empty_like(hidden)

    _scale.register_fake(lambda grad, weight, slope: torch.empty_like(slope))
