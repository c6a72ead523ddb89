"""Layouts compared with each other: flags that mean the same function, or the same start. That a
norm divides scales out, and that RoPE sees relative positions alone, follows from the equations
(test_layout_equations.py)."""

import math

import pytest
import torch

from layers.slot import Norm, Slot
from model import GPT, GPTConfig
from support.models import (
    HYBRID,
    LLAMA,
    MANY_GAINS,
    NGPT,
    POST,
    QK_FULL,
    S4,
    S5,
    SIZE,
    batch,
    build,
    copied,
    error,
    fresh,
    gradients,
)
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
    ),
    ids=str,
)
def test_at_initialisation_the_same(flags, same):
    idx = batch()[0]
    # the parameters start as fp32 numbers
    assert error(fresh(flags)(idx)[0], fresh(same)(idx)[0]) < roundings(8)


@pytest.mark.parametrize("flags", (dict(), dict(POST, deepnorm=True)), ids=str)
def test_gates_that_are_zero_change_no_bit(flags):
    """GPAS at the start: neither the loss nor the gradient of another parameter."""
    loss, grads = gradients(GPT(GPTConfig(**SIZE, **flags, n_layer=2)), *batch())
    gated = gradients(GPT(GPTConfig(**SIZE, **flags, n_layer=2, gpas=True)), *batch())
    assert torch.equal(loss, gated[0]) and len(gated[1]) == len(grads) + 4
    assert all(torch.equal(grad, gated[1][name]) for name, grad in grads.items())


def test_a_gate_shrinks_the_stream_and_not_its_gradient():
    """y = (1 − SiLU(h)) x, ∂y/∂x = 1, which is not the derivative of y, and ∂L/∂h = −SiLU′(h)
    ⟨x, ∂L/∂y⟩. SiLU and its derivative at 0.75 are 0.5093840 and 0.8425999."""
    slot, x = Slot(shrinks=True).double(), torch.arange(1.0, 5.0).double().requires_grad_()
    torch.nn.init.constant_(slot.gate, 0.75)
    dx, dh = torch.autograd.grad(slot(x), (x, slot.gate), 2 * x)
    assert torch.equal(dx, 2 * x) and dh.item() == pytest.approx(-0.8425999 * 2 * 30, rel=1e-6)
    assert error(slot(x), (1 - 0.5093840) * x) < 1e-6


def test_derf_is_odd_and_bounded_about_its_middle():
    """y = γ erf(αx + s) + β: β at x = −s/α, and within γ of it."""
    slot = Slot(Norm("dyt", squash="erf", shift=True), n_bias=4).double()
    for p, value in ((slot.alpha, 0.75), (slot.shift, 0.375), (slot.bias, 0.25)):
        torch.nn.init.constant_(p, value)
    y = slot(torch.tensor([-0.5, 0.5, -1.5, 99.0])).tolist()
    assert y == pytest.approx([0.25, 0.25 + math.erf(0.75), 0.25 - math.erf(0.75), 1.25], rel=1e-14)


@pytest.mark.parametrize(
    "flags, part, n_rows, is_divided_out",
    (
        (dict(qk_norm=True), "q", 4, True),  # one head of four
        (QK_FULL, "q", 4, False),
        (QK_FULL, "q", 16, True),
        (QK_FULL, "v", 4, False),
        (HYBRID, "v", 4, True),
    ),
    ids=str,
)
def test_scales_that_the_norms_in_attention_divide_out(flags, part, n_rows, is_divided_out):
    """eps is small beside the squares of q, k and v, which are about 1."""
    model, idx = build(dict(flags, norm_eps=1e-14)), batch()[0]
    before = model(idx)[0]
    with torch.no_grad():
        getattr(model.blocks[0].attn.f, part).weight[:n_rows] *= 3
    change = error(model(idx)[0], before)
    assert change < 1e-9 if is_divided_out else change > 1e-3


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
def test_a_tied_stream_stays_on_the_sphere():
    """nGPT: RMS 1 after each sub-layer. A share of 0 is the identity, the sign of λ has no
    effect."""
    model, (idx, _) = build(dict(NGPT, norm_eps=0.0)), batch()
    x, _ = model.embed(idx, torch.arange(idx.shape[1]))
    for residual in (part for block in model.blocks for part in (block.attn, block.mlp)):
        y = residual(x)
        assert error(y.square().mean(-1), torch.ones(idx.shape)) < 1e-12
        residual.mid.gain.neg_()
        assert torch.equal(residual(x), y)
        residual.mid.gain.zero_()
        assert error(residual(x), x) < 1e-12 < error(y, x)
        x = y
