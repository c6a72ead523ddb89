"""Layouts compared with each other: flags that mean the same function, and scales that a norm divides out."""

import re

import pytest
import torch

from layers.ops import rotary
from support import reference
from support.models import (
    BLOCK,
    LAYERNORM,
    LLAMA,
    MANY_GAINS,
    NONE,
    POST,
    S4,
    S5,
    batch,
    build,
    copied,
    error,
    fresh,
    scale_matrices,
)


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
        (
            dict(S5, lns="norm", lns_learn=True, lns_power=1.0, gain_param="expmagdir"),
            dict(S5, lns="norm", lns_power=1.0),
        ),
        (
            dict(lns="norm", lns_learn=True, gain="branch", gain_param="magdir", lns_branches="mlp"),
            dict(lns="norm", lns_branches="mlp"),
        ),
        (dict(LLAMA, bias=True, gain_out="scale"), dict(LLAMA, bias=True)),
        (dict(gain="branch"), dict()),
        (dict(S4, gain="none"), S4),
        (dict(gain="none", lns="norm"), dict(lns="norm")),
        (dict(MANY_GAINS, gain_param="magdir"), MANY_GAINS),
        (dict(MANY_GAINS, gain_param="expmagdir"), MANY_GAINS),
        (
            dict(mid_norm="both", branch_scale="layerscale", gain_param="expmagdir", branch_scale_init=0.3),
            dict(mid_norm="both", branch_scale="skipinit", branch_scale_init=0.3),
        ),
        (dict(branch_scale="layerscale", branch_scale_init=1.0), dict()),
        (dict(branch_scale="skipinit", branch_scale_init=1.0), dict()),
        (dict(POST, admin=True), POST),
    ),
    ids=str,
)
def test_at_initialisation_the_same(flags, same):
    idx = batch()[0]
    assert error(fresh(flags)(idx)[0], fresh(same)(idx)[0]) < 1e-6  # the parameters start as fp32 numbers


def test_equal_gains_of_the_branches_are_a_shared_gain():
    for flags in (dict(S4, mlp="swiglu"), dict(LAYERNORM, n_kv_head=2)):
        shared, idx, renamed = build(flags), batch()[0], {}
        for key, t in shared.state_dict().items():
            branch = re.fullmatch("(" + BLOCK + r")(attn|mlp)\.pre\.gain", key)
            if branch is None:
                renamed[key] = t
            else:
                parts = "qkv" if branch[2] == "attn" else ["up", "gate"][: 1 + ("mlp" in flags)]
                renamed |= {f"{branch[1]}{branch[2]}.f.{part}.pre.gain": t for part in parts}
        if "bias" in flags:  # γ (N(x) + β) = γ N(x) + γβ
            for key in [key for key in renamed if key.endswith(("attn.pre.bias", "mlp.pre.bias"))]:
                renamed[key] = renamed[key] / shared.state_dict()[key.replace("bias", "gain")]
        assert error(copied(dict(flags, gain="branch"), renamed, 2)(idx)[0], shared(idx)[0]) < 1e-12


def test_dnp_on_queries_and_keys_starts_as_qk_norm():
    u = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dnp, qk = fresh(dict(gain_out="norm", n_kv_head=2), 1), fresh(dict(qk_norm=True, n_kv_head=2), 1)
    dnp, qk = dnp.blocks[0].attn.f, qk.blocks[0].attn.f
    for ours, theirs, norm in ((dnp.q, qk.q, qk.q_norm), (dnp.k, qk.k, qk.k_norm)):
        assert error(ours(u).unflatten(-1, (-1, 4)), norm(theirs(u).unflatten(-1, (-1, 4)))) < 1e-12
    v = dnp.v(u)
    assert error(v, reference.rms(qk.v(u), 1e-2)) < 1e-12  # over the full width


