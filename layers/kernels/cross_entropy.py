"""Cross-entropy of rows of logits, and its gradient in their place.

A row is read twice, the second time from the L2 cache: with 32 warps a GPU holds two rows a
multiprocessor, 27 MB of GPT-2's on an H100. The kernel that inductor makes of the plain code has
four times as many instructions for a logit, two accurate exponentials among them, and is bound by
these, not by the memory."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(-1e38)  # where a maximum starts: −inf less −inf would be NaN
LOAD_BYTES = 16  # bytes that a thread loads at once
MAX_WARPS = 32


@triton.jit
def cross_entropy_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One row of `width` logits, BLOCK of them at a time, AT_ONCE neighbours in a thread, which
    has a maximum and a sum of its own. The first three arguments are pointers."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row).to(tl.int32)
    counts = target >= 0
    at_target = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    first = tl.arange(0, BLOCK // AT_ONCE)[:, None] * AT_ONCE
    columns = first + tl.arange(0, AT_ONCE)[None, :]

    # the logarithm to base 2 of the sum of the exponentials
    top = tl.full((BLOCK // AT_ONCE,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // AT_ONCE,), tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(logits + start + columns, mask=start + first < width, other=0.0).to(tl.float32)
        if start + BLOCK > vocab_size:
            x = tl.where(start + columns < vocab_size, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1) * LOG2_E)
        total *= tl.exp2(top - higher)
        total += tl.sum(tl.exp2(x * LOG2_E - higher[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
    tl.store(losses + row, tl.where(counts, log_sum * LN_2 - at_target, 0.0))

    # the gradient
    log_sum = tl.where(counts, log_sum, float("inf"))  # all exponentials of an ignored row are 0
    for start in range(0, width, BLOCK):
        inside = start + first < width
        x = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.exp2(x * LOG2_E - log_sum)
        if start + BLOCK > vocab_size:
            grad = tl.where(start + columns < vocab_size, grad, 0.0)
        if (target >= start) & (target < start + BLOCK):
            grad -= tl.where(start + columns == target, 1.0, 0.0)
        tl.store(logits + start + columns, grad.to(logits.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Losses (n,) in nats, fp32, of logits (n, V) in fp32, bf16 or fp16, which become their
    gradient; the logits of a row are neighbours in memory. Only the first `vocab_size` logits
    count, and targets (n,) that are not −1."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # a group of neighbours does not reach into the next row
    at_once = math.gcd(width, LOAD_BYTES // logits.element_size())
    warps_of_row = triton.next_power_of_2(-(-width // (32 * at_once)))
    warps = min(warps_of_row, MAX_WARPS)
    cross_entropy_kernel[(rows,)](
        logits,
        targets,
        losses,
        vocab_size,
        width,
        logits.stride(0),
        BLOCK=32 * warps * at_once,
        AT_ONCE=at_once,
        num_warps=warps,
    )
    return losses
