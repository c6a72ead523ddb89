"""Weights: checkpoints into models, and Admin's profiled start values."""

from dataclasses import asdict, replace

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.weights import model_from_checkpoint, profile_admin
from support import reference
from support.models import (
    LAYERNORM_NET,
    LLAMA,
    LLAMA_NET,
    NET,
    POST,
    POST_NET,
    SIZE,
    batch,
    build,
    error,
    floats,
)
from support.tolerances import roundings


def test_a_checkpoint_without_newer_flags_has_their_defaults():
    """One that an earlier version has written."""
    model = build(dict(), dtype=torch.float32)
    new = ("expert", "router", "balance", "parametrization", "base_")
    flags = {
        name: value
        for name, value in asdict(model.config).items()
        if not any(word in name for word in new)
    }
    assert len(flags) == len(asdict(model.config)) - 11
    copy = model_from_checkpoint(dict(model_config=flags, model=model.state_dict()))
    assert copy.config == model.config and not copy.training
    assert torch.equal(copy(batch()[0])[0], model(batch()[0])[0])


@pytest.mark.parametrize(
    "flags, weights, words",
    (
        (dict(mid_norm="both"), dict(), "mid.gain is absent"),
        (dict(), dict(extra=torch.zeros(2)), "extra is torch.Size([2]), not absent"),
        (dict(), {"wte.weight": None}, "wte.weight is absent"),
    ),
    ids=str,
)
def test_a_checkpoint_that_does_not_fit_is_refused(flags, weights, words):
    model = build(dict(), dtype=torch.float32)
    checkpoint = dict(model_config=asdict(model.config) | flags, model=model.state_dict() | weights)
    with pytest.raises(ValueError) as caught:
        model_from_checkpoint(checkpoint)
    assert words in str(caught.value)


# -------------------------------------------------------------------------------------------- Admin


@pytest.mark.parametrize(
    "flags, net",
    (
        (dict(), dict()),
        (dict(norm="layernorm", bias=True, init_std=0.3), LAYERNORM_NET),
        (dict(LLAMA, init="xavier", lns="branch", dropout=0.5), dict(LLAMA_NET, lns="branch")),
    ),
    ids=str,
)
def test_admin_profiles_its_vectors(flags, net):
    idx = batch()[0]
    flags = {**SIZE, "n_layer": 3, **POST, **flags, "admin": True}
    model = GPT(GPTConfig(**flags)).double()
    before = floats(model)
    net = replace(NET, blocks=3, admin=True, **{**POST_NET, **net})
    expected = reference.admin_omegas(net, before, idx)
    profile_admin(model, idx)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    after = floats(model)
    assert len(expected) == 6 and list(expected.values())[0] == 1.0
    assert len({round(omega, 9) for omega in expected.values()}) == 6
    for key, t in after.items():
        if key in expected:
            assert error(t, torch.full_like(t, expected[key])) < roundings(8), key
        else:
            assert torch.equal(t, before[key]), key
    profile_admin(model, idx)  # the result does not depend on the values before
    assert all(torch.equal(t, after[key]) for key, t in floats(model).items())


def test_admin_profiling_is_nothing_to_other_models():
    model = build(POST)
    before = floats(model)
    profile_admin(model, batch()[0])
    assert all(torch.equal(t, before[key]) for key, t in floats(model).items())
