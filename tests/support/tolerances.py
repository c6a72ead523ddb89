"""How far apart two computations of the same numbers may be.

- The same code, run twice in the same way: equal bit by bit.
- In float64: 1e-9 to 1e-12 of the largest entry. That is thousands of roundings: the order of a sum
  changes less, and a mistake changes more.
- In fp32, bf16 or fp16: a number of `roundings`, counted from the computation. A whole network
  makes errors larger, each layout by another factor: there `as_near` compares with another
  computation, or with `shaken` weights.
"""

import copy

import torch

from support.models import error


def roundings(n: float, dtype: torch.dtype = torch.float32) -> float:
    """How far apart, relative to the largest entry, are two results that are each rounded `n`
    times, one time after the other: by half an eps each time. A sum of k terms is √k roundings:
    their errors have random signs."""
    return n * torch.finfo(dtype).eps


# of a small batch: the softmax of 50 entries, √50, the mean of a dozen, √12, and a few more
LOSS = roundings(16)
# Logits of two blocks: 14 operations each, which round a few times; norms, gains and softmax make
# errors three times larger. Gradients are ten times as far off: a small entry is a difference of
# large ones.
FORWARD, GRADIENTS = roundings(80), roundings(800)
FOR_PRINTING = 5e-6  # what six digits leave out, relatively


@torch.no_grad()
def shake(model, by: float, seed: int = 0) -> None:
    """Make each entry of each parameter larger or smaller, relatively by `by`."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        signs = 2 * torch.randint(2, p.shape, generator=generator) - 1
        p.mul_(1 + by * signs)


def shaken(model, dtype: torch.dtype = torch.float32):
    """A copy of a float64 model, each entry of each parameter larger or smaller by one eps of
    `dtype`. Its results are farther off than those of a model that computes in this dtype: mostly
    twice as far in fp32, four times in bf16."""
    moved = copy.deepcopy(model)
    shake(moved, torch.finfo(dtype).eps)
    return moved


def flat(*tensors: torch.Tensor | None) -> torch.Tensor:
    """All entries, as one vector: the largest is then the measure of all of them. A gradient that
    is None is left out."""
    return torch.cat([t.detach().flatten() for t in tensors if t is not None])


def as_near(ours, usual, exact, times: float = 4.0) -> bool:
    """Whether `ours` is about as near to `exact` as `usual` is: at most `times` as far, and four
    roundings of fp32. All are tensors, or {name: gradient}, which count as one vector: the gradient
    of a single number can be a small difference of large ones, and then its own relative error is
    chance. `exact` is float64."""
    if isinstance(exact, dict):
        assert ours.keys() == usual.keys() == exact.keys()
        ours, usual, exact = (flat(*grads.values()) for grads in (ours, usual, exact))
    return error(ours, exact) <= times * error(usual, exact) + roundings(4)
