"""studies/analysis/gradients.py against its definitions: the reference's equations, closed forms, cases by hand."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanodnt.settings import TrainConfig
from studies.analysis import gradients, norms
from support import reference
from support.analysis import batches_of, close, type_by_name
from support.models import ALL, LLAMA, NET, PRE, S4, S5, S5_NET, build, error, floats, tokens
from support.moe import MIXTURES
from support.tolerances import FORWARD, GRADIENTS


@pytest.mark.parametrize("name", [*ALL, *MIXTURES])
def test_types_cover_every_parameter(name):
    model = build((ALL | MIXTURES)[name][0])
    names = [n for n, _ in model.named_parameters()]
    wanted = {n: type_by_name(n, matrices=True) for n in names}
    assert gradients.matrix_types(model) == {n: t for n, t in wanted.items() if t}
    assert model.block_types() == {n: type_by_name(n, matrices=False) for n in names}


@pytest.mark.parametrize("name", ["S5, untied, llama", "HG, Post-LN block", "experts", "no gain"])
def test_block_norms(name):
    """In Python numbers, by the parameters' names. The gains are stored as they act."""
    llama = dict(LLAMA, **S5, tie_weights=False)
    post = dict(gain="branch", post_norm_blocks=1, branch_scale="skipinit", bias=True)
    cases = {"S5, untied, llama": llama, "HG, Post-LN block": post, "experts": MIXTURES["softmax"][0]}
    model = build(cases.get(name, dict(gain="none")), 3, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(std=0.1, generator=torch.Generator().manual_seed(p.numel())))
    squares, whole = Counter(), Counter()  # (kind, block): Σ x²; {block type: Σ x²}
    for path, p in model.named_parameters():
        square = sum(x**2 for x in p.double().flatten().tolist())
        whole[type_by_name(path, matrices=False)] += square
        if path.startswith("blocks."):
            _, block, branch, *_, last = path.split(".")
            kind = type_by_name(path, matrices=True) or (last == "gain" and p.numel() > 1 and f"{branch}_gain")
            squares[kind, int(block)] += square
    measured = norms.measure_norms(model)
    types, found = measured["types"], measured["blocks"]
    assert types.keys() == whole.keys()
    assert all(types[kind] == pytest.approx(square**0.5, rel=FORWARD) for kind, square in whole.items())
    assert list(found) == ["q", "k", "v", "o", "w1", "w2", "attn_gain", "mlp_gain"]
    for kind, its in found.items():
        wanted = [squares.get((kind, block), math.nan) ** 0.5 for block in range(3)]
        assert its == pytest.approx(wanted, rel=FORWARD, nan_ok=True), kind
    assert math.isnan(found["attn_gain"][1]) == (name == "no gain")


def test_the_smallest_row_of_the_embedding():
    model = build(dict(S5, vocab_size=50), dtype=torch.float32)
    table = model.wte.weight
    with torch.no_grad():
        table[7] = 5 + 0.01 * table[7]  # small once its mean is gone; rows that pad the vocabulary do not count
        table[50:] = 0
    rows = [[x - sum(row) / len(row) for x in row] for row in table.double()[:50].tolist()]
    found = norms.smallest_row(model)
    assert found["rows"] == 50 and close(found["smallest"], min(sum(x**2 for x in row) for row in rows), 1e-3)
    assert close(found["smallest"], sum(x**2 for x in rows[7]), 1e-3)
    assert close(found["gain"], model.input_norm.gain.norm().item())
    model = build(dict(), dtype=torch.float32)  # without an input norm block 1's comes next
    assert close(norms.smallest_row(model)["gain"], model.blocks[0].attn.pre.gain.norm().item())


def test_the_bias_on_the_choice_of_experts_is_left_out():
    """No loss trains it: its zeros would lower the router's sharpness, and it is no part of the router's norm."""
    model = build(dict(n_expert=4, balance="bias"), dtype=torch.float32)
    router = torch.cat([block.mlp.f.router.weight.flatten() for block in model.blocks])
    assert close(norms.measure_norms(model)["types"]["router"], router.norm().item())
    h = gradients.estimate_sharpness(model, batches_of(tokens(2, 7)), 2, torch.Generator().manual_seed(0))
    grads = gradients.compute_gradients(model, [(tokens(2, 7), tokens(2, 7, seed=2))])
    names = [name for name, _ in model.named_parameters() if not name.endswith("choice_bias")]
    assert list(h) == list(grads) == names and len(names) == len(list(model.parameters())) - 2
    found = gradients.average_by_type(h, model.block_types())["router"]
    assert found["n"] == router.numel() and found["zero_fraction"] == 0
    assert list(gradients.average_by_block(model, h)) == ["all", "qk", "vo", "ffn", "router", "norm"]


