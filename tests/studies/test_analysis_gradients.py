"""studies/analysis/gradients.py against its definitions: the reference's equations, closed forms,
cases by hand."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from studies.analysis import gradients, norms
from support import reference
from support.analysis import batches_of, close, type_by_name
from support.models import ALL, LLAMA, NET, S4, S5, S5_NET, build, error, floats, tokens
from support.moe import MIXTURES
from support.tolerances import FORWARD, GRADIENTS


@pytest.mark.parametrize("name", [*ALL, *MIXTURES])
def test_types_cover_every_parameter(name):
    model = build((ALL | MIXTURES)[name][0])
    names = [n for n, _ in model.named_parameters()]
    wanted = {n: type_by_name(n, matrices=True) for n in names}
    assert gradients.matrix_types(model) == {n: t for n, t in wanted.items() if t}
    assert model.block_types() == {n: type_by_name(n, matrices=False) for n in names}


NORMS = {
    "HG, Post-LN block": dict(
        gain="branch", post_norm_blocks=1, branch_scale="skipinit", bias=True
    ),
    "experts": MIXTURES["softmax"][0],
    "no gain": dict(gain="none"),
}


@pytest.mark.parametrize("name", NORMS)
def test_block_norms(name):
    """By the parameters' names. The gains are stored as they act."""
    model = build(NORMS[name], 3, torch.float32)
    squares, whole = Counter(), Counter()  # (kind, block): Σ x²; {block type: Σ x²}
    for path, p in floats(model).items():
        square = p.square().sum().item()
        whole[type_by_name(path, matrices=False)] += square
        if path.startswith("blocks."):
            _, block, branch, *_, last = path.split(".")
            kind = type_by_name(path, matrices=True) or (
                last == "gain" and p.numel() > 1 and f"{branch}_gain"
            )
            squares[kind, int(block)] += square
    measured = norms.measure_norms(model)
    assert measured["types"] == pytest.approx(
        {kind: square**0.5 for kind, square in whole.items()}, rel=FORWARD
    )
    assert list(measured["blocks"]) == ["q", "k", "v", "o", "w1", "w2", "attn_gain", "mlp_gain"]
    for kind, values in measured["blocks"].items():
        wanted = [squares.get((kind, block), math.nan) ** 0.5 for block in range(3)]
        assert values == pytest.approx(wanted, rel=FORWARD, nan_ok=True), kind


def test_the_bias_on_the_choice_of_experts_is_left_out():
    """No loss trains it: its zeros would lower the router's sharpness, and it is no part of the
    router's norm."""
    model = build(dict(n_expert=4, balance="bias"), dtype=torch.float32)
    router = torch.cat([block.mlp.f.router.weight.flatten() for block in model.blocks])
    assert close(norms.measure_norms(model)["types"]["router"], router.norm().item())
    names = [name for name, _ in model.named_parameters() if not name.endswith("choice_bias")]
    assert (
        list(gradients.trained_parameters(model)) == names
        and len(names) == len(list(model.parameters())) - 2
    )


@pytest.mark.parametrize("flags, words", [(S5, S5_NET), MIXTURES["softmax"]], ids=["S5", "experts"])
def test_gradients_are_of_the_mean_over_all_targets(flags, words):
    """Batches of different size with different numbers of ignored targets, one with none that
    counts."""
    model, net = build(flags, dtype=torch.float32), replace(NET, blocks=2, **words)
    batches = []
    for i, (rows, ignored) in enumerate(((2, 3), (1, 0), (2, 9), (1, 7))):
        targets = tokens(rows, 7, seed=10 + i)
        targets.view(-1)[
            torch.randperm(rows * 7, generator=torch.Generator().manual_seed(i))[:ignored]
        ] = -1
        batches.append((tokens(rows, 7, seed=i), targets))
    weights = {name: w.requires_grad_() for name, w in floats(model).items()}
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    reference.forward(net, weights, idx, targets)[1].backward()
    for _ in range(2):  # nothing is left behind to be added to
        grads = gradients.compute_gradients(model, batches)
        assert grads.keys() == weights.keys()
        for name, g in grads.items():
            assert g.dtype == torch.float32 and error(g, weights[name].grad) < GRADIENTS, name


def statistics(values, scale=1.0):
    return gradients.tail_statistics(torch.as_tensor(values, dtype=torch.float32) * scale)


def test_tail_statistics_of_a_constant_a_few_numbers_and_none():
    stats = statistics([-3.0, 3.0] * 50)
    assert stats == pytest.approx(dict(n=100, rms=3, max_over_rms=1, kurtosis=1))
    stats = statistics([[1.0, -2.0], [3.0, 0.0]])  # Σg² = 14, Σg⁴ = 98
    assert stats == pytest.approx(
        dict(n=4, rms=3.5**0.5, max_over_rms=3 / 3.5**0.5, kurtosis=98 / 4 / 3.5**2)
    )
    stats = statistics(torch.zeros(64))
    assert stats["n"] == 64 and stats["rms"] == 0  # the gradient of a table that no token reads


