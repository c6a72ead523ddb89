"""Optimizers and schedules against their recurrences in float64, and against torch's own."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from optim import (
    OPTIMIZERS,
    SGDW,
    describe_groups,
    fill_defaults,
    load_optimizer,
    lr_at,
    make_optimizer,
    state_bytes,
)

DECAYED = {"emb", "pos", "head", "qk", "vo", "ffn"}  # matrices; written out, not imported


def settings(**changes):
    values = dict(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, momentum=0.9)
    values |= dict(
        grad_clip=1.0,
        max_iters=100,
        warmup_iters=10,
        lr_decay_iters=None,
        min_lr=1e-3,
        schedule="cosine",
        decay_gains="none",
    )
    return SimpleNamespace(**(values | changes))


def tiny(**flags):
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=31)
    layout = dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, bias=True, tie_weights=False)
    return GPT(GPTConfig(**sizes | layout | flags))


def gradients(shapes, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(steps)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_msgdw_is_its_recurrence(dtype, tolerance, decay):
    """w ← w (1 − ηλ); m ← μ m + g (the first step: m = g); w ← w − η m, with η changing every step."""
    shapes, mu = [(7, 5), (3,)], 0.9
    start, grads = gradients(shapes, 1, seed=1)[0], gradients(shapes, 10)
    params = [torch.nn.Parameter(w.to(dtype)) for w in start]
    optimizer = SGDW(params, lr=0.0, momentum=mu, weight_decay=decay)
    want, momentum = [w.clone() for w in start], [None, None]
    for t in range(10):
        lr = 0.3 / (t + 1)
        for i, g in enumerate(grads[t]):
            want[i] = want[i] - lr * decay * want[i]
            momentum[i] = g.clone() if t == 0 else mu * momentum[i] + g
            want[i] = want[i] - lr * momentum[i]
            params[i].grad = g.to(dtype)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for p, w, m in zip(params, want, momentum, strict=True):
            torch.testing.assert_close(p.data.double(), w, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(
                optimizer.state[p]["momentum_buffer"].double(), m, rtol=tolerance, atol=tolerance
            )


def test_msgdw_is_torch_sgd_plus_explicit_decay():
    shapes = [(4, 6), (5,)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in gradients(shapes, 1, seed=2)[0]] for _ in range(2))
    a, b = SGDW(ours, lr=0.1, momentum=0.8, weight_decay=0.2), torch.optim.SGD(theirs, lr=0.1, momentum=0.8)
    for grads in gradients(shapes, 5):
        for p, q, g in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
            q.data.mul_(1 - 0.1 * 0.2)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_msgdw_leaves_parameters_without_gradient_and_stores_one_tensor_a_parameter():
    p, frozen = torch.nn.Parameter(torch.ones(8, 3)), torch.nn.Parameter(torch.ones(2))
    optimizer = SGDW([p, frozen], lr=0.1, weight_decay=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(p.data, torch.full((8, 3), 1 * (1 - 0.05) - 0.1))
    assert (frozen == 1).all()
    state = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    assert sum(t.numel() * t.element_size() for t in state) == 4 * (p.numel() + frozen.numel())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_found_inf_changes_nothing(name):
    model, config = tiny(), settings(optimizer=name)
    optimizer = make_optimizer(model, config)
    idx = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))

    def step(bad):
        optimizer.zero_grad()
        model(idx, idx)[1].backward()
        if bad:
            model.wte.weight.grad[0, 0] = math.nan
        optimizer.found_inf = torch.tensor(float(bad))
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()

    def snapshot():
        states = [t.clone() for s in optimizer.state.values() for t in s.values()]
        return [p.detach().clone() for p in model.parameters()] + states

    step(bad=False)
    before = snapshot()
    step(bad=True)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    step(bad=False)
    assert all(t.isfinite().all() for t in snapshot())
    assert not any(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_with_found_inf_changes_nothing(name):
    model = tiny()
    optimizer = make_optimizer(model, settings(optimizer=name))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all((t == 0).all() for s in optimizer.state.values() for t in s.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_hits_exactly_the_decayed_roles(name):
    """With zero gradients only decay can move a weight."""
    model, config = tiny(), settings(optimizer=name, weight_decay=0.5)
    optimizer, roles = make_optimizer(model, config), model.roles()
    for p in model.parameters():
        p.data.fill_(2.0)
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert set(roles.values()) >= DECAYED | {"gain_in", "gain_out", "bias"}
    for n, p in model.named_parameters():
        expected = 2.0 * (1 - 0.1 * 0.5) if roles[n] in DECAYED else 2.0
        torch.testing.assert_close(p.data, torch.full_like(p, expected), msg=f"{n} ({roles[n]})")


def test_adamw_is_torchs_with_the_configured_betas():
    ours, theirs = tiny(), tiny()
    a = make_optimizer(ours, settings(beta1=0.8, beta2=0.9))
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in theirs.parameters()]
    b = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, foreach=False)
    idx = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))
    for group in a.param_groups:
        group["lr"] = 1e-2
    for _ in range(10):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(idx, idx)[1].backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_cover_every_parameter_once_and_the_table_says_so(name):
    model, config = tiny(), settings(optimizer=name)
    optimizer = make_optimizer(model, config)
    grouped = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    table = describe_groups(optimizer, config).splitlines()
    counts = {line.split()[0]: int(line.split()[2].replace(",", "")) for line in table[1:]}
    assert sum(counts.values()) == model.num_params()
    assert counts["qk"] == 2 * 16 * 16 and counts["ffn"] == 2 * 16 * 64 and counts["pos"] == 8 * 16


def test_frozen_parameters_are_left_out():
    model = tiny()
    model.wpe.weight.requires_grad_(False)
    optimizer = make_optimizer(model, settings())
    assert "pos" not in {g["role"] for g in optimizer.param_groups}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_configuration_wins_over_a_loaded_state(name):
    first, second = (make_optimizer(tiny(), settings(optimizer=name, weight_decay=d)) for d in (0.1, 0.3))
    for group in first.param_groups:
        group["lr"] = 0.7
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    first.step()
    second.param_groups[0]["lr"] = 0.2
    load_optimizer(second, first.state_dict(), 1)
    assert second.param_groups[0]["lr"] == 0.2 and second.param_groups[0]["weight_decay"] == 0.3
    for a, b in zip(first.state.values(), second.state.values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_state_of_other_parameters_is_refused():
    saved = make_optimizer(tiny(), settings()).state_dict()
    with pytest.raises(ValueError, match="other parameters"):
        load_optimizer(make_optimizer(tiny(qk_norm=False), settings()), saved, 0)


# By hand for peak 1e-2, min 1e-3, W = 10, T = 100: half way through the cosine is the mean of peak and min.
@pytest.mark.parametrize(
    "update, lr",
    [(1, 1e-3), (5, 5e-3), (10, 1e-2), (11, 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi / 90))), (55, 5.5e-3)]
    + [(100, 1e-3), (101, 1e-3), (5000, 1e-3)],
)
def test_warm_up_and_cosine(update, lr):
    assert lr_at(update - 1, settings(lr_decay_iters=100)) == pytest.approx(lr, rel=1e-12)


def test_schedule_edges():
    assert lr_at(0, settings(warmup_iters=0, lr_decay_iters=100)) < 1e-2  # without warm-up the cosine starts at once
    assert lr_at(0, settings(warmup_iters=1, lr_decay_iters=100)) == 1e-2
    assert lr_at(70, settings(schedule="constant", lr_decay_iters=10)) == 1e-2
    assert lr_at(4, settings(schedule="constant", lr_decay_iters=10)) == pytest.approx(5e-3)
    assert lr_at(200, settings(warmup_iters=50, lr_decay_iters=20)) == 1e-3  # decays over before warm-up ends: no crash


@pytest.mark.parametrize("name, lr, decay", [("adamw", 6e-4, 0.1), ("msgdw", 1.0, 1e-4)])
def test_defaults_are_the_dnt_papers(name, lr, decay):
    config = settings(optimizer=name, learning_rate=None, weight_decay=None, min_lr=None)
    fill_defaults(config)
    assert (config.learning_rate, config.weight_decay, config.lr_decay_iters) == (lr, decay, 100)
    assert config.min_lr == pytest.approx(lr / 10)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(learning_rate=1.0, weight_decay=0.1), "weight_decay"),
        (dict(min_lr=0.1), "min_lr"),
        (dict(learning_rate=-1.0), "learning_rate"),
        (dict(beta2=1.0), "beta2"),
        (dict(momentum=-0.1), "momentum"),
        (dict(warmup_iters=-1), "warmup_iters"),
    ],
)
def test_impossible_settings_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        fill_defaults(settings(**changes))


def test_state_that_is_no_tensor_and_parameters_that_never_had_a_gradient():
    """What a fork may bring: both are saved and loaded."""
    first, second = (make_optimizer(tiny(), settings(optimizer="msgdw")) for _ in range(2))
    state = first.state_dict()
    for i, s in state["state"].items():
        s["momentum_buffer"] += i
        s["count"] = 7
    del state["state"][1]
    load_optimizer(second, state, step=3)
    loaded = second.state_dict()["state"]
    assert loaded[2]["count"] == 7 and (loaded[2]["momentum_buffer"] == 2).all() and 1 not in loaded


def decayed(flags, **changes):
    """{parameter name: weight decay} of the groups."""
    groups = make_optimizer(tiny(**flags), settings(**changes)).param_groups
    return {name: g["weight_decay"] for g in groups for name in g["param_names"]}


GAINS_IN = r"blocks\.0\.(attn|mlp)\.pre\.gain|final_norm\.gain"
GAINS_OUT = r"blocks\.0\.(attn|mlp)\.mid\.gain|input_norm\.gain|blocks\.0\.attn\.f\.[qk]_norm\.gain"


@pytest.mark.parametrize(
    "choice, pattern", [("none", "-"), ("all", f"{GAINS_IN}|{GAINS_OUT}"), ("input", GAINS_IN), ("output", GAINS_OUT)]
)
def test_decay_gains(choice, pattern):
    """Pre norms and the final norm are followed by a linear map; mid, input and QK norms are not."""
    found = decayed(dict(pre_norm="both"), decay_gains=choice)
    for name, decay in found.items():
        matrix = name.endswith("weight")
        assert decay == (0.1 if matrix or re.fullmatch(pattern, name) else 0.0), name
    assert sum(n.endswith(".gain") for n in found) == 8


def test_decay_gains_of_magnitude_and_direction():
    """IWD under OR: the magnitudes of the inputs decay; directions never do, nor do scalars."""
    flags = dict(qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir", branch_scale="skipinit")
    for choice in ("input", "all"):
        found = decayed(dict(flags, pre_norm="both"), decay_gains=choice)
        assert {d for n, d in found.items() if n.endswith(("direction", "mid.gain", "bias"))} == {0.0}
        inputs = {d for n, d in found.items() if re.search(r"[qkv]\.pre\.magnitude|up\.pre\.mag|final_norm\.mag", n)}
        outputs = {d for n, d in found.items() if re.search(r"[qkv]\.out\.magnitude|input_norm\.magnitude", n)}
        assert inputs == {0.1} and outputs == ({0.1} if choice == "all" else {0.0})


def test_decay_gains_without_such_gains_is_refused():
    for flags in (dict(gain="none"), dict(norm="none", pre_norm="none", mid_norm="none", input_norm=False)):
        with pytest.raises(ValueError, match=r"decay_gains=input, but the model has no such gains \(gain_in\)"):
            decayed(flags, decay_gains="input")


@pytest.mark.parametrize("optimizer, bytes_each", [("adamw", 8), ("msgdw", 4)])
def test_state_bytes_without_storage_are_those_with_it(optimizer, bytes_each):
    config = settings(optimizer=optimizer)
    real = tiny()
    with torch.device("meta"):
        meta = tiny()
    tensors, n = len(list(real.parameters())), real.num_params()
    steps = 4 * tensors if optimizer == "adamw" else 0  # AdamW counts steps in one number a tensor
    assert state_bytes(meta, config) == state_bytes(real, config) == bytes_each * n + steps


def test_decay_of_gains_without_decay_is_refused():
    with pytest.raises(ValueError, match="decay_gains=input decays by weight_decay, which is 0"):
        fill_defaults(settings(decay_gains="input", weight_decay=0.0))
