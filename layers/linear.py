"""Matrices: linear maps that take the gains beside them into their weight, and embeddings."""

import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from layers.cores import own_cores
from layers.ops import namespace_of
from layers.runtime import Runtime
from layers.sharding import assign, full_tensor
from layers.slot import Slot

SIGMA_INIT_ITERATIONS = 30  # of the power iteration, for σReparam's initial σ
# entries of a block of initial weights: our choice; another means other weights for every seed
DRAWN = 2**18

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)


def scale_weight(weight, bias, dtype, in_gain=None, out_gain=None) -> tuple:
    """(out_gain · W · in_gain, out_gain · b) in `dtype`: gains and cast in one pass over the
    weight. W may be a stack (E, n_out, n_in), with biases (E, n_out) and the same gains for all."""
    if in_gain is not None:
        weight = weight * in_gain
    if out_gain is not None:
        weight, bias = weight * out_gain[:, None], None if bias is None else bias * out_gain
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def recomputed(compute, weight, dtype, *args):
    """compute(*args): what a product in `dtype` takes in place of `weight`. Compiled code computes
    it again in the backward pass if the weight comes in `dtype`, as FSDP gathers it: to keep it
    would undo that FSDP frees weights."""
    if (
        weight.dtype == dtype != torch.float32
        and torch.compiler.is_compiling()
        and torch.is_grad_enabled()
    ):
        return checkpoint(compute, *args, use_reentrant=False)
    return compute(*args)


class Product(torch.autograd.Function):
    """x Wᵀ + b, split into the outputs of several matrices: W (n_out, n_in) has all their rows, and
    `sizes` says how many are of each. x (…, n_in), b (n_out,) or None → one (…, n) for each n of
    `sizes`, in the dtype of x.

    The gradients of these outputs are not copied into one: their products with W sum that of x. The
    gradient of W has the dtype of W. If that is fp32, it leaves the matrix units in fp32, in which
    they sum: rounding it, and a pass to cast it back, are saved. CUDA alone has such a product."""

    @staticmethod
    def forward(ctx, x, weight, bias, sizes):
        ctx.sizes, ctx.has_bias = sizes, bias is not None
        ctx.how = {} if weight.dtype == x.dtype else dict(out_dtype=weight.dtype)
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias).split(sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2)
        grads = [dy.flatten(0, -2) for dy in grads]
        dx = sum_of_products(grads, weight.split(ctx.sizes))
        d_weight = torch.cat([torch.mm(dy.T, rows, **ctx.how) for dy in grads])
        d_bias = torch.cat([dy.sum(0) for dy in grads]) if ctx.has_bias else None
        return dx.view_as(x), d_weight, d_bias, None


