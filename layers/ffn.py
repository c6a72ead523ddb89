"""An FFN act(x W1ᵀ) W2ᵀ whose products apply the activation, forward, and multiply by its derivative, backward: it needs
no pass of its own over the hidden activations. For compiled code; layers/kernels/ffn.py has the kernels."""

from importlib import import_module

import torch
import torch.nn.functional as F

from layers.linear import Linear, recomputed, scale_weight
from layers.ops import ACTIVATIONS, cast, forbid_second_derivative, namespace_of, upcast

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)
# What the kernels take: dtypes of the products, rows of a multiple of 16 bytes, activations with these derivatives
DTYPES, ALIGNED = (torch.bfloat16, torch.float16), 8
DERIVATIVES = {
    "gelu": lambda h: torch.ops.aten.gelu_backward(torch.ones_like(h), h, approximate="tanh"),
    "relu2": lambda h: 2 * F.relu(h),
}


def ffn(up: Linear, down: Linear, u: torch.Tensor, in_gain: torch.Tensor | None, act: str) -> torch.Tensor:
    """down(act(up(u, in_gain))) without biases, and without norms or gains but those before `up`: u (…, C) → (…, C)."""
    weight, gains, dtype = up.effective_weight(), up.factors(in_gain), up.runtime.compute_dtype
    if any(gain is not None for gain in gains):
        weight, _ = recomputed(scale_weight, weight, dtype, weight, None, dtype, *gains)
    x = u.to(dtype).flatten(0, -2).contiguous()
    return FFN.apply(x, weight, down.effective_weight(), act).view(u.shape)


class FFN(torch.autograd.Function):
    """act(x W1ᵀ) W2ᵀ in the dtype of x: x (N, C), W1 (n, C), W2 (C, n) → (N, C).

    It keeps act(h) and act'(h), both rounded, of h = x W1ᵀ. Keeping h would take as many bytes, and the backward pass
    would compute act' again. With the hidden gradient there are two roundings, as many as without these operators."""

    @staticmethod
    def forward(ctx, x, up, down, act):
        ctx.dtypes = up.dtype, down.dtype
        up, down = up.to(x.dtype), down.to(x.dtype)
        hidden, slope = OPERATORS.multiply_and_activate(x, up, act)
        ctx.save_for_backward(x, up, down, hidden, slope)
        return F.linear(hidden, down)

    @staticmethod
    def backward(ctx, grad):
        forbid_second_derivative()
        x, up, down, hidden, slope = ctx.saved_tensors
        grad = grad.contiguous()
        d_hidden = OPERATORS.multiply_and_scale(grad, down, slope)
        d_up = weight_gradient(d_hidden, x, ctx.dtypes[0])
        return d_hidden @ up, d_up, weight_gradient(grad, hidden, ctx.dtypes[1]), None


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """gradᵀ x in `dtype`: grad (N, n_out), x (N, n_in). On CUDA an fp32 sum is not rounded to the dtype of x before."""
    if x.is_cuda and dtype != x.dtype:
        return torch.mm(grad.T, x, out_dtype=dtype)
    return cast(grad.T @ x, dtype)


def try_ffn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether output and gradients of `FFN` are those of float64, but for rounding: several tiles, none of them full."""
    generator = torch.Generator().manual_seed(0)
    x, up, down, grad = (torch.randn(s, generator=generator) for s in ((300, 72), (520, 72), (72, 520), (300, 72)))
    raise NotImplementedError


if not hasattr(OPERATORS, "multiply_and_scale"):  # a copy of this file, from an exported folder, uses what is there

    @torch.library.custom_op(f"{NAMESPACE}::multiply_and_activate", mutates_args=())
    def _activate(x: torch.Tensor, weight: torch.Tensor, act: str) -> tuple[torch.Tensor, torch.Tensor]:
        """act(h) and act'(h) of h = x Wᵀ, which is not rounded, in the dtype of x: x (N, C), W (n, C) → (N, n) each."""
        h = upcast(x) @ upcast(weight).T
        return ACTIVATIONS[act](h).to(x.dtype), DERIVATIVES[act](h).to(x.dtype)

    @torch.library.custom_op(f"{NAMESPACE}::multiply_and_scale", mutates_args=())
    def _scale(grad: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """(grad W) ⊙ slope, rounded once: grad (N, C), W (C, n), slope (N, n) → (N, n)."""
        return (upcast(grad) @ upcast(weight) * slope).to(slope.dtype)

    @_activate.register_kernel("cuda")
    def _(x, weight, act):
        slope = x.new_empty(len(x), len(weight))
        # by its name: an exported folder carries this file, and no Triton code
        return import_module("layers.kernels.ffn").multiply(x, weight, slope, act), slope

    @_scale.register_kernel("cuda")
    def _(grad, weight, slope):
        return import_module("layers.kernels.ffn").multiply(grad, weight, slope, None)

    @_activate.register_fake
    def _(x, weight, act):
        return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))

    _scale.register_fake(lambda grad, weight, slope: torch.empty_like(slope))
