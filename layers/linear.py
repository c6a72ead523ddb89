"""Matrices: linear maps that take the scales beside them into their weight, and embeddings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layers.draws import Draws
from layers.ops import namespace_of
from layers.runtime import Runtime
from layers.sharding import assign, full_tensor
from layers.slot import Slot

SIGMA_INIT_ITERATIONS = 30  # power iterations for σReparam's initial σ

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)

# F.linear(x, weight, bias), or the product of a stack of matrices, which has the same arguments
ProductFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Scales(NamedTuple):
    """Factors of a linear map out_scale · (W (in_scale · x) + b); None: 1."""

    in_scale: Tensor | None = None  # (n_in,) or ()
    out_scale: Tensor | None = None  # (n_out,)


NO_SCALES = Scales()


def scale_weight(
    weight: Tensor, bias: Tensor | None, scales: Scales, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """(out_scale · W · in_scale, out_scale · b) in `dtype`, in one pass over the weight.

    W may be a stack (n, n_out, n_in) with biases (n, n_out): all its matrices get the same scales.
    """
    if scales.in_scale is not None:
        weight = weight * scales.in_scale
    if scales.out_scale is not None:
        weight = weight * scales.out_scale[:, None]
    if bias is None:
        return weight.to(dtype), None
    if scales.out_scale is not None:
        bias = bias * scales.out_scale
    return weight.to(dtype), bias.to(dtype)


def recomputed(compute: Callable, weight: Tensor, dtype: torch.dtype, *args: Any) -> Any:
    """compute(*args), a scaled copy of `weight` for a product in `dtype`.

    Where the weight itself has this half-precision dtype, as FSDP gathers it, compiled code
    computes the copy again in the backward pass. A kept copy would take the memory that FSDP frees
    when it drops the gathered weight.
    """
    if (
        weight.dtype == dtype != torch.float32
        and torch.compiler.is_compiling()
        and torch.is_grad_enabled()
    ):
        return checkpoint(compute, *args, use_reentrant=False)
    return compute(*args)


class Product(torch.autograd.Function):
    """x Wᵀ + b for the joined rows of several matrices, split into the output of each matrix.

    x (…, n_in), W (n_out, n_in), b (n_out,) or None; `sizes`: number of rows of each matrix.
    Returns one (…, n) for each n of `sizes`, in the dtype of x.

    The gradients of these outputs are not copied into one tensor: their products with W are added
    up. The gradient of W has the dtype of W. If that is fp32, the product returns its fp32 sums,
    which saves a rounding and a pass to cast it back. Only CUDA has a product with another
    out_dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        ctx.has_bias = bias is not None
        ctx.weight_dtype = weight.dtype
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias).split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2)
        d_parts = [dy.flatten(0, -2) for dy in grads]
        dx = sum_of_products(d_parts, weight.split(ctx.sizes))
        options = {}
        if ctx.weight_dtype != x.dtype:
            options["out_dtype"] = ctx.weight_dtype
        d_weight = torch.cat([torch.mm(dy.T, rows, **options) for dy in d_parts])
        d_bias = None
        if ctx.has_bias:
            d_bias = torch.cat([dy.sum(0) for dy in d_parts])
        return dx.view_as(x), d_weight, d_bias, None