@pytest.mark.parametrize("flags, words", [(S5, S5_NET), MIXTURES["softmax"]], ids=["S5", "experts"])
def test_gradients_are_of_the_mean_over_all_targets(flags, words):
    """Batches of different size with different numbers of ignored targets, one with none that counts."""
    model, net = build(flags, dtype=torch.float32), replace(NET, blocks=2, **words)
    batches = []
    for i, (rows, ignored) in enumerate(((2, 3), (1, 0), (2, 9), (1, 7))):
        targets = tokens(rows, 7, seed=10 + i)
        targets.view(-1)[torch.randperm(rows * 7, generator=torch.Generator().manual_seed(i))[:ignored]] = -1
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


def test_tail_statistics_of_a_constant_a_few_numbers_and_one_hot():
    stats = statistics([-3.0, 3.0] * 50)
    assert stats["n"] == 100 and close(stats["rms"], 3.0)
    assert all(close(stats[k], 1.0) for k in ("max_over_rms", "kurtosis", "p999_over_p50", "participation"))

    stats = statistics([[1.0, -2.0], [3.0, 0.0]])  # Σg² = 14, Σg⁴ = 98
    wanted = dict(n=4, rms=3.5**0.5, max_over_rms=3 / 3.5**0.5, kurtosis=98 / 4 / 3.5**2, participation=14**2 / 4 / 98)
    assert all(close(stats[k], v) for k, v in wanted.items())

    stats = statistics([0.0] * 77 + [5.0] + [0.0] * 122)
    wanted = dict(n=200, rms=5 / 200**0.5, max_over_rms=200**0.5, kurtosis=200, participation=1 / 200)
    assert all(close(stats[k], v) for k, v in wanted.items())
    stats = statistics(torch.zeros(64))
    assert stats["n"] == 64 and stats["rms"] == 0  # the gradient of a table that no token reads


@pytest.mark.parametrize("n", [2**21, pytest.param(2**24 + 2**10, marks=pytest.mark.deep)])
def test_tail_statistics_of_a_gaussian_at_any_scale(n):
    """Also for more entries than torch.quantile takes (2^24), and at scales whose fourth power no fp32 number holds."""
    g = torch.empty(n).normal_(generator=torch.Generator().manual_seed(0))
    stats = statistics(g)
    assert abs(stats["kurtosis"] - 3) < 5 * (24 / n) ** 0.5
    assert abs(stats["participation"] - 1 / 3) < 1e-3
    assert abs(stats["p999_over_p50"] - 3.29053 / 0.67449) < 0.02 * (2**24 / n) ** 0.5
    assert close(stats["rms"], 1, 1e-3) and close(stats["max_over_rms"], g.abs().max().item(), 1e-3)
    part = g[: 2**16]
    stats, small, large = (statistics(part, 2.0**k) for k in (0, -60, 30))
    assert close(small.pop("rms"), stats["rms"] * 2.0**-60) and close(large.pop("rms"), stats.pop("rms") * 2.0**30)
    assert small.keys() == large.keys() == stats.keys()
    assert all(close(small[k], stats[k]) and close(large[k], stats[k]) for k in stats)


@pytest.mark.parametrize("alpha", (1.5, 4.0))
def test_hill_finds_the_index_of_a_pareto_tail(alpha):
    """P(|g| > x) = x^-α: the estimate from k entries has relative error 1/√k. Then a tail laid out by hand."""
    n, generator = 10**6, torch.Generator().manual_seed(3)
    u = torch.rand(n, generator=generator, dtype=torch.float64).clamp(min=1e-12)
    sign = torch.rand(n, generator=generator).sub(0.5).sign()
    assert abs(statistics(sign * u ** (-1 / alpha))["hill"] / alpha - 1) < 4 / 1000**0.5

    body, tail = [1.0] * 4989, [2.0 * math.exp(i / alpha) for i in range(11)]  # of 5000, 0.1 % would be 5: so ten
    excess = sum(math.log(x / tail[0]) for x in tail[1:])  # of the ten largest over the eleventh
    assert close(statistics(body + tail)["hill"], 10 / excess)


