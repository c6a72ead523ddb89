"""Muon's mathematics: matrices become nearly orthogonal by Keller Jordan's Newton-Schulz
iteration."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

NS = (3.4445, -4.7750, 2.0315)  # a, b, c
# Matrices of one shape are stacked up to this many entries, to bound the memory.
STACK_ENTRIES = 2**26

Items = TypeVar("Items", Tensor, list)


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise a stack of matrices: x (S, m, n) → the same shape, U diag(s) Vᵀ for x = U
    diag(σ) Vᵀ.

    From X = x/‖x‖_F it takes steps X ← aX + (bA + cA²)X with A = XXᵀ. After five of them s lies in
    [0.68, 1.21] where σ is at least 0.002 ‖x‖_F (in exact arithmetic), and falls to 0 with smaller
    σ. A matrix of zeros stays zero. Tall matrices are transposed, so that A is small.

    Wide matrices (n ≥ 2m ≥ 128) take their first two steps at once (`two_steps`), because products
    with X cost the most there. Pairs of later steps, or of steps on vectors, would cost accuracy in
    bf16.
    """
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT.contiguous()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    if x.shape[2] >= 2 * x.shape[1] >= 128 and steps > 1:
        x = two_steps(x)
        steps -= 2
    a, _, _ = NS
    for _ in range(steps):
        x = torch.baddbmm(x, polynomial(torch.bmm(x, x.mT)), x, beta=a)
    return x.mT if tall else x


def two_steps(x: Tensor) -> Tensor:
    """X₂ = a²X + (a(P + P₂) + P₂P) X, where P = bA + cA², A₂ = a²A + (2aP + P²)A, P₂ = bA₂ + cA₂².

    These are symmetric and commute. Multiples of the identity are not added to them, so they are
    not rounded with them."""
    a, _, _ = NS
    A = torch.bmm(x, x.mT)
    P = polynomial(A)
    A2 = torch.baddbmm(A, torch.baddbmm(P, P, P, beta=2 * a), A, beta=a * a)
    P2 = polynomial(A2)
    return torch.baddbmm(x, torch.baddbmm(P + P2, P2, P, beta=a), x, beta=a * a)


def polynomial(A: Tensor) -> Tensor:
    """bA + cA² for a stack of symmetric matrices."""
    _, b, c = NS
    return torch.baddbmm(A, A, A, beta=b, alpha=c)


def split_into_stacks(items: Items, p: Tensor) -> list[Items]:
    """Parts of `items`, a list or tensor with one item for each of several parameters shaped as p,
    so that each part makes one stack."""
    size = max(1, STACK_ENTRIES // p.numel())
    return [items[i : i + size] for i in range(0, len(items), size)]


def stack_as(dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """`tensors`, which have one shape, as a stack (S, …) of this dtype: copied and cast in one
    pass."""
    stack = torch.empty(len(tensors), *tensors[0].shape, dtype=dtype, device=tensors[0].device)
    torch._foreach_copy_(list(stack), list(tensors))
    return stack


def orthogonalize(stack: Tensor, steps: int) -> Tensor:
    """Newton-Schulz on each matrix of a stack (…, m, n), at most STACK_ENTRIES at a time; the same
    shape."""
    matrices = stack.view(-1, *stack.shape[-2:])
    size = max(1, STACK_ENTRIES // matrices.shape[1:].numel())
    done = [newton_schulz(part, steps) for part in matrices.split(size)]  # one empty part for none
    result = done[0] if len(done) == 1 else torch.cat(done)
    return result.view_as(stack)
