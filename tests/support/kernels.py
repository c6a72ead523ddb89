"""Operators that have Triton kernels, beside float64: cases for every device, and for Triton's
interpreter."""

from itertools import product

import torch
import torch.nn.functional as F

from support.models import error
from support.tolerances import LOSS, roundings

# logits of n rows: (n, columns, of these the vocabulary, entries from row to row, their size)
CROSS_ENTROPY = {
    "GPT-2": (4, 50304, 50257, 50304, 3),
    "no padding": (5, 64, 64, 64, 3),
    "odd": (4, 77, 70, 90, 3),
    "several turns": (3, 17001, 16999, 17001, 3),
    "much padding": (3, 8192, 100, 8192, 3),
    "one entry": (3, 1, 1, 1, 3),
    "large": (5, 256, 200, 256, 1e4),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_cross_entropy(call, device: str, case: str) -> None:
    """`call` is the operator of layers/loss.py, or its kernel. Targets: the first, the last, one
    between, some ignored; then all are ignored."""
    n, width, vocab_size, stride, size = CROSS_ENTROPY[case]
    logits = size * torch.randn(n, stride, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, -1, vocab_size - 1, vocab_size // 2, -1][:n])
    for dtype, target in product(DTYPES, (targets, torch.full_like(targets, -1))):
        exact = logits.to(dtype)[:, :vocab_size].double().requires_grad_()
        wanted = F.cross_entropy(exact, target, ignore_index=-1, reduction="none")
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), exact)
        found = logits.to(device, dtype, copy=True)
        losses = call(found[:, :width], target.to(device), vocab_size).cpu()
        grad = found[:, :width].cpu()
        assert losses.dtype == torch.float32 and losses.shape == (n,)
        # a loss is a difference of two numbers as large as logits
        largest = exact.detach().abs().max()
        assert (losses - wanted).abs().max() <= LOSS * (largest + wanted.max())
        # an exponent is off by two or three roundings of the largest logit; the gradient is stored
        # in `dtype`
        allowed = roundings(16 + 3 * largest.item()) + roundings(1, dtype)
        assert error(grad[:, :vocab_size], wanted_grad) <= allowed
        assert not grad[:, vocab_size:].any() and not grad[target == -1].any()
        assert torch.equal(found[:, width:].cpu(), logits[:, width:].to(dtype))