SMALL = dict(n_head=2, n_embd=8, block_size=4, vocab_size=5)
SHARP = {
    "S5, untied": (dict(S5, tie_weights=False), dict(S5_NET, tied=False)),
    "HG, rope, tied": (dict(gain="branch", pos="rope"), dict(PRE, gains="branch", theta=10000.0)),
    "experts": MIXTURES["softmax"],
}


MANY = [pytest.param((name, 1000), marks=pytest.mark.deep) for name in SHARP]


@pytest.fixture(scope="module", params=[("S5, untied", 400), *MANY], ids=str)
def sharp(request):
    """A tiny model, the exact diagonal of its loss's Gauss-Newton matrix, and many estimates of one draw each.

    The diagonal for n positions with logits z(θ) and probabilities p: (1/n) Σ ( Σ_v p_v J_v² − (Σ_v p_v J_v)² ) with
    J_v = ∂z_v/∂θ, the mean over positions of Jᵀ (diag p − p pᵀ) J. One row of J a logit, all in float64."""
    name, number = request.param
    flags, words = SHARP[name]
    model = build(dict(SMALL, **flags), 1, torch.float32)
    idx, labels = tokens(2, 4, vocab=4), tokens(2, 4, vocab=5, seed=5)  # token 4 is never read
    net = replace(NET, vocab=5, heads=2, kv_heads=2, **words)
    weights = {name: w.requires_grad_() for name, w in floats(model).items()}
    logits, loss = reference.forward(net, weights, idx, labels)

    def gradient(y):
        return dict(zip(weights, torch.autograd.grad(y, list(weights.values()), retain_graph=True), strict=True))

    exact = {name: torch.zeros_like(w) for name, w in weights.items()}
    for z in logits.flatten(0, 1):
        p, rows = reference.softmax(z).tolist(), [gradient(z[v]) for v in range(5)]
        for name in weights:
            first = sum(p[v] * rows[v][name] for v in range(5))
            second = sum(p[v] * rows[v][name] ** 2 for v in range(5))
            exact[name] += (second - first**2) / 8

    draws, generator = {name: [] for name in weights}, torch.Generator().manual_seed(0)
    for _ in range(number):
        for name, h in gradients.estimate_sharpness(model, batches_of(idx), 1, generator).items():
            draws[name].append(h.double())
    draws = {name: torch.stack(hs) for name, hs in draws.items()}
    found = dict(model=model, idx=idx, weights=weights, exact=exact, draws=draws)
    return SimpleNamespace(**found, number=number, real=gradient(loss))


def deviations(sample, value):
    """How many standard errors `value` is from the mean of `sample` (n, …), entry by entry; where the sample
    does not vary, just how far."""
    off, spread = sample.mean(0) - value, sample.std(0) / len(sample) ** 0.5
    return torch.where(spread > 0, off / spread.clamp(min=1e-300), off)


def by_type(h, dims=0):
    """{block type: sum of all its entries} of {name: tensor}, whose first `dims` dimensions stay."""
    sums = Counter()
    for name, t in h.items():
        sums[type_by_name(name, matrices=False)] += t.flatten(dims).sum(-1)
    return sums


def test_sharpness_is_the_gauss_newton_diagonal(sharp):
    def off(diagonal):
        return {kind: deviations(sample[kind], total).item() for kind, total in by_type(diagonal).items()}

    sample = by_type(sharp.draws, dims=1)
    assert max(map(abs, off(sharp.exact).values())) < 4.5
    entries = torch.cat([deviations(sharp.draws[name], h)[h > 0] for name, h in sharp.exact.items()])
    assert len(entries) > 700 and 0.4 < entries.square().mean() < 2 and (entries.abs() > 4).double().mean() < 0.01

    # what these limits tell apart: sequences for tokens in the factor, and the data's labels for sampled ones
    assert min(off({name: h / 4 for name, h in sharp.exact.items()}).values()) > 15
    assert max(map(abs, off({name: 8 * g**2 for name, g in sharp.real.items()}).values())) > 15


