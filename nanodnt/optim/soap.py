"""SOAP (arXiv 2409.11321, as in its authors' code): Adam in the eigenbases Q of Shampoo's averages
L and R, for the matrices of the blocks; AdamW for all other parameters.

    m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) (Q_Lᵀ g Q_R)²
    w ← w − η √(1 − β₂ᵗ)/(1 − β₁ᵗ) Q_L [Q_Lᵀ m Q_R / (√v + ε)] Q_Rᵀ;   w ← w (1 − ηλ)
    L ← β₂ L + (1 − β₂) g gᵀ;   R ← β₂ R + (1 − β₂) gᵀ g

The first gradient makes L, R and their eigenvectors, largest first, and changes nothing else; t
counts the updates from the second one on. After every f-th update Q takes a step of the power
method: its columns, and the entries of v with them, are sorted by the diagonal of Qᵀ L Q, then Q
becomes the orthogonal factor of L Q. f is `soap_frequency`; ε is `adam_eps`, and √v beside it has
no correction. The authors' code rotates m and keeps it so, which gives the same updates. A
parameter of three dimensions is a stack of matrices: experts. State of r × c: 8 (r² + c² + r c)
bytes.

LR, decay and f are the defaults of that code; its betas are 0.95 both. There a side of more than
10,000 has no basis; embedding and head have one on the other side; vectors are on Adam. Here every
side has one, and embedding, head and vectors are on AdamW: our choice.
"""

from functools import partial

import torch
from torch import Tensor

from layers.sharding import is_sharded
from model import Transformer
from nanodnt.optim.kernels import count_step
from nanodnt.optim.registry import Group, State, Work, divide_gradients, register
from nanodnt.settings import TrainConfig


def options(config: TrainConfig, role: str, model: Transformer) -> Group:
    betas = (config.beta1, config.beta2)
    return Group(betas=betas, eps=config.adam_eps, frequency=config.soap_frequency)


def state(p: Tensor, group: Group) -> State:
    """`left` and `right` are L and R. `step` counts gradients; it is on the CPU, because the host
    reads it."""
    rows, columns = p.shape[-2:]
    return dict(
        step=torch.zeros((), device="cpu"),
        exp_avg=torch.zeros_like(p),
        exp_avg_sq=torch.zeros_like(p),
        left=zeros_as(p, rows),
        right=zeros_as(p, columns),
        left_basis=zeros_as(p, rows),
        right_basis=zeros_as(p, columns),
    )


def zeros_as(p: Tensor, n: int) -> Tensor:
    """(…, n, n) for a p of shape (…, r, c), split over processes as p is."""
    shape = (*p.shape[:-2], n, n)
    if not is_sharded(p):
        return p.new_zeros(shape)
    from torch.distributed.tensor import zeros

    return zeros(shape, dtype=p.dtype, device_mesh=p.device_mesh, placements=p.placements)


def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """The host waits for found_inf: it has to know in which step the bases change."""
    from nanodnt.optim.orthogonal.owners import make_batches, update_batch  # for this rule alone

    if found_inf is not None and bool(found_inf):
        return
    for part in work:
        divide_gradients(part.grads, grad_scale)
        for batch in make_batches(part):
            steps = [tensors["step"] for tensors in batch]
            changed = ["p", "exp_avg", "exp_avg_sq", "left", "right"]
            if any(int(step) % part.group["frequency"] == 0 for step in steps):
                changed += ["left_basis", "right_basis"]
            update_batch(batch, changed, partial(update_matrix, part.group))
            count_step(steps, None)


def update_matrix(group: Group, tensors: State) -> None:
    """Update t, from 0, of one matrix, or of a stack of them, in place. `tensors`: p, its gradient
    and its state."""
    t = int(tensors["step"])
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    g = tensors["grad"]
    v = tensors["exp_avg_sq"]
    left = tensors["left_basis"]
    right = tensors["right_basis"]
    if t > 0:
        m = tensors["exp_avg"].lerp_(g, 1 - beta1)
        v.lerp_((left.mT @ g @ right).square(), 1 - beta2)
        rate = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        direction = left.mT @ m @ right / (v.sqrt() + group["eps"])
        p = tensors["p"].sub_(rate * (left @ direction @ right.mT))
        p.mul_(1 - lr * group["weight_decay"])
    for side, factor, moments in (("left", g, v.mT), ("right", g.mT, v)):
        average = tensors[side].lerp_(factor @ factor.mT, 1 - beta2)
        basis = tensors[f"{side}_basis"]
        if t == 0:  # in fp64, since a GPU's fp32 may fail on eigenvalues that are all 0
            basis.copy_(torch.linalg.eigh(average.double()).eigenvectors.flip(-1))
        elif t % group["frequency"] == 0:
            improve(basis, average, moments)


def improve(basis: Tensor, average: Tensor, v: Tensor) -> None:
    """One step of the power method on a basis (…, n, n). The last dimension of v has this basis."""
    product = average @ basis
    order = (basis * product).sum(-2, keepdim=True).argsort(descending=True)  # (…, 1, n)
    v.copy_(v.take_along_dim(order, -1))
    basis.copy_(torch.linalg.qr(product.take_along_dim(order, -1)).Q)


register(
    "soap",
    options,
    state,
    step,
    defaults=dict(
        learning_rate=3e-3,
        weight_decay=0.01,
        soap_frequency=10,
        adam_eps=1e-8,
        adamw_learning_rate=None,
        adamw_weight_decay=None,
    ),
    fallback_rule="adamw",
)