def test_tail_statistics_of_a_gaussian_at_any_scale():
    """Also at scales whose fourth power no fp32 number holds."""
    g = torch.empty(2**20).normal_(generator=torch.Generator().manual_seed(0))
    stats = statistics(g)
    assert abs(stats["kurtosis"] - 3) < 5 * (24 / len(g)) ** 0.5
    for power in (-60, 30):
        wanted = dict(stats, rms=stats["rms"] * 2.0**power)
        assert statistics(g, 2.0**power) == pytest.approx(wanted)


SMALL = dict(n_head=2, n_embd=8, block_size=4, vocab_size=5)


@pytest.fixture(scope="module")
def sharp():
    """A tiny model, the exact diagonal of its loss's Gauss-Newton matrix, and many estimates of one
    draw each.

    The diagonal for n positions with logits z(θ) and probabilities p: (1/n) Σ ( Σ_v p_v J_v² − (Σ_v
    p_v J_v)² ) with J_v = ∂z_v/∂θ, the mean over positions of Jᵀ (diag p − p pᵀ) J. One row of J a
    logit, all in float64."""
    model = build(dict(SMALL, **S5, tie_weights=False), 1, torch.float32)
    idx, labels = tokens(2, 4, vocab=4), tokens(2, 4, vocab=5, seed=5)
    net = replace(NET, vocab=5, heads=2, kv_heads=2, tied=False, **S5_NET)
    weights = {name: w.requires_grad_() for name, w in floats(model).items()}
    logits, loss = reference.forward(net, weights, idx, labels)

    def gradient(y):
        return dict(
            zip(
                weights,
                torch.autograd.grad(y, list(weights.values()), retain_graph=True),
                strict=True,
            )
        )

    exact = {name: torch.zeros_like(w) for name, w in weights.items()}
    for z in logits.flatten(0, 1):
        p, rows = reference.softmax(z).tolist(), [gradient(z[v]) for v in range(5)]
        for name in weights:
            first = sum(p[v] * rows[v][name] for v in range(5))
            second = sum(p[v] * rows[v][name] ** 2 for v in range(5))
            exact[name] += (second - first**2) / 8

    generator = torch.Generator().manual_seed(0)
    estimates = [
        gradients.estimate_sharpness(model, batches_of(idx), 1, generator) for _ in range(400)
    ]
    draws = {name: torch.stack([h[name].double() for h in estimates]) for name in weights}
    return SimpleNamespace(model=model, idx=idx, exact=exact, draws=draws, real=gradient(loss))


def deviations(sample, value):
    """How many standard errors `value` is from the mean of `sample` (n, …), entry by entry; where
    the sample does not vary, just how far."""
    off, spread = sample.mean(0) - value, sample.std(0) / len(sample) ** 0.5
    return torch.where(spread > 0, off / spread.clamp(min=1e-300), off)


def by_type(h, dims=0):
    """{block type: sum of all its entries} of {name: tensor}, whose first `dims` dimensions
    stay."""
    sums = Counter()
    for name, t in h.items():
        sums[type_by_name(name, matrices=False)] += t.flatten(dims).sum(-1)
    return sums


def test_sharpness_is_the_gauss_newton_diagonal(sharp):
    def off(diagonal):
        return {
            kind: deviations(sample[kind], total).item()
            for kind, total in by_type(diagonal).items()
        }

    sample = by_type(sharp.draws, dims=1)
    assert max(map(abs, off(sharp.exact).values())) < 4.5
    entries = torch.cat(
        [deviations(sharp.draws[name], h)[h > 0] for name, h in sharp.exact.items()]
    )
    assert (
        len(entries) > 700
        and 0.4 < entries.square().mean() < 2
        and (entries.abs() > 4).double().mean() < 0.01
    )

    # what these limits tell apart: sequences for tokens in the factor, and the data's labels for
    # sampled ones
    assert min(off({name: h / 4 for name, h in sharp.exact.items()}).values()) > 15
    assert max(map(abs, off({name: 8 * g**2 for name, g in sharp.real.items()}).values())) > 15


def test_sharpness_is_the_mean_over_draws_of_a_generator(sharp):
    generator = torch.Generator().manual_seed(0)
    mean = gradients.estimate_sharpness(sharp.model, batches_of(sharp.idx), 3, generator)
    for name, h in mean.items():
        assert error(h, sharp.draws[name][:3].mean(0)) < FORWARD, name


