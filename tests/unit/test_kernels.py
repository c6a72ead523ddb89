"""Devices on which torch's fused kernels ignore what clips and skips, as MPS's do: they are found, and not used.
Updates that are compiled, as on CUDA GPUs."""

import pytest
import torch
from torch._dynamo.utils import counters

from nanodnt.optim import kernels, make_optimizer, notes
from support.optimizers import (
    MIXED,
    STEPS,
    VARIANTS,
    assert_parameters,
    break_kernels,
    compile_updates,
    drive,
    driven,
    everything,
    gradients,
    ignore,
    lack,
    settings,
    spoil,
    tiny,
    values,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    yield
    kernels.follows.cache_clear()


def test_torchs_own_kernels_pass_the_trial(monkeypatch):
    break_kernels(monkeypatch, ignore)  # which ignores nothing
    assert kernels.plain_kernels(CPU) == []


def test_what_only_counts_is_not_tried(monkeypatch):
    break_kernels(monkeypatch, lack)
    monkeypatch.undo()
    assert kernels.plain_kernels(CPU) == kernels.plain_kernels(torch.device("meta")) == []
    assert kernels.plain_kernels(torch.device("cuda")) == []  # though there may be none here


BROKEN = {"scale": (ignore, "grad_scale"), "found_inf": (ignore, "found_inf"), "none": (lack,)}
BROKEN |= {"both": (ignore, "grad_scale", "found_inf")}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_kernel_that_ignores_an_argument_is_not_used(kind, monkeypatch):
    """One step of AdamW by hand: it clips to a half, and a step with NaN changes nothing."""
    break_kernels(monkeypatch, *BROKEN[kind])
    model = tiny()
    assert notes(settings(), model)[0].startswith("on cpu torch's fused updates of AdamW and SGD do not clip or skip")
    optimizer = make_optimizer(model, settings(weight_decay=0.0))
    before, (grads,) = values(model), gradients(model, 1, small=())
    drive(model, optimizer, [grads], torch.tensor(0.0), torch.tensor(2.0))
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            half = grads[name].float().double() / 2
            want = before[name] - group["lr"] * half / (half.abs() + 1e-8)
            torch.testing.assert_close(p.detach().double(), want, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), 0.1 * half, rtol=1e-6, atol=0.0)
    after = everything(model, optimizer)
    drive(model, optimizer, [spoil(grads, "nan")], torch.tensor(1.0), torch.tensor(1.0))
    assert everything(model, optimizer) == after


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_operators_and_kernels_agree(variant, monkeypatch):
    """After some clipped steps: 16 roundings of fp32 in each, of numbers of size 1."""
    steps = gradients(tiny(**MIXED), STEPS)
    want, _ = driven(VARIANTS[variant], steps, 0.0, 1.7, **MIXED)
    break_kernels(monkeypatch, ignore, "grad_scale", "found_inf")
    found, _ = driven(VARIANTS[variant], steps, 0.0, 1.7, **MIXED)
    assert_parameters(found, values(want), 16 * STEPS * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("variant", [name for name in ("muon", "adam_mini") if name in VARIANTS])
def test_updates_are_compiled_once(variant, monkeypatch):
    """LRs change in every step, and nothing is compiled after the first; with compile=False nothing at all."""
    (first, *steps), found = gradients(tiny(**MIXED), STEPS), []
    for changes in (dict(compile=False), dict()):
        counters.clear()
        compile_updates(monkeypatch, "aot_eager")
        model, optimizer = driven(VARIANTS[variant] | changes, [first], 0.0, 1.7, **MIXED)
        compiled = counters["stats"]["unique_graphs"]
        drive(model, optimizer, steps, torch.tensor(0.0), torch.tensor(1.7))
        assert counters["stats"]["unique_graphs"] == compiled and (compiled > 0) == (not changes)
        found.append(model)
    assert_parameters(found[1], values(found[0]), 16 * STEPS * torch.finfo(torch.float32).eps)
