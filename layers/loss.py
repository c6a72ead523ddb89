"""The loss: cross-entropy of a linear head, without keeping the logits."""

import math
from importlib import import_module

import torch

from layers.ops import forbid_second_derivative, namespace_of, store_once, upcast

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)

# The most logits of one chunk.
LOGITS_BYTES = 2**30  # on a CPU, in bytes of the product's dtype
# on a GPU, in entries: it is fastest with few chunks, while 32 bits can count a chunk's entries
MAX_LOGITS = 2**31 - 1


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of logits x Wᵀ. The forward pass computes the gradients too: for
    each chunk of tokens the logits, their gradient (softmax, minus 1 at the target), and from it
    the chunk's part of the gradients of x and W. So the logits of one chunk alone are in memory (in
    fp32 if not compiled), and no logit is computed twice.

    x (N, C), weight (V, C), its first `vocab_size` rows, targets (N,), −1 = ignored → loss (),
    nats, fp32 at least. `kernel`: whether losses and gradients come from the operator below."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, vocab_size, chunk_rows, with_grad, kernel):
        w, total, dx, dw = weight.to(dtype), x.new_zeros(()), [], None
        for x_chunk, target in zip(
            x.to(dtype).split(chunk_rows), targets.split(chunk_rows), strict=True
        ):
            if kernel:
                grad = x_chunk @ w.T  # the logits, until the operator has run
                losses = OPERATORS.cross_entropy(grad, target, vocab_size)
            else:
                losses, grad = cross_entropy(
                    upcast(x_chunk @ w.T), target, vocab_size, dtype, with_grad
                )
            total = total + losses.sum()
            if with_grad:
                dx.append(grad @ w)
                # the sum over tokens could overflow, and the loss scale comes after it
                if dtype == torch.float16:
                    part = upcast(grad.T @ (x_chunk * 2**-8)) * 2**8
                else:
                    part = grad.T @ x_chunk
                dw = part if dw is None else upcast(dw) + part
            del grad  # before the next chunk's is made
        if with_grad:
            ctx.save_for_backward(torch.cat(dx), dw)
        return total

    @staticmethod
    def backward(ctx, grad):
        forbid_second_derivative()
        dx, dw = ctx.saved_tensors
        return upcast(dx) * grad, upcast(dw) * grad, None, None, None, None, None, None


def cross_entropy(logits, targets, vocab_size: int, dtype, with_grad: bool) -> tuple:
    """(losses (n, 1) in nats, their gradient (n, V) in `dtype`, or None) of logits (n, V), fp32 or
    fp64, which are overwritten: there is one copy. Only the first `vocab_size` logits count, and
    targets (n,) that are not −1."""
    counts, index = (targets != -1)[:, None], targets.clamp(min=0)[:, None]
    logits[:, vocab_size:].fill_(-math.inf)
    # inductor finds maximum and sum in one pass: the form of these lines is what it looks for
    logits.sub_(logits.amax(-1, keepdim=True))
    at_target = store_once(logits.gather(-1, index))  # in the same kernel
    exps = logits.exp_()
    sums = exps.sum(-1, keepdim=True)
    losses = (sums.log() - at_target) * counts
    if not with_grad:
        return losses, None
    grad = exps.div_(sums)  # minus 1 at the target; compiled, in the same kernel
    if torch.compiler.is_compiling():
        grad.add_(torch.arange(grad.shape[-1], device=grad.device) == index, alpha=-1)
    else:
        grad.scatter_add_(-1, index, grad.new_full(index.shape, -1))
    return losses, grad.mul_(counts).to(dtype)


# a copy of this file, from an exported folder, uses what is there
if not hasattr(OPERATORS, "cross_entropy"):

    @torch.library.custom_op(f"{NAMESPACE}::cross_entropy", mutates_args={"logits"})
    def _operator(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """`cross_entropy` of logits (n, V) in any precision, which become their gradient → losses
        (n,)."""
        losses, grad = cross_entropy(
            upcast(logits), targets, vocab_size, logits.dtype, with_grad=True
        )
        logits.copy_(grad)
        return losses[:, 0]

    @_operator.register_kernel("cuda")
    def _(logits, targets, vocab_size):
        # by its name: an exported folder carries this file, and no Triton code
        kernel = import_module("layers.kernels.cross_entropy")
        return kernel.cross_entropy(logits, targets, vocab_size)

    @_operator.register_fake
    def _(logits, targets, vocab_size):
        return upcast(logits.new_empty(len(logits)))


def linear_cross_entropy(
    x, weight, targets, dtype, vocab_size: int, chunks: int = 0, kernels: tuple = ()
) -> torch.Tensor:
    """Mean cross-entropy in nats of logits x Wᵀ, computed in `dtype`, over the targets that are not
    −1; 0 if none is.

    x (B, T, C), weight (V, C), targets (B, T). `chunks`: number of chunks that the tokens are split
    into; 0 = as many as keep the logits of one to about LOGITS_BYTES, on a GPU to MAX_LOGITS.
    `kernels`: see `Runtime`."""
    n = targets.numel()
    limit = MAX_LOGITS if x.device.type in ("cuda", "meta") else LOGITS_BYTES // dtype.itemsize
    most = max(1, limit // len(weight))
    most = most if most < 128 else most // 128 * 128
    rows = -(-n // (chunks or -(-n // most)))
    rows = rows if rows < 128 else -(-rows // 128) * 128  # matrix units are fastest on whole tiles
    with_grad = torch.is_grad_enabled()
    kernel = with_grad and "cross_entropy" in kernels and torch.compiler.is_compiling()
    args = x.flatten(0, 1), weight, targets.flatten(), dtype, vocab_size, rows, with_grad, kernel
    return LinearCrossEntropy.apply(*args) / (targets != -1).sum().clamp(min=1)