def test_sharpness_of_what_no_token_reaches_is_zero(sharp):
    table = sharp.draws["wte.weight"]
    assert not table[:, 5:].any() and table[:, :4].any()
    if "head.weight" in sharp.draws:
        assert not table[:, 4].any() and not sharp.draws["head.weight"][:, 5:].any()


def test_sharpness_is_the_mean_over_draws_of_a_generator(sharp):
    def estimate(seed):
        generator = torch.Generator().manual_seed(seed)
        return gradients.estimate_sharpness(sharp.model, batches_of(sharp.idx), 40, generator)

    one, again, other = estimate(0), estimate(0), estimate(1)
    for name, h in one.items():
        assert h.device.type == "cpu" and h.shape == sharp.weights[name].shape and torch.equal(h, again[name])
    assert any(not torch.equal(h, other[name]) for name, h in one.items())
    total = sum(by_type(sharp.draws, dims=1).values())
    spread = total.std() * (1 / 40 + 1 / sharp.number) ** 0.5
    assert abs(sum(h.double().sum() for h in one.values()) - total.mean()) < 4 * spread < total.mean()


def test_sharpness_is_n_times_the_square_of_the_mean_gradient(monkeypatch):
    """Blockwise LR eq. 3 on labels that are known, in float64: the same of one batch and sequence by sequence."""

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
    h = {"a": torch.tensor([[1.0, 100.0], [0.0, 10.0]]), "b": torch.tensor([1e-3]), "c": torch.tensor([4.0, 1.0])}
    found = gradients.average_by_type(h, {"a": "x", "b": "x", "c": "y"})
    wanted = {
        "x": dict(arithmetic=111.001 / 5, geometric=10 ** ((0 + 2 + 1 - 3) / 4), zero_fraction=1 / 5, n=5),
        "y": dict(arithmetic=2.5, geometric=2.0, zero_fraction=0.0, n=2),
    }
    assert found.keys() == wanted.keys()
    for kind, numbers in wanted.items():
        assert found[kind].keys() == numbers.keys()
        assert all(close(found[kind][k], v) for k, v in numbers.items())
    tiny = gradients.average_by_type({"a": torch.full((1000,), 1e-30)}, {"a": "x"})["x"]  # as at the end of training
    assert close(tiny["geometric"], 1e-30) and close(tiny["arithmetic"], 1e-30)


def test_sharpness_by_layer():
    model = build(dict(LLAMA, **S4, gain="branch"), 3, torch.float32)
    generator = torch.Generator().manual_seed(0)
    h = {name: torch.rand(p.shape, generator=generator).sub(0.2).relu() for name, p in model.named_parameters()}
    found = gradients.average_by_block(model, h)
    assert list(found) == ["all", "qk", "vo", "ffn", "norm"]
    for kind, means in found.items():
        assert list(means) == ["arithmetic", "geometric", "zero_fraction"]
        for block in range(3):
            mine = [n for n in h if n.startswith(f"blocks.{block}.")]
            mine = [n for n in mine if kind in ("all", type_by_name(n, matrices=False))]
            values = [x for n in mine for x in h[n].flatten().tolist()]
            logs = [math.log(x) for x in values if x > 0]
            assert close(means["arithmetic"][block], sum(values) / len(values))
            assert close(means["geometric"][block], math.exp(sum(logs) / len(logs)))
            assert close(means["zero_fraction"][block], 1 - len(logs) / len(values)) and len(logs) < len(values)


