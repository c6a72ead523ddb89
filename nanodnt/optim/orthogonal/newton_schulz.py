"""Muon's mathematics: matrices become nearly orthogonal by a Newton-Schulz iteration, with Keller
Jordan's coefficients or those of Polar Express."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]  # a, b, c of a step


class Iteration(NamedTuple):
    margin: float  # X starts with a Frobenius norm of 1/margin
    steps: tuple[Coefficients, ...]


ITERATIONS = {
    "jordan": Iteration(1.0, steps=((3.4445, -4.7750, 2.0315),) * 20),
    # arXiv 2505.16932, Algorithm 1, for σ ≥ 1e-3 ‖x‖_F, with a safety factor of 1.02 and intervals
    # of 1:50 at most: the numbers of modded-nanogpt, nanochat and dion
    "polar": Iteration(
        1.02,
        steps=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
}
# Matrices of one shape are stacked up to this many entries, to bound the memory.
STACK_ENTRIES = 2**26

Items = TypeVar("Items", Tensor, list)


def newton_schulz(x: Tensor, steps: int = 5, coefficients: str = "jordan") -> Tensor:
    """Orthogonalise a stack of matrices: x (S, m, n) → the same shape, U diag(s) Vᵀ for x = U
    diag(σ) Vᵀ. `coefficients`: a key of ITERATIONS, which has at least so many steps.

    From X = x/(margin ‖x‖_F) it takes steps X ← aX + (bA + cA²)X with A = XXᵀ. In exact arithmetic
    five of them take s to [0.68, 1.21] where σ is at least 0.002 ‖x‖_F; with "polar" to [0.84,
    1.15] where it is at least 0.001 ‖x‖_F. s falls to 0 with smaller σ. A matrix of zeros stays
    zero. Tall matrices are transposed, so that A is small.

    Wide matrices (n ≥ 2m ≥ 128) take their first two steps at once (`two_steps`), because products
    with X cost the most there. Pairs of later steps, or of steps on vectors, would cost accuracy in
    bf16.
    """
    iteration = ITERATIONS[coefficients]
    left = list(iteration.steps[:steps])
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7) * iteration.margin)
    if x.shape[2] >= 2 * x.shape[1] >= 128 and steps > 1:
        x = two_steps(x, left.pop(0), left.pop(0))
    for step in left:
        x = torch.baddbmm(x, polynomial(torch.bmm(x, x.mT), step), x, beta=step[0])
    return x.mT if tall else x


def two_steps(x: Tensor, first: Coefficients, second: Coefficients) -> Tensor:
    """X₂ = a₁a₂X + (a₂P₁ + a₁P₂ + P₂P₁) X, where P₁ = b₁A + c₁A², A₂ = a₁²A + (2a₁P₁ + P₁²)A, P₂ =
    b₂A₂ + c₂A₂².

    These are symmetric and commute. Multiples of the identity are not added to them, so they are
    not rounded with them."""
    a = first[0]
    ratio = second[0] / a
    A = torch.bmm(x, x.mT)
    P = polynomial(A, first)
    A2 = torch.baddbmm(A, torch.baddbmm(P, P, P, beta=2 * a), A, beta=a * a)
    P2 = polynomial(A2, second)
    linear = torch.add(P2, P, alpha=ratio)
    return torch.baddbmm(x, torch.baddbmm(linear, P2, P, beta=a), x, beta=a * second[0])


def polynomial(A: Tensor, step: Coefficients) -> Tensor:
    """bA + cA² for a stack of symmetric matrices."""
    _, b, c = step
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


def orthogonalize(stack: Tensor, steps: int, coefficients: str) -> Tensor:
    """Newton-Schulz on each matrix of a stack (…, m, n), at most STACK_ENTRIES at a time; the same
    shape."""
    matrices = stack.view(-1, *stack.shape[-2:])
    size = max(1, STACK_ENTRIES // matrices.shape[1:].numel())
    parts = matrices.split(size)  # one empty part for none
    done = [newton_schulz(part, steps, coefficients) for part in parts]
    result = done[0] if len(done) == 1 else torch.cat(done)
    return result.view_as(stack)
