"""Every layout, of the language model and as a ViT, against its equations, which
support/reference.py computes in plain float64; so they are causal."""

import itertools
from dataclasses import replace

import pytest
import torch

from support import models, reference, vision
from support.depth import spread
from support.models import (
    ALL,
    NET,
    REPRESENTATIVES,
    batch,
    build,
    depth_of,
    error,
    floats,
    gradients,
    network,
)
from support.moe import backward, difference, minimised
from support.operators import assert_same_gradients
from support.tolerances import as_near, flat, shaken
from support.vision import POOLS, equation, pictures, scheme


def float64_rotary(positions, head_dim, theta):
    """layers.ops.rotary in float64, as the equations are: a model's angles are fp32, whatever its
    dtype."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = positions[:, None, None] * frequency
    return angle.cos(), angle.sin()


def compare_with_equations(flags, net):
    """In float64. Returns what the equations have: (logits, loss)."""
    model, (idx, targets) = build(flags, net.blocks), batch()
    expected = reference.forward(net, floats(model), idx, targets)
    (logits, none), (none_too, loss) = model(idx), model(idx, targets)
    assert none is none_too is None and logits.dtype == torch.float64
    assert logits.shape == (2, 7, 50) and loss.shape == ()
    assert error(logits, expected[0]) < 1e-10 and error(loss, expected[1]) < 1e-10
    return expected


MIXED = "S5 + Mix-LN + LNS + rope"
BRANCHES = {"both": ("attn", "mlp"), "attn": ("attn",), "mlp": ("mlp",), "none": ()}


@pytest.mark.parametrize(
    "kind, net_kind", (("rmsnorm", "rms"), pytest.param("dyt", "dyt", marks=pytest.mark.deep))
)
def test_every_norm_position_is_the_equation(kind, net_kind):
    for choice in itertools.product(BRANCHES, repeat=3):
        flags = dict(zip(("pre_norm", "mid_norm", "post_norm"), choice, strict=True))
        placed = dict(zip(("pre", "mid", "post"), (BRANCHES[c] for c in choice), strict=True))
        attn, mlp = (
            " ".join(p for p, branches in placed.items() if b in branches) for b in ("attn", "mlp")
        )
        net = dict(attn=attn, mlp=mlp, final="mlp" not in placed["post"], kind=net_kind)
        compare_with_equations(dict(flags, norm=kind), replace(NET, **net))


@pytest.mark.parametrize("n_layer", (pytest.param(1, marks=pytest.mark.deep), 3))
@pytest.mark.parametrize("name", ALL)
def test_forward_is_the_equation(name, n_layer, monkeypatch):
    """In float64, and in fp32 as near as its rounding allows."""
    flags, net = network(name, n_layer)
    idx, targets = batch()

    def logits_and_loss(model):
        return flat(model(idx)[0], model(idx, targets)[1])

    ours = logits_and_loss(build(flags, net.blocks, torch.float32))
    with monkeypatch.context() as patch:
        patch.setattr("model.rotary", float64_rotary)
        logits, loss = compare_with_equations(flags, net)
        usual = logits_and_loss(shaken(build(flags, net.blocks)))
    assert ours.dtype == torch.float32
    assert as_near(ours, usual, flat(logits, loss))


@pytest.mark.parametrize("name", spread(ALL, fast=REPRESENTATIVES))
def test_gradients_are_the_equations_gradients(name, monkeypatch):
    monkeypatch.setattr("model.rotary", float64_rotary)
    flags, net = network(name, depth_of(name))
    model, (idx, targets) = build(flags, depth_of(name)), batch()
    weights, parameters = floats(model), dict(model.named_parameters())
    for key in parameters:
        weights[key].requires_grad_()
    loss = reference.forward(net, weights, idx, targets)[1]
    loss.backward()
    wanted = {key: weights[key].grad for key in parameters}
    assert_same_gradients(gradients(model, idx, targets), (loss, wanted), 1e-10)


def test_a_removed_block_leaves_the_others_their_numbers(monkeypatch):
    monkeypatch.setattr("model.rotary", float64_rotary)
    for name in (
        "LNS",
        "S5 + LNS branch + swiglu",
        "LNS residual",
        "LN + HG + LNS + swiglu",
        "DeepNorm",
        "Keel",
        MIXED,
    ):
        flags, net = network(name, 3)
        model, idx = build(flags, 3), batch()[0]
        del model.blocks[1]
        expected = reference.forward(replace(net, numbers=(1, 3)), floats(model), idx)[0]
        assert error(model(idx)[0], expected) < 1e-10, name
        if "lns" in flags:
            renumbered = reference.forward(replace(net, numbers=(1, 2)), floats(model), idx)[0]
            assert error(model(idx)[0], renumbered) > 1e-4, name


@pytest.mark.parametrize("name", spread(ALL, REPRESENTATIVES))
def test_experts_in_every_layout(name, monkeypatch):
    """They are the equation; σReparam is for single matrices and refused. `router` and `balance`
    alternate."""
    monkeypatch.setattr("model.rotary", float64_rotary)
    odd, n_layer = len(name) % 2, depth_of(name)
    routing = (
        dict(router="sigmoid", balance="bias") if odd else dict(router="softmax", balance="loss")
    )
    flags = ALL[name][0] | dict(n_expert=3, n_expert_shared=odd) | routing
    if flags.get("sigma_reparam"):
        with pytest.raises(ValueError, match="sigma_reparam is for single matrices"):
            build(flags, n_layer)
        return
    parts = dict(experts=3, shared=bool(odd), score=routing["router"], choice_bias=bool(odd))
    net = network(name, n_layer, **parts)[1]
    model, (idx, targets) = build(flags, n_layer), batch()
    loss, wanted, _ = minimised(model, net, idx, targets)
    found, grads = backward(model, idx, targets)
    assert error(found, loss) < 1e-10 and difference(grads, wanted) < 1e-10


# ------------------------------------------------------------------------------------------- images

# name: flags that only images have, or that are new with them
OWN = {
    "exact gelu": (
        dict(mlp="gelu_erf", bias=True, norm="layernorm"),
        dict(act="gelu_erf", kind="layer"),
    ),
    "V-DNT": (dict(models.S5, mlp="gelu_erf", bias=True), dict(models.S5_NET, act="gelu_erf")),
}


def compare_images(flags, net, pool, n_layer):
    model, images = vision.build(flags, n_layer), pictures()
    logits = equation(net, floats(model), images, 2, pool)
    assert error(model(images)[0], logits) < 1e-10
    single = vision.build(flags, n_layer, torch.float32)
    assert as_near(single(images.float())[0], shaken(model)(images)[0], logits)


@pytest.mark.parametrize("name", spread(ALL, fast=REPRESENTATIVES))
def test_a_vits_forward_is_the_equation(name):
    pool = POOLS[len(name) % 2]
    compare_images(*scheme(name, pool), pool, depth_of(name))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", OWN)
def test_what_only_images_have_is_the_equation(name, pool):
    flags, net = OWN[name]
    net = replace(
        scheme("S1", pool)[1],
        blocks=2,
        norm_bias=net.get("kind") == "layer",
        linear_bias=True,
        **net,
    )
    compare_images(dict(flags, pool=pool), net, pool, 2)


@pytest.mark.parametrize("name", spread(ALL, fast=("S5", "post + LN", "LNS")))
@pytest.mark.parametrize("pool, smoothing", (("cls", 0.1), ("mean", 0.0)))
def test_a_vits_gradients_are_the_equations_gradients(name, pool, smoothing):
    flags, net = scheme(name, pool)
    model = vision.build(flags, depth_of(name)).train()
    images = pictures(3)
    targets = torch.tensor([2, -1, 6])
    model.runtime.label_smoothing = smoothing
    weights, parameters = floats(model), dict(model.named_parameters())
    for key in parameters:
        weights[key].requires_grad_()
    loss = reference.mean_loss(equation(net, weights, images, 2, pool), targets, smoothing)
    loss.backward()
    wanted = {key: weights[key].grad for key in parameters}
    assert_same_gradients(gradients(model, images, targets), (loss, wanted), 1e-10)