def test_sharpness_is_n_times_the_square_of_the_mean_gradient(monkeypatch):
    """Blockwise LR eq. 3 on labels that are known, in float64: the same of one batch and sequence
    by sequence."""

    def label(model, x, generator):
        return x[..., :5].argmax(-1)

    model, idx = build(dict(SMALL, **S5), 2, torch.float32), tokens(3, 4, vocab=5)
    monkeypatch.setattr(gradients, "sample_labels", label)
    labels = label(model, model.stream(idx), None)
    weights = {name: w.requires_grad_() for name, w in floats(model).items()}
    net = replace(NET, vocab=5, heads=2, kv_heads=2, blocks=2, **S5_NET)
    reference.forward(net, weights, idx, labels)[1].backward()
    for rows in (3, 2, 1):
        h = gradients.estimate_sharpness(model, batches_of(idx, rows), 2, torch.Generator())
        for name, w in weights.items():
            assert error(h[name], 12 * w.grad**2) < GRADIENTS, name


def test_sharpness_by_type():
    h = {
        "a": torch.tensor([[1.0, 100.0], [0.0, 10.0]]),
        "b": torch.tensor([1e-3]),
        "c": torch.tensor([4.0, 1.0]),
    }
    found = gradients.average_by_type(h, {"a": "x", "b": "x", "c": "y"})
    assert found["x"] == pytest.approx(
        dict(arithmetic=111.001 / 5, geometric=1, zero_fraction=1 / 5, n=5)
    )
    assert found["y"] == pytest.approx(dict(arithmetic=2.5, geometric=2.0, zero_fraction=0.0, n=2))
    # as at the end of training
    tiny = gradients.average_by_type({"a": torch.full((1000,), 1e-30)}, {"a": "x"})["x"]
    assert close(tiny["geometric"], 1e-30)


def test_sharpness_by_layer():
    model = build(dict(LLAMA, **S4, gain="branch"), 3, torch.float32)
    generator = torch.Generator().manual_seed(0)
    h = {
        name: torch.rand(p.shape, generator=generator).sub(0.2).relu()
        for name, p in model.named_parameters()
    }
    found = gradients.average_by_block(model, h)
    assert found.keys() == {"all", "qk", "vo", "ffn", "norm"}
    for kind, means in found.items():
        for block in range(3):
            mine = [n for n in h if n.startswith(f"blocks.{block}.")]
            mine = [n for n in mine if kind in ("all", type_by_name(n, matrices=False))]
            values = [x for n in mine for x in h[n].flatten().tolist()]
            logs = [math.log(x) for x in values if x > 0]
            assert close(means["arithmetic"][block], sum(values) / len(values))
            assert close(means["geometric"][block], math.exp(sum(logs) / len(logs)))
            assert close(means["zero_fraction"][block], 1 - len(logs) / len(values)) and len(
                logs
            ) < len(values)


def test_sharpness_against_the_norms():
    """S(Norm) / S(type) of both means, and the ratios in use: of a run, of one without them, of a
    published model."""
    one, two = (
        dict(arithmetic=6.0, geometric=3.0, zero_fraction=0.0),
        dict(arithmetic=2.0, geometric=0.0),
    )
    for config, lr_ratio in (
        (dict(blockwise_lr=True, lr_ratio_qk=8.0), 8.0),
        (dict(blockwise_lr=False), 1.0),
    ):
        types = {"norm": dict(one), "qk": dict(two)}
        gradients.compare_to_norm(types, config)
        qk = types["qk"]
        assert (qk["ratio"], qk["geo_ratio"], qk["lr_ratio"]) == (3.0, math.inf, lr_ratio)
        assert types["norm"]["ratio"] == types["norm"]["geo_ratio"] == 1
    types = {"qk": dict(two)}
    gradients.compare_to_norm(types, {})
    assert math.isnan(types["qk"]["ratio"]) and math.isnan(types["qk"]["lr_ratio"])


def test_log_histogram():
    g = torch.tensor([[0.0, 0.0, 1e-9, 3e-3, -2e-2], [5e-2, -5e-1, 0.2, 7.0, -0.3]])  # 10 entries
    found = gradients.log_histogram(g, 3, 1e-3, 1.0)
    assert close(found["edges"], [1e-3, 1e-2, 1e-1, 1.0], 1e-12)
    shares = [
        d * (b - a)
        for d, a, b in zip(found["density"], found["edges"], found["edges"][1:], strict=False)
    ]
    assert close(shares, [0.1, 0.2, 0.3]) and len(found["density"]) == 3
    assert close(found["ccdf"], [0.7, 0.6, 0.4, 0.1])


def test_log10_density():
    found = gradients.log10_density(torch.tensor([[1e-6, 1e-6, 2e-6], [0.0, 3e-3, 1e-2]]), 4)
    assert close(found["edges"], [-6, -5, -4, -3, -2]) and close(found["density"], [0.6, 0, 0, 0.4])
    # bins of half a decade
    found = gradients.log10_density(torch.tensor([1e-6, 2e-6, 2e-5, 1e-4]), 4)
    assert close(found["density"], [1, 0, 0.5, 0.5])
