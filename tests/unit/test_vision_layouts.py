"""Every layout of the language model as a ViT is the equations, in value and gradient."""

from dataclasses import replace

import pytest
import torch

from support import models
from support.depth import spread
from support.models import ALL, NET, REPRESENTATIVES, depth_of, error, floats, gradients
from support.moe import MIXTURES
from support.vision import POOLS, build, equation, pictures, plain_loss, scheme

pytestmark = pytest.mark.usefixtures("one_thread")

# name: flags that only images have, or that are new with them
OWN = {
    "exact gelu": (dict(mlp="gelu_erf", bias=True, norm="layernorm"), dict(act="gelu_erf", kind="layer")),
    "V-DNT": (dict(models.S5, mlp="gelu_erf", bias=True), dict(models.S5_NET, act="gelu_erf")),
}


def compare(flags, net, pool, n_layer):
    model, images = build(flags, n_layer), pictures()
    logits = equation(net, floats(model), images, 2, pool)
    assert error(model(images)[0], logits) < 1e-10
    single = build(flags, n_layer, torch.float32)
    assert error(single(images.float())[0], logits) < 1e-5


@pytest.mark.parametrize("name", spread(ALL, fast=REPRESENTATIVES))
def test_forward_is_the_equation(name):
    pool = POOLS[len(name) % 2]
    compare(*scheme(name, pool), pool, depth_of(name))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", OWN)
def test_forward_of_images_own_flags_is_the_equation(name, pool):
    flags, net = OWN[name]
    net = replace(scheme("S1", pool)[1], blocks=2, norm_bias=net.get("kind") == "layer", linear_bias=True, **net)
    compare(dict(flags, pool=pool), net, pool, 2)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_the_equation(name):
    """Each patch goes to experts of its own."""
    (flags, parts), pool = MIXTURES[name], POOLS[len(name) % 2]
    images_have = dict(vocab=7, theta=None, tied=False, causal=False)
    compare(dict(flags, pool=pool), replace(NET, blocks=2, **parts | images_have), pool, 2)


@pytest.mark.parametrize("name", spread(ALL, fast=("S5", "post + LN", "LNS")))
@pytest.mark.parametrize("pool, smoothing", (("cls", 0.1), ("mean", 0.0)))
def test_gradients_are_the_equations_gradients(name, pool, smoothing):
    flags, net = scheme(name, pool)
    model, images, targets = build(flags, depth_of(name)).train(), pictures(3), torch.tensor([2, -1, 6])
    model.runtime.label_smoothing = smoothing
    weights, parameters = floats(model), dict(model.named_parameters())
    for key in parameters:
        weights[key].requires_grad_()
    loss = plain_loss(equation(net, weights, images, 2, pool), targets, smoothing)
    loss.backward()
    ours, grads = gradients(model, images, targets)
    assert error(ours, loss) < 1e-10
    for key, grad in grads.items():
        assert error(grad, weights[key].grad, floor=1e-5) < 1e-9, key