def test_sharpness_against_the_norms():
    """S(Norm) / S(type) by hand, entry by entry; the ratios in use; the flags that are printed, and what is drawn."""
    model, idx = build(dict(SMALL, **S5, tie_weights=False, vocab_size=5), 2, torch.float32), tokens(3, 4, vocab=5)
    config = {"blockwise_lr": True} | {f"lr_ratio_{kind}": 2.0 for kind in ("emb", "qk", "vo", "ffn", "head", "pos")}
    config["lr_ratio_norm"] = 1.5
    how = dict(config=SimpleNamespace(draws=3), device="cpu", generator=lambda device: torch.Generator().manual_seed(8))
    measured = gradients.measure_sharpness(model, batches_of(idx), SimpleNamespace(**how, train_config=config))
    found, entries = measured["types"], {}
    for name, h in gradients.estimate_sharpness(model, batches_of(idx), 3, how["generator"]("cpu")).items():
        rows = h[:5] if name in ("wte.weight", "head.weight") else h  # not those of the padding
        entries.setdefault(type_by_name(name, matrices=False), []).extend(rows.double().flatten().tolist())
    assert found.keys() == entries.keys() == {"emb", "pos", "qk", "vo", "ffn", "norm", "head"}
    logs = {kind: [math.log(x) for x in its if x] for kind, its in entries.items()}
    for kind, its in found.items():
        norm, mine = (sum(entries[k]) / len(entries[k]) for k in ("norm", kind))
        far = sum(logs["norm"]) / len(logs["norm"]) - sum(logs[kind]) / len(logs[kind])
        assert close([its["ratio"], its["geo_ratio"]], [norm / mine, math.exp(far)], 1e-4), kind
        assert its["lr_ratio"] == (1.5 if kind == "norm" else 2.0)
    _, arithmetic, geometric = gradients.describe_ratios(measured).splitlines()
    for text, key in ((arithmetic, "ratio"), (geometric, "geo_ratio")):
        flags = dict(flag[2:].split("=") for flag in text.split(": ")[1].split())
        assert flags.pop("blockwise_lr") == "True" and flags["lr_ratio_norm"] == "1"
        assert flags.keys() <= vars(TrainConfig()).keys()
        assert {k[9:]: v for k, v in flags.items()} == {k: f"{found[k][key]:.3g}" for k in found}

    double = {kind: {m: [2 * x for x in its[m]] for m in its} for kind, its in measured["layers"].items()}
    early = dict(measured, step=0, layers=double)
    panels, lower = gradients.draw_sharpness([early, dict(measured, step=5)])
    (kinds, fitting, _), _ = panels[0].lines[2]  # at a fitting LR ratio a type's sharpness is on the cross
    assert close(fitting, [found["norm"]["arithmetic"] / found[kind]["lr_ratio"] for kind in kinds])
    assert [panel.title.split()[3] for panel in lower] == ["qk,", "vo,", "ffn,", "norm,"]
    for panel, layers in zip(lower, list(measured["layers"].values())[1:], strict=True):
        assert [list(y) for (_, y, _), _ in panel.lines] == [[2 * x, x] for x in layers["arithmetic"]]


def test_sharpness_without_norms_or_ratios():
    means = {"emb": dict(arithmetic=2.0, geometric=1.0), "qk": dict(arithmetic=0.0, geometric=math.nan)}
    found = gradients.compare_to_norm(means, dict(blockwise_lr=False, lr_ratio_emb=10.0))
    assert found["emb"]["lr_ratio"] == 1 and math.isnan(found["emb"]["ratio"])
    assert gradients.describe_ratios({"types": {"emb": found["emb"]}}).count("none, without gains") == 2
    means["norm"] = means["emb"]
    found = gradients.compare_to_norm(means, {})  # a published model
    assert math.isnan(found["emb"]["lr_ratio"])
    assert found["qk"]["ratio"] == math.inf and "lr_ratio_qk" not in gradients.describe_ratios({"types": found})


def test_log_histogram():
    g = torch.tensor([[0.0, 0.0, 1e-9, 3e-3, -2e-2], [5e-2, -5e-1, 0.2, 7.0, -0.3]])  # 10 entries
    found = gradients.log_histogram(g, 3, 1e-3, 1.0)
    assert close(found["edges"], [1e-3, 1e-2, 1e-1, 1.0], 1e-12)
    shares = [d * (b - a) for d, a, b in zip(found["density"], found["edges"], found["edges"][1:], strict=False)]
    assert close(shares, [0.1, 0.2, 0.3]) and len(found["density"]) == 3
    assert close(found["ccdf"], [0.7, 0.6, 0.4, 0.1])


def test_log10_density():
    found = gradients.log10_density(torch.tensor([[1e-6, 1e-6, 2e-6], [0.0, 3e-3, 1e-2]]), 4)
    assert close(found["edges"], [-6, -5, -4, -3, -2]) and close(found["density"], [0.6, 0, 0, 0.4])
    found = gradients.log10_density(torch.tensor([1e-6, 2e-6, 2e-5, 1e-4]), 4)  # bins of half a decade
    assert close(found["density"], [1, 0, 0.5, 0.5])
