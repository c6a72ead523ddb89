"""Update rules against their recurrences in float64 and torch's own optimizers; steps whose gradients are not finite.

Groups, decay, state and loading are in test_optim_groups.py, settings and schedules in test_schedules.py, Muon in
test_muon.py.
"""

import math

import pytest
import torch

from nanodnt.optim import make_optimizer
from support.optimizers import (
    ALL,
    DECAYED,
    LAYOUTS,
    STEPS,
    VARIANTS,
    assert_parameters,
    blocks_of,
    drive,
    everything,
    gradients,
    settings,
    tiny,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------------------------------------------ update rules


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_is_torchs(layout):
    """torch.optim.AdamW in float64, a parameter at a time, with decay on the matrices."""
    model = tiny(**LAYOUTS[layout])
    optimizer = make_optimizer(model, settings(beta1=0.8, beta2=0.9))
    want, grads, roles = values(model), gradients(model, STEPS), model.roles()
    rates = drive(model, optimizer, grads)
    for name, w in want.items():
        decay = 0.3 if roles[name] in DECAYED else 0.0
        p = torch.nn.Parameter(w)
        theirs = torch.optim.AdamW([p], betas=(0.8, 0.9), eps=1e-8, weight_decay=decay, foreach=False)
        for t, lr in enumerate(rates[name]):
            theirs.param_groups[0]["lr"], p.grad = lr, grads[t][name]
            theirs.step()
        want[name] = p.detach()
    assert_parameters(model, want, 1e-5)


SGD = [dict(), dict(dampening=0.3), dict(nesterov=True), dict(momentum=0.5), dict(momentum=0.0)]


@pytest.mark.parametrize("options", SGD, ids=str)
def test_msgdw_is_torchs_sgd_plus_explicit_decay(options):
    """Decay first, w ← w (1 − ηλ), then torch.optim.SGD, whose first buffer is the whole gradient."""
    model = tiny()
    optimizer = make_optimizer(model, settings(optimizer="msgdw", **options))
    want, grads, roles = values(model), gradients(model, STEPS), model.roles()
    rates = drive(model, optimizer, grads)
    for name, w in want.items():
        p = torch.nn.Parameter(w)
        theirs = torch.optim.SGD([p], **dict(momentum=0.9) | options)
        for t, lr in enumerate(rates[name]):
            if roles[name] in DECAYED:
                p.data.mul_(1 - lr * 0.3)
            theirs.param_groups[0]["lr"], p.grad = lr, grads[t][name]
            theirs.step()
        want[name] = p.detach()
    assert_parameters(model, want, 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("dampening, nesterov", [(0.0, False), (0.3, False), (0.0, True)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_msgdw_is_its_recurrence(dtype, tolerance, decay, dampening, nesterov):
    """w ← w (1 − ηλ); m ← μ m + (1 − dampening) g, at first m = g; w ← w − η m, or − η (g + μ m)."""
    model, mu = tiny(**ALL).to(dtype), 0.9
    if dampening:
        tolerance = max(tolerance, 1e-6)  # the factor 1 − dampening is an fp32 number in any case
    options = dict(dampening=dampening, nesterov=nesterov, weight_decay=decay)
    optimizer = make_optimizer(model, settings(optimizer="msgdw", **options))
    want, grads, roles = values(model), gradients(model, STEPS), model.roles()
    rates = drive(model, optimizer, grads)
    momenta = {}
    for name, w in want.items():
        m = None
        for t, lr in enumerate(rates[name]):
            g = grads[t][name]
            w = w - lr * (decay if roles[name] in DECAYED else 0.0) * w
            m = g if m is None else mu * m + (1 - dampening) * g
            w = w - lr * (g + mu * m if nesterov else m)
        want[name], momenta[name] = w, m
    assert_parameters(model, want, tolerance)
    for name, p in model.named_parameters():
        buffer = optimizer.state[p]["momentum_buffer"].double()
        torch.testing.assert_close(buffer, momenta[name], rtol=tolerance, atol=tolerance * momenta[name].abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adam_mini_is_its_definition(layout):
    """One second moment a head of q and k, a row of other matrices, a whole tensor of all else; ε outside the root."""
    model = tiny(**LAYOUTS[layout])
    optimizer = make_optimizer(model, settings(optimizer="adam_mini", beta1=0.8, beta2=0.9))
    want, grads, roles = values(model), gradients(model, STEPS), model.roles()
    rates, moments = drive(model, optimizer, grads), {}
    for name, w in want.items():
        blocks = blocks_of(roles[name], len(w), head_dim=8)
        m, v = torch.zeros_like(w), [0.0] * len(blocks)
        for t, lr in enumerate(rates[name]):
            g = grads[t][name]
            if roles[name] in DECAYED:
                w *= 1 - lr * 0.3
            m = 0.8 * m + 0.2 * g
            for i, rows in enumerate(blocks):
                v[i] = 0.9 * v[i] + 0.1 * float((g[rows] ** 2).sum()) / g[rows].numel()
                corrected = m[rows] / (1 - 0.8 ** (t + 1)), v[i] / (1 - 0.9 ** (t + 1))
                w[rows] -= lr * corrected[0] / (math.sqrt(corrected[1]) + 1e-8)
        moments[name] = torch.tensor(v, dtype=torch.float64)
    assert_parameters(model, want, 1e-5)
    if layout == "all":  # 2 heads of q, one of k
        heads = {n: len(v) for n, v in moments.items() if roles[n] == "qk"}
        assert heads == {"blocks.0.attn.f.q.weight": 2, "blocks.0.attn.f.k.weight": 1}
    for name, p in model.named_parameters():
        torch.testing.assert_close(optimizer.state[p]["block_sq"].double(), moments[name], rtol=1e-5, atol=0.0)


def test_adam_mini_refuses_a_head_that_does_not_divide_the_rows():
    model = tiny()
    f = model.blocks[0].attn.f
    f.k.weight = torch.nn.Parameter(torch.zeros(12, 16))
    with pytest.raises(ValueError, match="a tensor of 12 rows does not divide into blocks of 8"):
        make_optimizer(model, settings(optimizer="adam_mini"))


# ------------------------------------------------------------------- steps with gradients that are not finite


def spoil(grads, kind):
    """The gradients of a step with found_inf. `one`: a single NaN; `other`: none, it was on another rank."""
    grads = {name: g.clone() for name, g in grads.items()}
    if kind in ("nan", "inf"):
        return {name: torch.full_like(g, getattr(math, kind)) for name, g in grads.items()}
    if kind == "one":
        next(iter(grads.values()))[0, 0] = math.nan
    return grads


@pytest.mark.parametrize("kind", ["nan", "inf", "one", "other"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_found_inf_makes_a_step_change_nothing(variant, kind):
    """Neither parameters nor state change by a bit, in the first step or a later one; nor do the steps that follow."""
    runs = []
    for with_spoilt in (False, True):
        model = tiny()
        optimizer = make_optimizer(model, settings(**VARIANTS[variant]))
        grads, spoilt = gradients(model, 3), spoil(gradients(model, 1, seed=1)[0], kind)
        for t in range(4):
            if with_spoilt:
                before = everything(model, optimizer)
                drive(model, optimizer, [spoilt], found_inf=torch.tensor(2.0 if kind == "other" else 1.0))
                assert everything(model, optimizer) == before, f"after {t} good steps"
            drive(model, optimizer, grads[t : t + 1], found_inf=torch.tensor(0.0))
        runs.append(everything(model, optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_found_inf_of_zero_is_the_same_as_none(variant):
    """Bitwise for torch's fused rules. The others compute 1 − λη in fp32 with found_inf, in fp64 without."""
    runs = []
    for found_inf in (None, torch.tensor(0.0)):
        model = tiny()
        optimizer = make_optimizer(model, settings(**VARIANTS[variant]))
        drive(model, optimizer, gradients(model, STEPS), found_inf)
        runs.append((values(model), everything(model, optimizer)))
    if VARIANTS[variant]["optimizer"] in ("adamw", "msgdw"):
        assert runs[0][1] == runs[1][1]
    for name, w in runs[0][0].items():
        torch.testing.assert_close(w, runs[1][0][name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_stay_as_they_are(variant, found_inf):
    """After the step a run looks for the first gradient that is not finite."""
    model = tiny()
    optimizer, grads = make_optimizer(model, settings(**VARIANTS[variant])), gradients(model, 2)
    found_inf = found_inf if found_inf is None else torch.tensor(found_inf)
    for step in grads:
        drive(model, optimizer, [step], found_inf)
        assert all(torch.equal(p.grad, step[name].float()) for name, p in model.named_parameters())