def sum_of_products(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Σ A B (n, m) over pairs of A (n, k) and B (k, m); each pair has its own k."""
    if len(lefts) == 1:
        return lefts[0] @ rights[0]
    return OPERATORS.sum_of_products(lefts, rights)


# A copy of this file in an exported folder has the same namespace: the first one registers.
if not hasattr(OPERATORS, "sum_of_products"):
    # Compiled code has no `addmm_`, and its `addmm` copies what it adds to (pytorch issue 153590).
    @torch.library.custom_op(f"{NAMESPACE}::sum_of_products", mutates_args=())
    def _sum_of_products(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
        total = lefts[0] @ rights[0]
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            total.addmm_(left, right)
        return total

    _sum_of_products.register_fake(lambda lefts, rights: lefts[0] @ rights[0])


def has_one_row(x: Tensor, weight: Tensor) -> bool:
    """Whether x (…, rows, n_in) has one row, or at most one for each matrix of a stack. Leading
    dimensions do not count: in generation each sequence of a batch has one row."""
    n_matrices = 1 if weight.ndim == 2 else len(weight)
    return x.shape[-2] <= n_matrices


def gives_fp32_gradient(weight: Tensor, dtype: torch.dtype, *others: Tensor | None) -> bool:
    """Whether `Product` in `dtype` gives this fp32 weight an fp32 gradient.

    True in code compiled for CUDA if all `others`, the bias and the scales, are None.
    """
    is_plain = all(other is None for other in others)
    return (
        is_plain
        and torch.compiler.is_compiling()
        and weight.is_cuda
        and dtype.itemsize < weight.dtype.itemsize
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scales: Scales = NO_SCALES,
    product: ProductFunction = F.linear,
) -> Tensor:
    """out_scale · (W (in_scale · x) + b) in `dtype` (None: the dtype of the weight).

    `product` multiplies: F.linear, or for a stack of matrices a function that knows the rows of
    each matrix.
    """
    dtype = dtype or weight.dtype
    if has_one_row(x, weight):  # x and y are smaller than the weight; this rounds differently
        return scale_activations(x, weight, bias, dtype, scales, product)
    x = x.to(dtype)
    if product is F.linear and gives_fp32_gradient(weight, dtype, bias, *scales):
        return Product.apply(x, weight, None, [len(weight)])[0]
    if all(scale is None for scale in scales):
        return product(x, *scale_weight(weight, bias, scales, dtype))
    return product(x, *recomputed(scale_weight, weight, dtype, weight, bias, scales, dtype))


def scale_activations(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scales: Scales,
    product: ProductFunction,
) -> Tensor:
    """`linear` with the scales on x and on the output; the weight is only cast."""
    if scales.in_scale is not None:
        x = x * scales.in_scale
    y = product(x.to(dtype), *scale_weight(weight, bias, NO_SCALES, dtype))
    if scales.out_scale is None:
        return y
    return (y * scales.out_scale).to(dtype)


class Linear(nn.Linear):
    """out( W (in_scale · pre(x)) + b ), computed in the runtime's compute_dtype.

    The weight stays fp32. Scales enter it, W (in_scale · x) = (W diag in_scale) x, in one pass with
    its cast. torch.compile fuses that: it costs less than autocast and loses no accuracy.

    role         role of the weight: one of MATRICES in layers/roles.py
    layer, part  number of the block, from 1, and the matrix's name in it, "q" … "down": they decide
                 the initial standard deviation; 0 and "" outside the blocks
    pre, out     slots before and after W
    stack        number of matrices (stack, n_out, n_in) with the same slots; 0: a single matrix.
                 `forward` of a stack needs a `product` that knows which rows go to which matrix
    """

    runtime = Runtime()  # `Network.share_runtime` replaces it by the network's

    def __init__(
        self,
        n_in: int,
        n_out: int,
        role: str,
        bias: bool = False,
        *,
        layer: int = 0,
        part: str = "",
        pre: Slot | None = None,
        out: Slot | None = None,
        stack: int = 0,
    ):
        super().__init__(n_in, n_out, bias)
        self.layer = layer
        self.part = part
        self.stack = stack
        if stack:
            self.weight = nn.Parameter(self.weight.new_empty(stack, n_out, n_in))
        if stack and bias:
            self.bias = nn.Parameter(self.weight.new_empty(stack, n_out))
        self.param_roles = {"weight": role, "bias": "bias"}
        self.pre = pre or Slot()
        self.out = out or Slot()

    def reset_parameters(self) -> None:
        pass  # Network.init_weights sets every parameter

    def effective_weight(self) -> Tensor:
        """The matrix W, without the scales of the slots."""
        return self.weight

    def scales(self, in_scale: Tensor | None = None) -> Scales:
        """The scales of this map: `in_scale`, from the slot before the branch, and those that its
        own slots fold."""
        own = self.pre.factor_for_weight()
        if in_scale is None:
            in_scale = own
        elif own is not None:
            in_scale = own * in_scale
        return Scales(in_scale, self.out.factor_for_weight())

    def forward(
        self, x: Tensor, in_scale: Tensor | None = None, product: ProductFunction = F.linear
    ) -> Tensor:
        scales = self.scales(in_scale)
        weight = self.effective_weight()
        dtype = self.runtime.compute_dtype
        y = linear(self.pre(x), weight, self.bias, dtype, scales, product)
        return self.out(y).to(y.dtype)  # a slot may return fp32

    def init(self, std: float, draws: Draws, cut: float | None = None) -> None:
        """Draw the weight from N(0, std²), truncated at ± cut · std; set the bias to 0."""
        draws.fill(self.weight, std, cut)
        if self.bias is not None:
            self.bias.zero_()


def fused_linear(
    matrices: list[Linear],
    x: Tensor,
    in_scale: Tensor | None = None,
    product: ProductFunction = F.linear,
    joins_gradients: bool = True,
) -> list[Tensor]:
    """[m(x, in_scale, product) for m in matrices] as one product: x (…, n_in) is read once.

    The `pre` slots of the matrices have no norm and no bias: they fold a gain, or do nothing.

    joins_gradients  True: the gradients of the outputs are written into one tensor, and the
                     gradient of x is one product with it. This suits gate and up: compiled code
                     makes both gradients in one kernel. False: `Product`, for outputs whose
                     gradients different operators make, so that joining them would be a copy
    """
    first = matrices[0]
    if has_one_row(x, first.weight):
        # `linear` multiplies the scales into x, and each matrix may have its own
        return [m(x, in_scale, product) for m in matrices]
    dtype = first.runtime.compute_dtype or first.weight.dtype
    sizes = [m.weight.shape[-2] for m in matrices]
    weights = [m.effective_weight() for m in matrices]
    biases = [m.bias for m in matrices]
    scales = [m.scales(in_scale) for m in matrices]
    if joins_gradients:
        weight, bias = recomputed(join, first.weight, dtype, weights, biases, scales, dtype)
        parts = product(x.to(dtype), weight, bias).split(sizes, dim=-1)
    else:
        triples = zip(weights, biases, scales, strict=True)
        keeps_fp32 = all(gives_fp32_gradient(w, dtype, b, *s) for w, b, s in triples)
        kept_dtype = first.weight.dtype if keeps_fp32 else dtype
        weight, bias = recomputed(join, first.weight, dtype, weights, biases, scales, kept_dtype)
        parts = Product.apply(x.to(dtype), weight, bias, sizes)
    return [m.out(part).to(part.dtype) for m, part in zip(matrices, parts, strict=True)]


def join(
    weights: list[Tensor], biases: list[Tensor | None], scales: list[Scales], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of one map to the outputs of several: each is scaled, in `dtype`."""
    triples = zip(weights, biases, scales, strict=True)
    scaled = [scale_weight(w, b, s, dtype) for w, b, s in triples]
    matrices, vectors = zip(*scaled, strict=True)
    if vectors[0] is None:
        return torch.cat(matrices, -2), None
    return torch.cat(matrices, -2), torch.cat(vectors, -1)


class SigmaReparam(Linear):
    """A matrix γ W/σ(W), with σ = uᵀWv; `power_iteration` moves u and v to the singular vectors.
    Its arguments are those of `Linear`."""

    def __init__(self, n_in: int, n_out: int, *args: Any, **kwargs: Any):
        super().__init__(n_in, n_out, *args, **kwargs)
        self.sigma = nn.Parameter(torch.empty(1))  # γ
        self.param_roles["sigma"] = "scalar"
        self.register_buffer("u", torch.empty(n_out))
        self.register_buffer("v", torch.empty(n_in))

    def effective_weight(self) -> Tensor:
        return self.weight * (self.sigma / torch.dot(self.u, self.weight @ self.v))

    @torch.no_grad()
    def power_iteration(self, n: int = 1) -> None:
        """Move u (n_out,) and v (n_in,) towards the first singular vectors of W, `n` times."""
        weight = full_tensor(self.weight)
        for _ in range(n):
            self.v.copy_(F.normalize(self.u @ weight, dim=0))
            self.u.copy_(F.normalize(weight @ self.v, dim=0))

    def init(self, std: float, draws: Draws, cut: float | None = None) -> None:
        super().init(std, draws, cut)
        if self.weight.is_meta:
            return
        # γ = σ(W) initially, so the matrix is W: as in the released code. u is not drawn: a seed
        # gives the same weights with and without σReparam.
        self.u.fill_(1.0)
        self.power_iteration(SIGMA_INIT_ITERATIONS)
        assign(self.sigma, torch.dot(self.u, full_tensor(self.weight) @ self.v)[None])


class Lookup(torch.autograd.Function):
    """The rows idx (B, T) of a table (n, dim), and the table itself, for its use as output head.

    The gradient of the rows is added into the gradient of the head. Autograd by itself makes a
    second table, and adds both.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(idx)
        return F.embedding(idx, table), table.view_as(table)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_table: Tensor) -> tuple[Tensor, None]:
        return d_table.index_put(ctx.saved_tensors, d_rows, accumulate=True), None


class Embedding(nn.Embedding):
    """A table (n, dim) of learned vectors. `role`: one of MATRICES in layers/roles.py."""

    def __init__(self, n: int, dim: int, role: str):
        super().__init__(n, dim)
        self.param_roles = {"weight": role}

    def reset_parameters(self) -> None:
        pass  # Network.init_weights sets every parameter

    def init(self, std: float, draws: Draws, cut: float | None = None) -> None:
        """Draw the table from N(0, std²), truncated at ± cut · std."""
        draws.fill(self.weight, std, cut)
