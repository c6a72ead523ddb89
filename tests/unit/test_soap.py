"""SOAP against its authors' algorithm, in float64."""

import pytest
import torch

from support.optimizers import ALL, MIXED, assert_steps, tiny, with_torch
from support.tolerances import roundings

BETAS = (0.8, 0.9)
FREQUENCY = 3
EXPERTS = dict(MIXED, balance="loss", router="softmax")
# Bases change after two of eight steps. L and R then have full rank, and condition numbers below
# 1e4: a product with them makes an error no larger than by this factor.
TOLERANCE = 1e4 * roundings(100, torch.float64)


def authors_soap(w, decay, steps):
    """The authors' algorithm for one matrix: m stays rotated, and moves to the new bases when they
    change. `steps`: [(gradient, LR)], of which the first only makes the bases."""
    beta1, beta2 = BETAS
    g = steps[0][0]
    # The eigenvectors of eigenvalues that are 0 depend on the last bits of these.
    averages = [(1 - beta2) * (g @ g.T), (1 - beta2) * (g.T @ g)]
    q_l, q_r = (torch.linalg.eigh(average)[1].flip(1) for average in averages)
    m = torch.zeros_like(w)
    v = torch.zeros_like(w)
    for t, (g, lr) in enumerate(steps[1:], 1):
        rotated = q_l.T @ g @ q_r
        m = beta1 * m + (1 - beta1) * rotated
        v = beta2 * v + (1 - beta2) * rotated**2
        size = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        w = w - size * q_l @ (m / (v.sqrt() + 1e-8)) @ q_r.T
        w = w - lr * decay * w
        averages[0] = beta2 * averages[0] + (1 - beta2) * g @ g.T
        averages[1] = beta2 * averages[1] + (1 - beta2) * g.T @ g
        if t % FREQUENCY:
            continue
        m = q_l @ m @ q_r.T
        order = (q_l.T @ averages[0] @ q_l).diag().argsort(descending=True)
        q_l = torch.linalg.qr(averages[0] @ q_l[:, order])[0]
        v = v[order]
        order = (q_r.T @ averages[1] @ q_r).diag().argsort(descending=True)
        q_r = torch.linalg.qr(averages[1] @ q_r[:, order])[0]
        v = v[:, order]
        m = q_l.T @ m @ q_r
    return w


@pytest.mark.parametrize("layout", [dict(ALL, n_ff=24), EXPERTS], ids=["all", "mixed"])
def test_it_is_the_authors_algorithm(layout):
    """For every matrix of the blocks, and each expert of a stack; all else is on AdamW, whose decay
    here is that of the matrices."""

    def update(role, w, decay, steps):
        if role not in ("qk", "vo", "ffn"):
            p = torch.nn.Parameter(w)
            return with_torch(p, steps, torch.optim.AdamW([p], betas=BETAS, weight_decay=decay))
        if w.ndim == 2:
            return authors_soap(w, decay, steps)
        experts = range(len(w))
        steps = [[(g[i], lr) for g, lr in steps] for i in experts]
        return torch.stack([authors_soap(w[i], decay, steps[i]) for i in experts])

    flags = dict(optimizer="soap", beta1=BETAS[0], beta2=BETAS[1], soap_frequency=FREQUENCY)
    assert_steps(update, tiny(**layout).double(), TOLERANCE, **flags)
