"""The loss: cross-entropy of a linear head, without keeping the logits."""

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from layers.ops import forbid_second_derivative, namespace_of, store_once, upcast

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)

# Upper limits on the logits of one chunk of tokens.
LOGITS_BYTES = 2**30  # on a CPU, in bytes of the product's dtype
# on a GPU, in entries: it is fastest with few chunks, while 32 bits can count a chunk's entries
MAX_LOGITS = 2**31 - 1
TILE = 128  # rows of a chunk are a multiple of this: matrix units are fastest on whole tiles


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of logits x Wᵀ. The forward pass computes the gradients too: for
    each chunk of tokens the logits, their gradient (softmax, minus 1 at the target), and from it
    the chunk's part of the gradients of x and W. So the logits of one chunk alone are in memory (in
    fp32 if not compiled), and no logit is computed twice.

    x           (N, C)
    weight      (V, C); the rows from `vocab_size` on are padding
    targets     (N,), −1 = ignored
    dtype       of the products
    chunk_rows  tokens of a chunk
    with_grad   whether gradients are computed
    kernel      whether losses and gradients come from the operator below

    Returns the loss (), nats, fp32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        vocab_size: int,
        chunk_rows: int,
        with_grad: bool,
        kernel: bool,
    ) -> Tensor:
        w = weight.to(dtype)
        total = x.new_zeros(())
        dx = []
        dw = None
        chunks = zip(x.to(dtype).split(chunk_rows), targets.split(chunk_rows), strict=True)
        for x_chunk, target in chunks:
            if kernel:
                grad = x_chunk @ w.T  # the logits, until the operator has run
                losses = OPERATORS.cross_entropy(grad, target, vocab_size)
            else:
                logits = upcast(x_chunk @ w.T)
                losses, grad = cross_entropy(logits, target, vocab_size, dtype, with_grad)
                del logits
            total = total + losses.sum()
            if with_grad:
                dx.append(grad @ w)
                dw = add_weight_gradient(dw, grad, x_chunk)
            del grad  # frees it before the next chunk
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        forbid_second_derivative()
        dx, dw = ctx.saved_tensors
        return upcast(dx) * grad, upcast(dw) * grad, None, None, None, None, None, None


def add_weight_gradient(dw: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """dw + gradᵀ x for one chunk: dw (V, C), None before the first; grad (n, V), x (n, C)."""
    if x.dtype == torch.float16:
        # the sum over tokens could overflow, and the loss scale comes after it
        part = upcast(grad.T @ (x * 2**-8)) * 2**8
    else:
        part = grad.T @ x
    if dw is None:
        return part
    return upcast(dw) + part


def cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, dtype: torch.dtype, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses (n, 1) in nats, and their gradient (n, V) in `dtype`, or None, of logits (n, V), fp32
    or fp64, which are overwritten: there is one copy. Only the first `vocab_size` logits count, and
    targets (n,) that are not −1."""
    counts = (targets != -1)[:, None]
    index = targets.clamp(min=0)[:, None]
    logits[:, vocab_size:].fill_(-math.inf)
    # Inductor recognises the form of these lines, and finds maximum and sum in one pass.
    logits.sub_(logits.amax(-1, keepdim=True))
    at_target = store_once(logits.gather(-1, index))  # computed in the same kernel
    exps = logits.exp_()
    sums = exps.sum(-1, keepdim=True)
    losses = (sums.log() - at_target) * counts
    if not with_grad:
        return losses, None
    grad = exps.div_(sums)  # minus 1 at the target; compiled, in the same kernel
    if torch.compiler.is_compiling():
        is_target = torch.arange(grad.shape[-1], device=grad.device) == index
        grad.add_(is_target, alpha=-1)
    else:
        grad.scatter_add_(-1, index, grad.new_full(index.shape, -1))
    return losses, grad.mul_(counts).to(dtype)


# A copy of this file, from an exported folder, uses the operator that is registered already.
if not hasattr(OPERATORS, "cross_entropy"):

    @torch.library.custom_op(f"{NAMESPACE}::cross_entropy", mutates_args={"logits"})
    def _operator(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        """`cross_entropy` of logits (n, V) in any precision, which become their gradient → losses
        (n,)."""
        dtype = logits.dtype
        losses, grad = cross_entropy(upcast(logits), targets, vocab_size, dtype, with_grad=True)
        logits.copy_(grad)
        return losses[:, 0]

    @_operator.register_kernel("cuda")
    def _(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        # imported by name: an exported folder carries this file, and no Triton code
        kernel = import_module("layers.kernels.cross_entropy")
        return kernel.cross_entropy(logits, targets, vocab_size)

    @_operator.register_fake
    def _(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        return upcast(logits.new_empty(len(logits)))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    vocab_size: int,
    chunks: int = 0,
    kernels: tuple[str, ...] = (),
) -> Tensor:
    """Mean cross-entropy in nats of logits x Wᵀ, computed in `dtype`, over the targets that are not
    −1; 0 if there are none.

    x        (B, T, C)
    weight   (V, C)
    targets  (B, T)
    chunks   number of chunks that the tokens are split into; 0 = as many as keep the logits of one
             to about LOGITS_BYTES, on a GPU to MAX_LOGITS
    kernels  see `Runtime`"""
    limit = LOGITS_BYTES // dtype.itemsize
    if x.device.type in ("cuda", "meta"):
        limit = MAX_LOGITS
    rows = rows_of_chunk(targets.numel(), chunks, max(1, limit // len(weight)))
    with_grad = torch.is_grad_enabled()
    kernel = with_grad and "cross_entropy" in kernels and torch.compiler.is_compiling()
    total = LinearCrossEntropy.apply(
        x.flatten(0, 1), weight, targets.flatten(), dtype, vocab_size, rows, with_grad, kernel
    )
    return total / (targets != -1).sum().clamp(min=1)


def rows_of_chunk(n: int, chunks: int, most: int) -> int:
    """Rows of a chunk of n rows: at most `most`, if the number of chunks is not given (0). Whole
    tiles, unless there is less than one."""
    if most >= TILE:
        most = most // TILE * TILE
    if chunks == 0:
        chunks = -(-n // most)
    rows = -(-n // chunks)
    if rows >= TILE:
        rows = -(-rows // TILE) * TILE
    return rows
