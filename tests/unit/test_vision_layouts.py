"""Every layout of the language model as a ViT: the equations, and a loss that falls."""

from dataclasses import replace

import pytest
import torch

from nanodnt.engine import Trainer, seed_step, set_learning_rates, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.settings import TrainConfig
from nanodnt.weights import profile_admin
from support import models
from support.models import ALL, NET, depth_of, each_scheme, error, floats, gradients, spread
from support.moe import MIXTURES
from support.vision import POOLS, build, config_of, equation, labels, pictures, plain_loss, scheme
from vision import ViT

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = dict(n_expert=4, n_ff=12, mlp="swiglu")
# name: flags that only images have, or that are new with them
OWN = {
    "exact gelu": (dict(mlp="gelu_erf", bias=True, norm="layernorm"), dict(act="gelu_erf", kind="layer")),
    "V-DNT": (dict(models.S5, mlp="gelu_erf", bias=True), dict(models.S5_NET, act="gelu_erf")),
}


def alternate(names, fast=None) -> list:
    """(name, pool): each name, or those in `fast`, with one pool in the fast suite, in turn; the rest is deep."""
    pairs = []
    for i, name in enumerate(names):
        marks = () if fast is None or name in fast else pytest.mark.deep
        pairs += [pytest.param(name, POOLS[i % 2], marks=marks)]
        pairs += [pytest.param(name, POOLS[1 - i % 2], marks=pytest.mark.deep)]
    return pairs


# ---------------------------------------------------------------------------------------------------- the equations


def compare(flags, net, pool, n_layer):
    model, images = build(flags, n_layer), pictures()
    logits = equation(net, floats(model), images, 2, pool)
    assert error(model(images)[0], logits) < 1e-10
    single = build(flags, n_layer, torch.float32)
    assert error(single(images.float())[0], logits) < 1e-5


@pytest.mark.parametrize("name, pool", alternate(ALL))
def test_forward_is_the_equation(name, pool):
    flags, net = scheme(name, pool)
    compare(flags, net, pool, depth_of(name))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", OWN)
def test_forward_of_images_own_flags_is_the_equation(name, pool):
    flags, net = OWN[name]
    net = replace(scheme("S1", pool)[1], blocks=2, norm_bias=net.get("kind") == "layer", linear_bias=True, **net)
    compare(dict(flags, pool=pool), net, pool, 2)


@pytest.mark.parametrize("name, pool", alternate(MIXTURES))
def test_experts_are_the_equation(name, pool):
    """Each patch goes to experts of its own."""
    flags, parts = MIXTURES[name]
    images_have = dict(vocab=7, theta=None, tied=False, causal=False)
    compare(dict(flags, pool=pool), replace(NET, blocks=2, **parts | images_have), pool, 2)


@pytest.mark.parametrize("name, pool", [(name, POOLS[i % 2]) for i, name in enumerate(("S5", "post-LN, bias", "LNS"))])
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_gradients_are_the_equations_gradients(name, pool, smoothing):
    check_gradients(name, pool, smoothing)


@pytest.mark.deep
@each_scheme
def test_gradients_of_every_layout_are_the_equations_gradients(name):
    for pool in POOLS:
        check_gradients(name, pool, 0.1)


def check_gradients(name, pool, smoothing):
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


# ------------------------------------------------------------------------------------------------------- it is trained


def losses(flags, n_layer=2, steps=12, **settings) -> list:
    """The losses of some steps on one small batch, as train.py makes them."""
    config = TrainConfig(**dict(learning_rate=1e-2, warmup_iters=1, max_iters=steps) | settings)
    fill_defaults(config)
    model = ViT(config_of(dict(norm_eps=1e-6, init_std=0.1) | flags, n_layer)).train()
    batch = pictures(8, dtype=torch.float32), labels(8)
    if model.config.admin:
        profile_admin(model, batch[0])
    model.runtime.label_smoothing = config.label_smoothing
    optimizer, scaler = make_optimizer(model, config), torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for step in range(steps):
        seed_step(0, step, 0)
        set_learning_rates(optimizer, step, config)
        result = training_step(Trainer(model, optimizer, scaler, 4, config.grad_clip), batch)
        assert not result.found_inf
        found.append(result.loss.item())
    return found


FAST = ("S5", "LNS", "dyt, S5", "Admin", "Fixup, llama, bias", "sigmaReparam, HG, DP", "unified", "LayerScale")


@pytest.mark.parametrize("name", spread(ALL, fast=FAST))
def test_every_layout_learns(name):
    found = losses(dict(ALL[name][0], pool=POOLS[len(name) % 2]), depth_of(name))
    assert found[-1] < found[0] - 0.05, found


OPTIMIZERS = {
    "adamw": dict(),
    "adam_mini": dict(optimizer="adam_mini"),
    "msgdw": dict(optimizer="msgdw", learning_rate=0.3),
    "muon": dict(optimizer="muon"),
}


@pytest.mark.parametrize("name", ("adamw", "adam_mini", "muon"))
def test_blockwise_rates_know_patches(name):
    """The group of patches has the ratio of its own; positions and the class token have theirs."""
    settings = dict(blockwise_lr=True, lr_ratio_patch=3.0, lr_ratio_pos=0.5, learning_rate=1e-3, warmup_iters=1)
    config = TrainConfig(**OPTIMIZERS[name] | settings)
    fill_defaults(config)
    model = ViT(config_of(dict(models.S5, bias=True)))
    optimizer = make_optimizer(model, config)
    set_learning_rates(optimizer, 1, config)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"patch.weight": 3, "patch.bias": 3, "cls.weight": 0.5, "wpe.weight": 0.5, "head.weight": 1}
    for key, ratio in expected.items():
        assert rate[id(model.get_parameter(key))] == pytest.approx(ratio * 1e-3), key
    found = losses(dict(models.S5, bias=True), blockwise_lr=True, learning_rate=1e-3, optimizer=name)
    assert found[-1] < found[0]
