"""SOAP against its authors' algorithm in float64, and its properties."""

import pytest
import torch

from nanodnt.optim.registry import RULES, Group, Work
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
    change. `steps`: [(gradient, LR)]."""
    beta1, beta2 = BETAS
    g = steps[0][0]
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
        return torch.stack(
            [authors_soap(w[i], decay, [(g[i], lr) for g, lr in steps]) for i in experts]
        )

    beta1, beta2 = BETAS
    flags = dict(optimizer="soap", beta1=beta1, beta2=beta2, soap_frequency=FREQUENCY)
    assert_steps(update, tiny(**layout).double(), TOLERANCE, **flags)


def run(grads, p, frequency):
    """(p, its state) after SOAP's steps on one matrix, without decay."""
    group = Group(betas=BETAS, eps=1e-8, frequency=frequency, lr=0.01, weight_decay=0.0)
    p = p.clone()
    state = RULES["soap"].state(p, group)
    for g in grads:
        RULES["soap"].step([Work(group, [p], [g.clone()], [state])], None, None)
    return p, state


def draw(n, *shape, dtype=torch.float64):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_bases_stay_orthogonal():
    """Over a hundred changes in fp32, with gradients whose averages have no full rank."""
    n = 40
    _, state = run(draw(101, n, 3, dtype=torch.float32), torch.zeros(n, 3), frequency=1)
    for side in ("left", "right"):
        q = state[f"{side}_basis"].double()
        # a reflection for each column, and each rounds √n times
        error = (q.T @ q - torch.eye(len(q))).abs().max()
        assert error < roundings(2 * n * n**0.5), side


def test_gradients_in_another_basis_move_the_weights_in_it():
    """U g Vᵀ for fixed orthogonal U and V: the same run, in their basis."""
    start, u, v, *grads = draw(15, 8, 8)
    u = torch.linalg.qr(u)[0]
    v = torch.linalg.qr(v)[0]
    here, _ = run(grads, start, frequency=2)
    there, _ = run([u @ g @ v.T for g in grads], u @ start @ v.T, frequency=2)
    torch.testing.assert_close(there, u @ here @ v.T, rtol=0.0, atol=1e-9)
    assert (here - start).norm() > 0.1
