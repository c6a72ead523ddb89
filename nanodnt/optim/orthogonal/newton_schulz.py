"""Muon's mathematics: matrices become nearly orthogonal by Keller Jordan's Newton-Schulz iteration."""

from functools import partial

import torch

NS = (3.4445, -4.7750, 2.0315)  # a, b, c
BLOCK = 256  # rows of a symmetric product that are computed at once; the fastest that we measured
STACK_ENTRIES = 2**26  # matrices of one shape are stacked up to this many entries, to bound the memory


def newton_schulz(x, steps: int = 5, triangular: bool = False):
    """Orthogonalise a stack of matrices: x (S, m, n) → the same shape, U diag(s) Vᵀ for x = U diag(σ) Vᵀ.

    From X = x/‖x‖_F it takes steps X ← aX + (bA + cA²)X with A = XXᵀ. After five of them s lies in [0.68, 1.21] where σ
    is at least 0.002 ‖x‖_F (in exact arithmetic), and falls to 0 with smaller σ. A matrix of zeros stays zero. Tall
    matrices are transposed, so that A is small.

    Wide matrices (n ≥ 2m ≥ 128) take their first two steps at once, because products with X cost the most there:
    X₂ = a²X + (a(P + P₂) + P₂P) X, where P = bA + cA², A₂ = a²A + (2aP + P²)A, P₂ = bA₂ + cA₂². These are symmetric and
    commute. Multiples of the identity are not added to them, so they are not rounded with them. Pairs of later steps,
    or of steps on vectors, would cost accuracy in bf16. `triangular`: see `symmetric`.
    """
    a, b, c = NS
    product = partial(symmetric, triangular=triangular)
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    in_pairs, left = x.shape[2] >= 2 * x.shape[1] >= 128 and steps > 1, steps
    while left:
        A = product(x, x.mT)
        P, keep = product(A, A, A, b, c), a
        if in_pairs:
            A = product(product(P, P, P, 2 * a), A, A, a * a)
            P2 = product(A, A, A, b, c)
            P, keep, in_pairs, left = product(P2, P, P + P2, a), a * a, False, left - 1
        x = torch.baddbmm(x, P, x, beta=keep)
        left -= 1
    return x.mT if tall else x


def symmetric(x, y, base=None, beta: float = 1.0, alpha: float = 1.0, triangular: bool = False):
    """α x y + β base for stacks (S, m, k), (S, k, m), (S, m, m) whose result is known to be symmetric.

    `triangular`: each matrix in turn; each block of its rows is computed up to the diagonal and mirrored. On a CPU this
    saves a quarter to a third of the time. A GPU is faster with one product of stacks."""
    if not triangular:
        return torch.bmm(x, y) if base is None else torch.baddbmm(base, x, y, beta=beta, alpha=alpha)
    (S, m, k), out = x.shape, x.new_empty(len(x), x.shape[1], x.shape[1])
    block = BLOCK if k < 2 * m else BLOCK // 2
    for s in range(S):
        for i in range(0, m, block):
            rows, columns = slice(i, i + block), slice(0, i + block)
            part = x[s, rows], y[s, :, columns]
            if base is None:
                torch.mm(*part, out=out[s, rows, columns])
            else:
                torch.addmm(base[s, rows, columns], *part, beta=beta, alpha=alpha, out=out[s, rows, columns])
            out[s, :i, rows] = out[s, rows, :i].mT
    return out


def one_at_a_time(x) -> bool:
    """Whether matrices like x (…, m, n) are orthogonalised one by one, with triangular products: on a CPU, if they have
    more than one block of rows. CPUs with AMX gain more from stacks."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return x.device.type == "cpu" and min(x.shape[-2:]) > BLOCK and not amx()


def split_into_stacks(items, p) -> list:
    """`items`, a list or tensor with one item for each of several parameters shaped as p, in parts, each one stack."""
    size = 1 if one_at_a_time(p) else max(1, STACK_ENTRIES // p.numel())
    return [items[i : i + size] for i in range(0, len(items), size)]


def stack_as(dtype: torch.dtype, tensors) -> torch.Tensor:
    """`tensors`, all of one shape, as a stack (S, …) of this dtype: copied and cast in one pass."""
    stack = torch.empty(len(tensors), *tensors[0].shape, dtype=dtype, device=tensors[0].device)
    torch._foreach_copy_(list(stack), list(tensors))
    return stack


def orthogonalize(stack, steps: int):
    """Newton-Schulz on each matrix of a stack (…, m, n), at most STACK_ENTRIES at a time; the same shape."""
    matrices, triangular = stack.view(-1, *stack.shape[-2:]), one_at_a_time(stack)
    parts = matrices.split(max(1, STACK_ENTRIES // matrices.shape[1:].numel()))
    done = [newton_schulz(part, steps, triangular=triangular) for part in parts]
    return (done[0] if len(done) == 1 else torch.cat(done)).view_as(stack)
