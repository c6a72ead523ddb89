"""Layouts compared with each other: flags that mean the same function, and scales that a norm divides out."""

import pytest
import torch

from layers.ops import rotary
from support.models import LLAMA, MANY_GAINS, POST, S4, S5, batch, build, copied, error, fresh


@pytest.mark.parametrize(
    "flags, same",
    [(dict(lns=position, lns_power=0.0), dict()) for position in ("norm", "branch", "residual", "input")]
    + [
        (dict(S5, post_norm_blocks=3, mlp="swiglu", qk_norm=False), dict(POST, input_norm=True, mlp="swiglu")),
        (dict(POST, post_norm_blocks=2), POST),
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
        (dict(gain="none", lns="norm"), dict(lns="norm")),
        (dict(MANY_GAINS, gain_param="magdir"), MANY_GAINS),
        (dict(MANY_GAINS, gain_param="expmagdir"), MANY_GAINS),
        (dict(branch_scale="skipinit", branch_scale_init=1.0), dict()),
        (dict(POST, admin=True), POST),
    ),
    ids=str,
)
def test_at_initialisation_the_same(flags, same):
    idx = batch()[0]
    assert error(fresh(flags)(idx)[0], fresh(same)(idx)[0]) < 1e-6  # the parameters start as fp32 numbers


@pytest.mark.parametrize("kind", ("magdir", "expmagdir"))
def test_magnitude_and_direction_precondition_as_claimed(kind):
    """With J the Jacobian of γ(magnitude, direction) at γ = 1: J Jᵀ is d along the direction and 1 orthogonal to it."""
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


def scale_matrices(flags, factors):
    """Relative change of the logits when the matrices named in `factors` are multiplied by them in every block."""
    model, idx = build(dict(flags, norm_eps=1e-14)), batch()[0]
    before = model(idx)[0]
    with torch.no_grad():
        for block in model.blocks:
            for name, factor in factors.items():
                block.get_submodule(name).weight.mul_(factor)
    return error(model(idx)[0], before)


@pytest.mark.parametrize(
    "with_norm, without, factors",
    (
        (dict(qk_norm=True), dict(), {"attn.f.q": 3.0, "attn.f.k": 0.2}),
        (dict(mid_norm="both"), dict(), {"attn.f.o": 3.0, "mlp.f.down": 0.2}),
        (dict(mid_norm="attn"), dict(mid_norm="mlp"), {"attn.f.o": 5.0}),
        (dict(mid_norm="both", mlp="relu"), dict(mlp="relu"), {"mlp.f.up": 5.0}),  # ReLU is homogeneous
        (dict(mid_norm="both"), dict(), {"attn.f.v": 5.0}),
        (dict(gain_out="norm"), dict(gain_out="scale"), {"attn.f.q": 7.0, "attn.f.k": 7.0}),
        (
            dict(gain_out="norm", mlp="swiglu"),
            dict(mlp="swiglu"),
            {"attn.f.v": 7.0, "mlp.f.gate": 3.0, "mlp.f.up": 0.2},
        ),
        (dict(sigma_reparam=True), dict(), {"attn.f.q": 7.0, "attn.f.v": 0.2, "attn.f.o": 3.0, "mlp.f.up": 3.0}),
        (dict(sigma_reparam=True), dict(), {"mlp.f.down": 7.0}),
        (dict(S4, branch_scale="layerscale"), dict(branch_scale="layerscale"), {"attn.f.o": 7.0, "mlp.f.down": 7.0}),
    ),
)
def test_a_norm_ignores_the_scale_of_the_matrix_before_it(with_norm, without, factors):
    assert scale_matrices(with_norm, factors) < 1e-9
    assert scale_matrices(without, factors) > 1e-3


def test_lns_under_qk_norm_acts_through_v_and_under_a_mid_norm_not_at_all():
    lns, idx = dict(lns="norm", lns_branches="attn", norm_eps=1e-14), batch()[0]
    for flags, acts in ((dict(qk_norm=True), True), (dict(qk_norm=True, mid_norm="attn"), False)):
        model, plain = build(dict(lns, **flags), 3), build(dict(flags, norm_eps=1e-14), 3)
        assert (error(model(idx)[0], plain(idx)[0]) > 1e-3) == acts
        with torch.no_grad():
            for number, block in enumerate(plain.blocks, 1):
                block.attn.f.v.weight.div_(number**0.5)
        assert error(model(idx)[0], plain(idx)[0]) < 1e-9
    flags = dict(gain_out="norm", norm_eps=1e-14)  # q, k, v and up are normalised, which divides the factor out
    assert error(build(dict(flags, lns="norm"), 3)(idx)[0], build(flags, 3)(idx)[0]) < 1e-9


def test_rope_sees_relative_positions_only():
    torch.manual_seed(0)
    model, x = build(dict(pos="rope", qk_norm=True)), torch.randn(2, 6, 16, dtype=torch.float64)
    y, shifted, stretched = (
        model.blocks[0](x, rotary(positions, head_dim=4, theta=10000.0))
        for positions in (torch.arange(6), torch.arange(6) + 11, torch.arange(6) * 2)
    )
    assert error(shifted, y) < 1e-5 < 1e-3 < error(stretched, y)