def sum_of_products(lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> torch.Tensor:
    """Σ A B (n, m) over pairs of A (n, k) and B (k, m); each pair has its own k."""
    if len(lefts) == 1:
        return lefts[0] @ rights[0]
    return OPERATORS.sum_of_products(lefts, rights)


# a copy of this file, from an exported folder, uses what is there
if not hasattr(OPERATORS, "sum_of_products"):
    # compiled code has no `addmm_`, and its `addmm` copies what it adds to (pytorch issue 153590)
    @torch.library.custom_op(f"{NAMESPACE}::sum_of_products", mutates_args=())
    def _sum_of_products(lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> torch.Tensor:
        total = lefts[0] @ rights[0]
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            total.addmm_(left, right)
        return total

    _sum_of_products.register_fake(lambda lefts, rights: lefts[0] @ rights[0])


def has_one_row(x, weight) -> bool:
    """Whether x (…, rows, n_in) has one row, or for a stack of matrices at most one for each."""
    return x.shape[-2] <= (1 if weight.ndim == 2 else len(weight))


def gives_fp32_gradient(weight, dtype: torch.dtype, *others) -> bool:
    """Whether `Product` in `dtype` gives this fp32 weight an fp32 gradient: in code compiled for
    CUDA, if all `others`, a bias and gains to fold, are None."""
    is_plain = all(other is None for other in others)
    return (
        is_plain
        and torch.compiler.is_compiling()
        and weight.is_cuda
        and dtype.itemsize < weight.dtype.itemsize
    )


def linear(x, weight, bias=None, dtype=None, in_gain=None, out_gain=None, product=F.linear):
    """out_gain · (W (in_gain · x) + b) in `dtype` (None: the weight's own). Gains: vectors (n_in,)
    and (n_out,), tensors (), or None. `product(x, weight, bias)` multiplies: F.linear, but for
    stacks."""
    dtype = dtype or weight.dtype
    if has_one_row(x, weight):
        # x and y are smaller than the weight, so they take the gains
        x = x if in_gain is None else x * in_gain
        y = product(x.to(dtype), *scale_weight(weight, bias, dtype))
        return y if out_gain is None else (y * out_gain).to(dtype)
    if product is F.linear and gives_fp32_gradient(weight, dtype, bias, in_gain, out_gain):
        return Product.apply(x.to(dtype), weight, None, [len(weight)])[0]
    args = weight, bias, dtype, in_gain, out_gain
    is_scaled = in_gain is not None or out_gain is not None
    return product(
        x.to(dtype),
        *(recomputed(scale_weight, weight, dtype, *args) if is_scaled else scale_weight(*args)),
    )


class Draws:
    """The random numbers of initial weights, in blocks of DRAWN entries with a generator each,
    which threads can draw. On the CPU, and whole, so that every device and every sharding gets the
    same."""

    def __init__(self, seed: int):
        self.next = zlib.crc32(str(seed).encode())  # the seed of the next block

    @torch.no_grad()
    def fill(self, weight, std: float, cut: float | None = None) -> None:
        """Draw the next weight, or stack, from N(0, std²), cut off at ± `cut` · std; on the meta
        device nothing."""
        n, first = weight.shape[-2:].numel(), self.next  # n: the entries of a matrix
        self.next += weight.numel() // n * -(-n // DRAWN)
        if weight.is_meta:
            return
        drawn = torch.empty(weight.shape, device="cpu")
        blocks = [block for matrix in drawn.view(-1, n) for block in matrix.split(DRAWN)]

        def draw(block, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed % 2**32)
            if cut is None:
                block.normal_(generator=generator)
            else:
                nn.init.trunc_normal_(block, 0, 1, -cut, cut, generator)

        with ThreadPoolExecutor(own_cores()) as threads:
            list(threads.map(draw, blocks, range(first, self.next)))  # a list, to see errors
        assign(weight, drawn.mul_(std))


class Linear(nn.Linear):
    """out( W (in_gain · pre(x)) + b ), computed in the runtime's compute_dtype; the weight itself
    stays fp32.

    Gains enter the weight, W (in_gain · x) = (W diag in_gain) x, in one pass with its cast.
    torch.compile fuses it: it costs less than autocast and loses no accuracy. With `stack` it is
    that many matrices (stack, n_out, n_in) with the same slots, and `forward` is given a `product`
    that knows which row of x goes to which.
    """

    runtime = Runtime()  # replaced by the network's

    def __init__(self, n_in, n_out, role, bias=False, init_scale=1.0, pre=None, out=None, stack=0):
        super().__init__(n_in, n_out, bias)
        self.stack = stack
        if stack:
            self.weight = nn.Parameter(self.weight.new_empty(stack, n_out, n_in))
            self.bias = nn.Parameter(self.weight.new_empty(stack, n_out)) if bias else None
        self.init_scale, self.param_roles = init_scale, {"weight": role, "bias": "bias"}
        self.pre, self.out = pre or Slot(), out or Slot()

    def reset_parameters(self):
        pass  # Network.init_weights sets every parameter

    def effective_weight(self):
        """The matrix W before any gain is folded in."""
        return self.weight

    def factors(self, in_gain=None) -> tuple:
        """(in_gain, out_gain) for `linear`: what the slots around this map, and a norm before it,
        leave to it."""
        own = self.pre.factor_for_weight()
        if own is not None and in_gain is not None:
            own = own * in_gain
        return in_gain if own is None else own, self.out.factor_for_weight()

    def forward(self, x, in_gain=None, product=F.linear):
        factors, dtype = self.factors(in_gain), self.runtime.compute_dtype
        y = linear(self.pre(x), self.effective_weight(), self.bias, dtype, *factors, product)
        return self.out(y).to(y.dtype)

    def init(self, std: float, draws: Draws, cut: float | None = None):
        draws.fill(self.weight, std * self.init_scale, cut)
        if self.bias is not None:
            self.bias.zero_()


def joined(each: list, dtype) -> tuple:
    """(weight, bias) of one map to the outputs of several: of each its weight, bias and gains, in
    `dtype`."""
    scaled = [scale_weight(weight, bias, dtype, *gains) for weight, bias, *gains in each]
    weights, biases = zip(*scaled, strict=True)
    return torch.cat(weights, -2), None if biases[0] is None else torch.cat(biases, -1)


def fused_linear(matrices, x, in_gain=None, product=F.linear, joins_gradients=True) -> list:
    """[m(x, in_gain, product) for m in matrices] as one product: x (…, n_in) is read once, and its
    gradient is one sum.

    For matrices whose `pre` slot has no norm and no bias: it holds a gain to fold, or nothing.
    `joins_gradients`: those of the outputs are written into one tensor, and that of x is one
    product. False: see `Product`; for outputs whose gradients are made by other operators, and
    would be copied."""
    first = matrices[0]
    # `linear` multiplies the gains into x, and each matrix may have its own
    if has_one_row(x, first.weight):
        return [m(x, in_gain, product) for m in matrices]
    kept = dtype = first.runtime.compute_dtype or first.weight.dtype
    sizes = [m.weight.shape[-2] for m in matrices]
    each = [(m.effective_weight(), m.bias, *m.factors(in_gain)) for m in matrices]
    if not joins_gradients and all(
        gives_fp32_gradient(weight, dtype, *others) for weight, *others in each
    ):
        kept = first.weight.dtype
    weight, bias = recomputed(joined, first.weight, dtype, each, kept)
    if joins_gradients:
        parts = product(x.to(dtype), weight, bias).split(sizes, dim=-1)
    else:
        parts = Product.apply(x.to(dtype), weight, bias, sizes)
    return [m.out(part).to(part.dtype) for m, part in zip(matrices, parts, strict=True)]


class SigmaReparam(Linear):
    """A matrix γ W/σ(W), with σ = uᵀWv. `power_iteration` turns u and v towards the first singular
    vectors."""

    def __init__(self, n_in, n_out, *args, **kwargs):
        super().__init__(n_in, n_out, *args, **kwargs)
        self.sigma = nn.Parameter(torch.empty(1))
        self.param_roles["sigma"] = "scalar"
        self.register_buffer("u", torch.empty(n_out))
        self.register_buffer("v", torch.empty(n_in))

    def effective_weight(self):
        return self.weight * (self.sigma / torch.dot(self.u, self.weight @ self.v))

    @torch.no_grad()
    def power_iteration(self, n: int = 1):
        """Move u (n_out,) and v (n_in,) towards the singular vectors of the largest singular value
        of W."""
        weight = full_tensor(self.weight)
        for _ in range(n):
            self.v.copy_(F.normalize(self.u @ weight, dim=0))
            self.u.copy_(F.normalize(weight @ self.v, dim=0))

    def init(self, std: float, draws: Draws, cut: float | None = None):
        super().init(std, draws, cut)
        # γ = σ(W) initially, so that the matrix is W: as in the released code
        if not self.weight.is_meta:
            self.u.fill_(1.0)  # not drawn: a seed gives the same weights with and without σReparam
            self.power_iteration(SIGMA_INIT_ITERATIONS)
            assign(self.sigma, torch.dot(self.u, full_tensor(self.weight) @ self.v)[None])


class Lookup(torch.autograd.Function):
    """(rows, table): the rows idx (B, T) of a table (n, dim), and the table itself, for its use as
    the output head.

    The gradient of the rows is added into that of the head. Autograd by itself makes a second
    table, and adds both."""

    @staticmethod
    def forward(ctx, table, idx):
        ctx.save_for_backward(idx)
        return F.embedding(idx, table), table.view_as(table)

    @staticmethod
    def backward(ctx, d_rows, d_table):
        return d_table.index_put(ctx.saved_tensors, d_rows, accumulate=True), None


class Embedding(nn.Embedding):
    """A table (n, dim) of learned vectors."""

    def __init__(self, n, dim, role):
        super().__init__(n, dim)
        self.param_roles = {"weight": role}

    def reset_parameters(self):
        pass  # Network.init_weights sets every parameter

    def init(self, std: float, draws: Draws):
        draws.fill(self.weight, std)
