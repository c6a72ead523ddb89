"""Layouts compared with each other: flags that mean the same function, or the same start. That a
norm divides scales out, and that RoPE sees relative positions alone, follows from the equations
(test_layout_equations.py)."""

import math

import pytest
import torch

from layers.slot import Norm, Slot
from model import GPT, GPTConfig
from support.models import (
    LLAMA,
    MANY_GAINS,
    NGPT,
    POST,
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
    """GPAS at the start: loss and all other gradients. The gates have one too, but that before a
    final norm, which divides it out up to eps."""
    (loss, grads), (gated_loss, gated) = (
        gradients(GPT(GPTConfig(**SIZE, n_layer=2, **flags, **gpas)), *batch())
        for gpas in (dict(), dict(gpas=True))
    )
    assert torch.equal(loss, gated_loss)
    assert all(torch.equal(grad, gated.pop(name)) for name, grad in grads.items())
    assert len(gated) == 4 and all(grad.all() for grad in gated.values())


def slot_of(dim, shift, **settings):
    """(a float64 slot whose `shift` or `gate` has this value, x (3, dim) that needs a gradient)."""
    slot = Slot(**settings).double()
    slot.init()
    with torch.no_grad():
        (slot.gate if slot.shift is None else slot.shift).fill_(shift)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, dim, dtype=torch.float64, generator=generator)
    return slot, x.requires_grad_()


@pytest.mark.parametrize("g", (0.0, 0.7, -1.3))
def test_a_gate_shrinks_the_stream_and_not_its_gradient(g):
    """y = (1 − SiLU(g)) x, ∂y/∂x = 1, ∂L/∂g = −SiLU′(g) ⟨x, ∂L/∂y⟩: not what finite differences of
    y give."""
    slot, x = slot_of(4, g, shrinks=True)
    dy = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    y = slot(x)
    dx, dg = torch.autograd.grad(y, (x, slot.gate), dy)
    sigmoid = 1 / (1 + math.exp(-g))
    assert torch.equal(dx, dy) and error(y, (1 - g * sigmoid) * x) < 1e-14
    slope = sigmoid * (1 + g * (1 - sigmoid))
    assert error(dg, -slope * (x * dy).sum().view(1)) < 1e-14
    if g:
        assert not torch.autograd.gradcheck(slot, x, raise_exception=False)


@pytest.mark.parametrize("s", (0.0, 0.375))
def test_derf_is_odd_bounded_and_has_its_slope(s):
    """y = γ erf(αx + s) + β: β at x = −s/α, symmetric about that point, where its slope is 2αγ/√π,
    and within γ of β."""
    norm = Norm("dyt", squash="erf", alpha=0.75, shift=True)
    slot, x = slot_of(4, s, norm=norm, n_gain=4, init_gain=1.5, n_bias=4)
    with torch.no_grad():
        slot.bias.fill_(0.25)
    middle = torch.full((1, 4), -s / 0.75, dtype=torch.float64, requires_grad=True)
    y, at_middle = slot(middle + x), slot(middle)
    assert error(at_middle, torch.full_like(at_middle, 0.25)) < 1e-12
    assert error(y + slot(middle - x), torch.full_like(y, 0.5)) < 1e-12
    slope = torch.autograd.grad(at_middle.sum(), middle)[0]
    assert error(slope, torch.full_like(slope, 2 * 0.75 * 1.5 / math.pi**0.5)) < 1e-12
    assert (slot(1e3 * x) - 0.25).abs().max() <= 1.5 and y.std() > 0.5
    wanted = [1.5 * math.erf(0.75 * v + s) + 0.25 for v in x.flatten().tolist()]
    assert error(slot(x).flatten(), torch.tensor(wanted, dtype=torch.float64)) < 1e-12


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