@pytest.mark.parametrize("kind", ("magdir", "expmagdir"))
def test_magnitude_and_direction_precondition_as_claimed(kind):
    """With J the Jacobian of γ(magnitude, direction) at γ = 1: J Jᵀ is d along the direction and 1 orthogonal to it."""
    slot, d = fresh(dict(gain_param=kind)).blocks[0].attn.pre, 16
    assert torch.equal(slot.folded(), torch.ones(d, dtype=torch.float64))
    rows = [torch.autograd.grad(g, (slot.magnitude, slot.direction), retain_graph=True) for g in slot.folded()]
    jacobian = torch.stack([torch.cat(row) for row in rows])  # (d, 1 + d)
    along = torch.full((d, d), 1 / d, dtype=torch.float64)
    assert error(jacobian @ jacobian.T, d * along + torch.eye(d) - along) < 1e-12
    with torch.no_grad():  # the length of the direction does not matter
        slot.direction.copy_(1 + torch.arange(d) / 3)
        before = slot.folded()
        slot.direction.mul_(7)
        assert error(slot.folded(), before) < 1e-12
        assert error(before.square().mean(), torch.ones(())) < 1e-12


def test_dyt_of_the_identity_is_affine():
    flags = dict(norm="dyt", dyt_squash="identity", tie_weights=False, mlp="swiglu")
    model, idx, folded = build(flags), batch()[0], {}
    weights = model.state_dict()
    for key, w in weights.items():
        slot = re.sub(r"\.f\.(q|k|v|up|gate)\.weight", ".pre", key).replace("head.weight", "final_norm")
        if slot != key:
            w = w * weights[slot + ".alpha"] * weights[slot + ".gain"]
        if not key.endswith(("alpha", "gain")):
            folded[key] = w
    flags = dict(NONE, tie_weights=False, mlp="swiglu")
    assert error(copied(flags, folded, 2)(idx)[0], model(idx)[0]) < 1e-12


def test_groups_of_the_same_channels_are_one_group():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double().repeat(1, 1, 4)
    for norm in ("rmsnorm", "layernorm"):
        plain, groups = (fresh(dict(norm=norm, norm_groups=n, input_norm=True)).input_norm for n in (1, 4))
        assert error(groups(x), plain(x)) < 1e-12
        other = torch.cat((3 * x[..., :4], x[..., 4:]), dim=-1)
        assert error(groups(other), plain(other)) > 0.1


@pytest.mark.parametrize(
    "with_norm, without, factors",
    (
        (dict(qk_norm=True), dict(), {"attn.f.q": 3.0, "attn.f.k": 0.2}),
        (dict(qk_norm=True, pos="rope"), dict(pos="rope"), {"attn.f.q": 0.1, "attn.f.k": 7.0}),
        (dict(mid_norm="both"), dict(), {"attn.f.o": 3.0, "mlp.f.down": 0.2}),
        (dict(mid_norm="attn"), dict(mid_norm="mlp"), {"attn.f.o": 5.0}),
        (dict(mid_norm="mlp"), dict(mid_norm="attn"), {"mlp.f.down": 5.0}),
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


@pytest.mark.parametrize("flags", (dict(), dict(norm="layernorm"), dict(norm="dyt"), LLAMA, dict(LLAMA, **S4)))
def test_a_pre_norm_gain_folds_into_the_matrices_after_it(flags):
    model, idx = build(dict(flags, tie_weights=False)), batch()[0]
    before = model(idx)[0]
    pairs = [(model.final_norm, [model.head])]
    for block in model.blocks:
        attn, mlp = block.attn.f, block.mlp.f
        pairs += [(block.attn.pre, [attn.q, attn.k, attn.v])]
        pairs += [(block.mlp.pre, [mlp.up] if mlp.gate is None else [mlp.up, mlp.gate])]
    with torch.no_grad():
        for slot, matrices in pairs:
            for matrix in matrices:
                matrix.weight.mul_(slot.gain)
            slot.gain.fill_(1)
    assert error(model(idx)[0], before) < 1e-12


def test_rope_sees_relative_positions_only():
    torch.manual_seed(0)
    model, x = build(dict(pos="rope", qk_norm=True)), torch.randn(2, 6, 16, dtype=torch.float64)
    y, shifted, stretched = (
        model.blocks[0](x, rotary(positions, head_dim=4, theta=10000.0))
        for positions in (torch.arange(6), torch.arange(6) + 11, torch.arange(6) * 2)
    )
    assert error(shifted, y) < 1e-5 < 1e-3 < error(stretched, y)
