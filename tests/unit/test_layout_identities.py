"""Layouts compared with each other: flags that mean the same function, or the same start. That a
norm divides scales out, and that RoPE sees relative positions alone, follows from the equations
(test_layout_equations.py)."""

import pytest
import torch

from support.models import LLAMA, MANY_GAINS, NGPT, POST, S4, S5, batch, build, copied, error, fresh
from support.tolerances import roundings


@pytest.mark.parametrize(
    "flags, same",
    [
        (dict(lns="norm", lns_power=0.0), dict()),
        (
            dict(S5, post_norm_blocks=3, mlp="swiglu", qk_norm=False),
            dict(POST, input_norm=True, mlp="swiglu"),
        ),
    ],
    ids=str,
)
def test_two_ways_to_say_the_same(flags, same):
    model, idx = build(flags, 3), batch()[0]
    assert torch.equal(copied(same, model.state_dict())(idx)[0], model(idx)[0])


@pytest.mark.parametrize(
    "flags, same",
    (
        (dict(lns="norm", lns_learn=True), dict(lns="norm")),
        (dict(lns="norm", lns_learn=True, gain="branch", gain_param="magdir"), dict(lns="norm")),
        (
            dict(S5, lns="norm", lns_learn=True, lns_power=1.0, gain_param="expmagdir"),
            dict(S5, lns="norm", lns_power=1.0),
        ),
        (dict(LLAMA, bias=True, gain_out="scale"), dict(LLAMA, bias=True)),
        (dict(S4, gain="none"), S4),
        (dict(MANY_GAINS, gain_param="expmagdir"), MANY_GAINS),
        (dict(branch_scale="skipinit", branch_scale_init=1.0), dict()),
        (dict(POST, admin=True), POST),
        (dict(gpas=True), dict()),
    ),
    ids=str,
)
def test_at_initialisation_the_same(flags, same):
    idx = batch()[0]
    # the parameters start as fp32 numbers
    assert error(fresh(flags)(idx)[0], fresh(same)(idx)[0]) < roundings(8)


@pytest.mark.parametrize("kind", ("magdir", "expmagdir"))
def test_magnitude_and_direction_precondition_as_claimed(kind):
    """With J the Jacobian of γ(magnitude, direction) at γ = 1: J Jᵀ is d along the direction and 1
    orthogonal to it."""
    slot, d = fresh(dict(gain_param=kind)).blocks[0].attn.pre, 16
    assert torch.equal(slot.factor_for_weight(), torch.ones(d, dtype=torch.float64))
    gains, parts = slot.factor_for_weight(), (slot.magnitude, slot.direction)
    rows = [torch.autograd.grad(g, parts, retain_graph=True) for g in gains]
    jacobian = torch.stack([torch.cat(row) for row in rows])  # (d, 1 + d)
    along = torch.full((d, d), 1 / d, dtype=torch.float64)
    assert error(jacobian @ jacobian.T, d * along + torch.eye(d) - along) < 1e-12
    with torch.no_grad():  # the length of the direction does not matter
        slot.direction.copy_(1 + torch.arange(d) / 3)
        before = slot.factor_for_weight()
        slot.direction.mul_(7)
        assert error(slot.factor_for_weight(), before) < 1e-12
        assert error(before.square().mean(), torch.ones(())) < 1e-12


@torch.no_grad()
def test_the_sign_of_a_share_has_no_effect():
    """nGPT takes its absolute value; those of test_layout_equations.py are positive."""
    model, idx = build(NGPT), batch()[0]
    before = model(idx)[0]
    for block in model.blocks:
        block.attn.mid.gain.neg_()
    assert torch.equal(model(idx)[0], before)
