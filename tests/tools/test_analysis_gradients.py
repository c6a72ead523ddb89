"""diagnostics.py against the definitions: reference.py's equations in float64, closed forms, and cases done by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from test_layouts import DYT_CONSTANT, POST_NET, S5_NET, SCHEMES, UNIFIED
from test_model import LAYOUTS, LLAMA, LLAMA_NET, NET, POST, PRE, S4, S5, build, error, floats, tokens

import diagnostics
from model import rotary

pytestmark = pytest.mark.usefixtures("one_thread")

# name: (flags, the same network for reference.py). Between them every norm placement, constant and kind of gain.
NETS = {
    "Pre-LN": (dict(), PRE),
    "DNT S5": (S5, S5_NET),
    "Post-LN": (POST, POST_NET),
    "LNS": (dict(lns="norm"), dict(PRE, lns="norm")),
    "LNS branch, mid": SCHEMES["LNS branch, mid"],
    "SkipInit": SCHEMES["SkipInit"],
    "Mix-LN, HG, llama": (
        dict(LLAMA, post_norm_blocks=1, gain="branch"),
        dict(PRE, **LLAMA_NET, post_blocks=1, gains="branch"),
    ),
    "DyT, embed scale": SCHEMES["DyT, embed scale"],
}


def solve(name, n_layer=2, idx=None, scale=None):
    """A network of NETS in fp32 and, by its equations in float64, the two terms of every residual sum (`terms`) and the
    stream before each block and after the last (`streams`). `scale` (64, 1) multiplies the embedding's rows."""
    flags, words = NETS[name]
    model, net = build(flags, n_layer, torch.float32), replace(NET, blocks=n_layer, **words)
    if scale is not None:
        with torch.no_grad():
            model.wte.weight.mul_(scale)
    idx, terms, weights = tokens(2, 7) if idx is None else idx, [], floats(model)
    logits, _ = reference.forward(net, weights, idx, seen=terms)
    last = sum(terms[-1])
    if "post" in net.mlp:
        last = weights[f"blocks.{n_layer - 1}.mlp.post.gain"] * reference.rms(last, net.eps)
    streams = [x for x, _ in terms[::2]] + [last]
    return SimpleNamespace(model=model, idx=idx, terms=terms, streams=streams, eps=net.eps)


def close(ours, theirs, tolerance=1e-5):
    """Numbers or lists of them, equal to a relative tolerance of the largest."""
    ours, theirs = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
    return error(ours, theirs) < tolerance


# -------------------------------------------------------------------------------------------------- 1. types by name


def type_by_name(name, matrices):
    """What a parameter of LAYOUTS and SCHEMES is, read off its name: of the matrices q … w2, or the sharpness types."""
    *path, last = name.split(".")
    part = path[-1]
    if matrices:
        types = dict(q="q", k="k", v="v", o="o", up="w1", gate="w1", down="w2")
        return types.get(part) if last == "weight" else None
    types = dict(wte="emb", wpe="pos", head="head", q="qk", k="qk", v="vo", o="vo", up="ffn", gate="ffn", down="ffn")
    return types.get(part, "norm")


@pytest.mark.parametrize("name", {**LAYOUTS, **SCHEMES})
def test_types_cover_every_parameter(name):
    model = build({**LAYOUTS, **SCHEMES}[name][0])
    names = [n for n, _ in model.named_parameters()]
    wanted = {n: type_by_name(n, matrices=True) for n in names}
    assert diagnostics.matrix_types(model) == {n: t for n, t in wanted.items() if t}
    assert diagnostics.block_types(model) == {n: type_by_name(n, matrices=False) for n in names}


def test_parameter_norms():
    model = build(dict(S5, tie_weights=False), dtype=torch.float32)
    squares = {}
    for name, p in model.named_parameters():
        kind = type_by_name(name, matrices=False)
        squares[kind] = squares.get(kind, 0) + sum(x**2 for x in p.flatten().tolist())
    norms = diagnostics.parameter_norms(model)
    assert norms.keys() == squares.keys() == {"emb", "pos", "head", "qk", "vo", "ffn", "norm"}
    assert all(math.isclose(norms[kind], squares[kind] ** 0.5, rel_tol=1e-5) for kind in norms)


# ----------------------------------------------------------------------------------------------- 2. gradient tails


def test_gradients_are_of_the_mean_over_all_targets():
    """Batches of different size with different numbers of ignored targets, one with none that counts."""
    model, net = build(S5, dtype=torch.float32), replace(NET, blocks=2, **S5_NET)
    batches = []
    for i, (rows, ignored) in enumerate(((2, 3), (1, 0), (2, 9), (1, 7))):
        targets = tokens(rows, 7, seed=10 + i)
        targets.view(-1)[torch.randperm(rows * 7, generator=torch.Generator().manual_seed(i))[:ignored]] = -1
        batches.append((tokens(rows, 7, seed=i), targets))
    weights = {name: w.requires_grad_() for name, w in floats(model).items()}
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    reference.forward(net, weights, idx, targets)[1].backward()
    for _ in range(2):  # nothing is left behind to be added to
        grads = diagnostics.gradients(model, batches)
        assert grads.keys() == weights.keys()
        for name, g in grads.items():
            assert g.dtype == torch.float32 and error(g, weights[name].grad) < 1e-4, name


def statistics(values, scale=1.0):
    return diagnostics.tail_statistics(torch.as_tensor(values, dtype=torch.float32) * scale)


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


def test_tail_statistics_of_a_gaussian_at_any_scale():
    """Entries enough that torch.quantile would refuse them; a scale whose fourth power is no fp32 number."""
    n = 2**24 + 2**10
    g = torch.empty(n).normal_(generator=torch.Generator().manual_seed(0))
    stats = statistics(g)
    assert abs(stats["kurtosis"] - 3) < 5 * (24 / n) ** 0.5
    assert abs(stats["participation"] - 1 / 3) < 1e-3
    assert abs(stats["p999_over_p50"] - 3.29053 / 0.67449) < 0.02
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


# ----------------------------------------------------------------------------------------------------- 3. sharpness

SMALL = dict(n_head=2, n_embd=8, block_size=4, vocab_size=5)
SHARP = {
    "S5, untied": (dict(S5, tie_weights=False), dict(S5_NET, tied=False)),
    "HG, rope, tied": (dict(gain="branch", pos="rope"), dict(PRE, gains="branch", theta=10000.0)),
}
DRAWS = 1000


@pytest.fixture(scope="module", params=SHARP)
def sharp(request):
    """A tiny model, the exact diagonal of its loss's Gauss-Newton matrix, and many estimates of one draw each.

    The diagonal for n positions with logits z(θ) and probabilities p: (1/n) Σ ( Σ_v p_v J_v² − (Σ_v p_v J_v)² ) with
    J_v = ∂z_v/∂θ, the mean over positions of Jᵀ (diag p − p pᵀ) J. One row of J a logit, all in float64."""
    flags, words = SHARP[request.param]
    model = build(dict(SMALL, **flags), 1, torch.float32)
    idx, labels = tokens(2, 4, vocab=4), tokens(2, 4, vocab=5, seed=5)  # token 4 is never read
    net = replace(NET, vocab=5, heads=2, kv_heads=2, **words)
    weights, terms = {name: w.requires_grad_() for name, w in floats(model).items()}, []
    logits, loss = reference.forward(net, weights, idx, labels, seen=terms)

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
    for _ in range(DRAWS):
        for name, h in diagnostics.sharpness(model, idx, 1, generator).items():
            draws[name].append(h.double())
    draws = {name: torch.stack(hs) for name, hs in draws.items()}
    features = (weights["final_norm.gain"] * reference.rms(sum(terms[-1]), net.eps)).detach()
    found = dict(model=model, idx=idx, labels=labels, weights=weights, exact=exact, draws=draws, features=features)
    return SimpleNamespace(**found, real=gradient(loss))


def deviations(sample, value):
    """How many standard errors `value` is from the mean of `sample` (n, …), entry by entry; where the sample
    does not vary, just how far."""
    off, spread = sample.mean(0) - value, sample.std(0) / len(sample) ** 0.5
    return torch.where(spread > 0, off / spread.clamp(min=1e-300), off)


def by_type(h, dims=0):
    """{block type: sum of all its entries} of {name: tensor}, whose first `dims` dimensions stay."""
    sums = {}
    for name, t in h.items():
        kind = type_by_name(name, matrices=False)
        sums[kind] = sums.get(kind, 0) + t.flatten(dims).sum(-1)
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


@pytest.mark.parametrize("sharp", ["S5, untied"], indirect=True)
def test_sharpness_of_a_linear_classifier_is_its_hessian(sharp):
    """On the head alone the model is softmax regression: Gauss-Newton and Hessian are the same, whatever the labels."""
    x, labels = sharp.features.flatten(0, 1), sharp.labels.flatten()

    def loss(rows):
        return torch.nn.functional.cross_entropy(x @ rows.view(5, 8).T, labels)

    hessian = torch.autograd.functional.hessian(loss, sharp.weights["head.weight"].detach()[:5].flatten())
    diagonal = hessian.diagonal().view(5, 8)
    assert error(sharp.exact["head.weight"][:5], diagonal) < 1e-10
    assert deviations(sharp.draws["head.weight"][:, :5], diagonal).abs().max() < 5


def test_sharpness_is_the_mean_over_draws_of_a_generator(sharp):
    def estimate(seed, draws=40):
        return diagnostics.sharpness(sharp.model, sharp.idx, draws, torch.Generator().manual_seed(seed))

    one, again, other = estimate(0), estimate(0), estimate(1)
    for name, h in one.items():
        assert h.device.type == "cpu" and h.shape == sharp.weights[name].shape and torch.equal(h, again[name])
    assert any(not torch.equal(h, other[name]) for name, h in one.items())
    total = sum(by_type(sharp.draws, dims=1).values())
    spread = total.std() * (1 / 40 + 1 / DRAWS) ** 0.5
    assert abs(sum(h.double().sum() for h in one.values()) - total.mean()) < 4 * spread < total.mean()


def test_sharpness_of_many_tokens(sharp):
    """The same sequences 600 times over: more tokens than one pass takes, and still the same mean loss."""
    h = diagnostics.sharpness(sharp.model, sharp.idx.repeat(600, 1), 60, torch.Generator().manual_seed(2))
    sample, h, exact = (by_type(h, dims) for h, dims in ((sharp.draws, 1), (h, 0), (sharp.exact, 0)))
    for kind, total in exact.items():
        spread = sample[kind].std() / 60**0.5
        assert abs(h[kind].item() - total) < 4.5 * spread < 0.9 * total, kind


def test_sharpness_by_type():
    h = {"a": torch.tensor([[1.0, 100.0], [0.0, 10.0]]), "b": torch.tensor([1e-3]), "c": torch.tensor([4.0, 1.0])}
    found = diagnostics.sharpness_by(h, {"a": "x", "b": "x", "c": "y"})
    wanted = {
        "x": dict(arithmetic=111.001 / 5, geometric=10 ** ((0 + 2 + 1 - 3) / 4), zero_fraction=1 / 5, n=5),
        "y": dict(arithmetic=2.5, geometric=2.0, zero_fraction=0.0, n=2),
    }
    assert found.keys() == wanted.keys()
    for kind, numbers in wanted.items():
        assert found[kind].keys() == numbers.keys()
        assert all(close(found[kind][k], v) for k, v in numbers.items())
    tiny = diagnostics.sharpness_by({"a": torch.full((1000,), 1e-30)}, {"a": "x"})["x"]  # as at the end of training
    assert close(tiny["geometric"], 1e-30) and close(tiny["arithmetic"], 1e-30)


def test_sharpness_by_layer():
    model = build(dict(LLAMA, **S4, gain="branch"), 3, torch.float32)
    generator = torch.Generator().manual_seed(0)
    h = {name: torch.rand(p.shape, generator=generator) for name, p in model.named_parameters()}
    wanted = {}
    for kind in ("qk", "vo", "ffn", "norm"):
        for block in range(3):
            mine = [n for n in h if n.startswith(f"blocks.{block}.") and type_by_name(n, matrices=False) == kind]
            values = [x for n in mine for x in h[n].flatten().tolist()]
            wanted.setdefault(kind, []).append(sum(values) / len(values))
    found = diagnostics.sharpness_by_layer(model, h)
    assert found.keys() == wanted.keys() and all(close(found[kind], wanted[kind]) for kind in wanted)


# ---------------------------------------------------------------------------------------------------- 4. histograms


def test_log_histogram():
    g = torch.tensor([[0.0, 0.0, 1e-9, 3e-3, -2e-2], [5e-2, -5e-1, 0.2, 7.0, -0.3]])  # 10 entries
    found = diagnostics.log_histogram(g, 3, 1e-3, 1.0)
    assert close(found["edges"], [1e-3, 1e-2, 1e-1, 1.0], 1e-12)
    shares = [d * (b - a) for d, a, b in zip(found["density"], found["edges"], found["edges"][1:], strict=False)]
    assert close(shares, [0.1, 0.2, 0.3]) and len(found["density"]) == 3
    assert found["zeros"] == 0.2 and close(found["ccdf"], [0.7, 0.6, 0.4, 0.1])
    assert close(sum(shares), 1 - found["zeros"] - 0.2)  # one below, one above


def test_log_histogram_of_a_power_law():
    """P(|g| > x) = x^-2 from 1 on: density 2 x^-3, here as a mean over each bin."""
    g = torch.arange(1, 200_001).double().div(200_001).pow(-0.5)
    found = diagnostics.log_histogram(torch.cat((-g, g, torch.zeros(100_000))).float(), 8, 1.0, 10.0)
    assert close(found["zeros"], 0.2) and close(found["ccdf"], [0.8 * x**-2 for x in found["edges"]], 1e-3)
    pairs = zip(found["edges"], found["edges"][1:], strict=False)
    assert close(found["density"], [0.8 * (a**-2 - b**-2) / (b - a) for a, b in pairs], 1e-3)


def test_log10_density():
    found = diagnostics.log10_density(torch.tensor([[1e-6, 1e-6, 2e-6], [0.0, 3e-3, 1e-2]]), 4)
    assert close(found["edges"], [-6, -5, -4, -3, -2]) and close(found["density"], [0.6, 0, 0, 0.4])
    found = diagnostics.log10_density(torch.tensor([1e-6, 2e-6, 2e-5, 1e-4]), 4)  # bins of half a decade
    assert close(found["density"], [1, 0, 0.5, 0.5])


# ----------------------------------------------------------------------------------------------- 5. residual stream


@pytest.mark.parametrize("name", NETS)
def test_streams_are_those_of_the_equations(name):
    net = solve(name, 3)
    found = diagnostics.streams(net.model, net.idx)
    assert len(found) == 4 and all(error(a, b) < 1e-5 for a, b in zip(found, net.streams, strict=True))


def mean_variance(x):
    """Over the channels of each token, divided by their number; the mean over tokens."""
    rows = x.flatten(0, 1).tolist()
    return sum(sum((v - sum(t) / len(t)) ** 2 for v in t) / len(t) for t in rows) / len(rows)


@pytest.mark.parametrize("name", NETS)
def test_variance_is_that_of_the_equations(name):
    net = solve(name, 3)
    found = diagnostics.stream_variance(net.model, net.idx)
    assert found.keys() == {"stream", "stream_global", "attn", "mlp"}
    assert close(found["stream"], [mean_variance(x) for x in net.streams])
    assert close(found["stream_global"], [((x - x.mean()) ** 2).mean().item() for x in net.streams])
    assert close(found["attn"], [mean_variance(y) for _, y in net.terms[::2]])
    assert close(found["mlp"], [mean_variance(y) for _, y in net.terms[1::2]])


def silence(block):
    """Make the block the identity: both of its branches end in zero."""
    with torch.no_grad():
        block.attn.f.o.weight.zero_()
        block.mlp.f.down.weight.zero_()


def test_silent_blocks_leave_the_stream_alone():
    model, idx = build(dict(), 3, torch.float32), tokens(2, 7)
    for block in model.blocks:
        silence(block)
    first, *rest = diagnostics.streams(model, idx)
    assert len(rest) == 3 and first.any() and all(torch.equal(x, first) for x in rest)
    found = diagnostics.stream_variance(model, idx)
    assert len(set(found["stream"])) == 1 and found["attn"] == found["mlp"] == [0.0] * 3
    assert all(abs(d) < 1e-3 for row in diagnostics.angular_distance([first, *rest]) for d in row)


def test_angular_distance():
    def noise(seed):
        return torch.empty(4, 9, 32).normal_(generator=torch.Generator().manual_seed(seed))

    a, b = noise(0), noise(1)
    a[..., 16:] = 0
    orthogonal = a.roll(16, dims=-1)
    mixed = torch.cat((3 * a[:, :2], -a[:, 2:]), dim=1)  # 2 of 9 tokens alike, the others opposite
    xs = [a, orthogonal, -2 * a, mixed, b, a + 1e-2 * b, a * (1 + 1e-7), 1e-9 * a, 1e9 * b]
    found = diagnostics.angular_distance(xs)
    assert [len(row) for row in found] == [9] * 9 and len(found) == 9
    assert not any(math.isnan(d) for row in found for d in row)
    assert max(abs(found[0][j] - d) for j, d in enumerate((0, 0.5, 1, 7 / 9))) < 5e-4
    for i, x in enumerate(xs):
        for j, y in enumerate(xs):
            angles = []
            for u, v in zip(x.double().flatten(0, 1), y.double().flatten(0, 1), strict=True):
                cosine = (u @ v) / math.sqrt((u @ u) * (v @ v))
                angles.append(math.acos(max(-1.0, min(1.0, cosine.item()))) / math.pi)
            assert abs(found[i][j] - sum(angles) / len(angles)) < 5e-4, (i, j)


# --------------------------------------------------------------------------------------------------- 6. removal


def two_batches():
    """Of different size, with different numbers of ignored targets."""
    first, second = tokens(3, 7, seed=4), tokens(1, 7, seed=6)
    first[0, 2:] = second[0, 5] = -1
    return [(tokens(3, 7, seed=3), first), (tokens(1, 7, seed=5), second)]


CUT = {  # name: (flags, the whole network of 3 blocks, what else is said of the one with a block less)
    "LNS": (*NETS["LNS"], dict()),
    "LNS residual": (*SCHEMES["LNS residual"], dict()),
    "S5": (*NETS["DNT S5"], dict()),
    "DeepNorm": (*SCHEMES["DeepNorm"], dict(deepnorm=False, skip=6**0.25)),  # its factor is that of the whole depth
}


@pytest.mark.parametrize("name", CUT)
def test_removal_is_the_network_without_the_block(name):
    flags, words, cut = CUT[name]
    model, net, batches = build(flags, 3, torch.float32), replace(NET, blocks=3, **words), two_batches()
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    before, weights = [p.clone() for p in model.parameters()], floats(model)
    whole, losses = reference.forward(net, weights, idx, targets)[1].item(), []
    for gone in range(3):
        kept = [i for i in range(3) if i != gone]
        left = {n: w for n, w in weights.items() if not n.startswith("blocks.")}
        for new, old in enumerate(kept):
            mine = [n for n in weights if n.startswith(f"blocks.{old}.")]
            left |= {n.replace(f"blocks.{old}.", f"blocks.{new}."): weights[n] for n in mine}
        shorter = replace(net, blocks=2, numbers=tuple(i + 1 for i in kept), **cut)
        losses.append(reference.forward(shorter, left, idx, targets)[1].item())
    found = diagnostics.removal_drop(model, batches)
    assert close(found["loss"], whole) and len(found["drop"]) == 3
    assert max(abs(d - (loss - whole)) for d, loss in zip(found["drop"], losses, strict=True)) < 1e-5
    assert min(abs(loss - whole) for loss in losses) > 1e-3
    assert len(model.blocks) == 3 and all(map(torch.equal, before, model.parameters()))
    assert close(model(idx, targets)[1].item(), whole)


def test_removing_a_silent_block_changes_nothing():
    model = build(dict(lns="norm"), 3, torch.float32)
    silence(model.blocks[1])
    drop = diagnostics.removal_drop(model, two_batches())["drop"]
    assert abs(drop[1]) < 1e-6 < 1e-3 < min(abs(drop[0]), abs(drop[2]))


# -------------------------------------------------------------------------------------------------- 7. Jacobian


def sublayers(model, idx):
    """The inputs of block 2 and of its FFN, and its functions of them, by branch."""
    c = model.config
    rope = rotary(torch.arange(idx.shape[1]), c.head_dim, c.rope_theta) if c.pos == "rope" else None
    rope = None if rope is None else tuple(r.double() for r in rope)
    x = model.wte(idx) if model.wpe is None else model.wte(idx) + model.wpe.weight[: idx.shape[1]]
    x = model.blocks[0](model.input_norm(x), rope)
    block = model.blocks[1]
    functions = {"attn": lambda x: block.attn(x, rope), "mlp": block.mlp, "block": lambda x: block(x, rope)}
    return {"attn": x, "mlp": block.attn(x, rope), "block": x}, functions


JACOBIAN = {"Pre-LN": dict(), "S5, llama": dict(LLAMA, **S5), "Post-LN": POST, "DyT, LNS": dict(norm="dyt", lns="norm")}


@pytest.mark.parametrize("name", JACOBIAN)
@pytest.mark.parametrize("branch", ("attn", "mlp", "block"))
@torch.no_grad()
def test_jacobian_against_differences(name, branch):
    model, idx, positions = build(JACOBIAN[name]), tokens(3, 7), torch.tensor([0, 6, 3])
    inputs, functions = sublayers(model, idx)
    x, rows, step = inputs[branch], torch.arange(3), 1e-5
    wanted = torch.empty(16, 16, dtype=torch.float64)  # [i, j]: of output i by input j
    for j in range(16):
        shift = torch.zeros_like(x)
        shift[rows, positions, j] = step
        change = functions[branch](x + shift) - functions[branch](x - shift)
        wanted[:, j] = change[rows, positions].mean(0) / (2 * step)
    found = diagnostics.residual_jacobian(model, idx, positions, 1, branch)
    assert found.device.type == "cpu" and found.shape == (16, 16) and error(found, wanted) < 1e-6


def test_jacobian_of_a_token_knows_no_later_tokens_and_follows_the_chain_rule():
    model, idx, position = build(dict(S5, pos="rope")), tokens(1, 7), torch.tensor([3])

    def jacobian(idx, branch):
        return diagnostics.residual_jacobian(model, idx, position, 1, branch)

    later, earlier = idx.clone(), idx.clone()
    later[:, 4:] = (later[:, 4:] + 1) % 50
    earlier[:, :3] = (earlier[:, :3] + 1) % 50
    attn, mlp, block = (jacobian(idx, branch) for branch in ("attn", "mlp", "block"))
    assert error(jacobian(later, "attn"), attn) < 1e-12 < 1e-3 < error(jacobian(earlier, "attn"), attn)
    assert error(block, mlp @ attn) < 1e-12 < 1e-3 < error(block, attn @ mlp)
    silence(model.blocks[1])
    assert error(jacobian(idx, "block"), torch.eye(16)) < 1e-12


def test_jacobian_statistics():
    def found(rows):
        return diagnostics.jacobian_statistics(torch.tensor(rows))

    assert found([[1.0, 0.0], [0.0, 1.0]]) == dict(deviation=0, off_diagonal=0)
    assert close(list(found([[2.0, 1.0], [0.0, 1.0]]).values()), [1, 1 / 6])  # ‖J − I‖² = 2, over C = 2
    assert close(list(found([[0.0, 3.0], [-4.0, 0.0]]).values()), [13.5**0.5, 1])
    assert close(list(found([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0], [0.0, 0.0, 1.0]]).values()), [(13 / 3) ** 0.5, 4 / 22])


# ------------------------------------------------------------------------------------------------- 8. norms and DyT

SLOTS = {
    "Pre-LN": (dict(), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "DNT S5": (S5, ["attn.pre", "attn.mid", "mlp.mid"], ["final_norm"]),
    "Post-LN": (dict(POST, qk_norm=True), ["attn.post", "mlp.post"], []),
    "HG, DNP": (dict(UNIFIED), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "LayerScale, DyT": (dict(norm="dyt", branch_scale="layerscale"), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "no norm": (dict(norm="none", branch_scale="layerscale", embed_scale=True, qk_norm=True), [], []),
}


@pytest.mark.parametrize("name", SLOTS)
def test_norm_slots_are_those_of_the_residual_path(name):
    flags, places, last = SLOTS[name]
    model = build(flags)
    wanted = ["input_norm"] * bool(flags.get("input_norm"))
    wanted += [f"blocks.{i}.{place}" for i in range(2) for place in places] + last
    found = diagnostics.norm_slots(model)
    assert list(found) == wanted and all(found[name] is model.get_submodule(name) for name in wanted)


@pytest.mark.parametrize("constant", (False, True), ids=("learned", "constant"))
def test_dyt_alphas(constant):
    flags, words = dict(norm="dyt", embed_scale=True), dict(PRE, kind="dyt", embed_scale=True)
    if constant:
        flags, words = flags | DYT_CONSTANT, words | dict(alpha=(0.7, 0.4))
    model, net, terms = build(flags, dtype=torch.float32), replace(NET, blocks=2, **words), []
    weights, idx = floats(model), tokens(2, 7)
    reference.forward(net, weights, idx, seen=terms)
    names = [f"blocks.{i}.{branch}.pre" for i in range(2) for branch in ("attn", "mlp")] + ["final_norm"]
    inputs = [x for x, _ in terms] + [sum(terms[-1])]
    found = diagnostics.dyt_alphas(model, idx)
    assert [slot["slot"] for slot in found] == names
    for slot, name, x in zip(found, names, inputs, strict=True):
        alpha = (0.7 if "attn" in name else 0.4) if constant else weights[name + ".alpha"].item()
        assert close(slot["alpha"], alpha) and close(slot["inv_std"], 1 / ((x - x.mean()) ** 2).mean().sqrt().item())
    assert diagnostics.dyt_alphas(build(S5, dtype=torch.float32), idx) == []


def scatter(model, idx, slot, n=400):
    """norm_scatter of an fp32 model, with tensors for its lists."""
    found = diagnostics.norm_scatter(model, idx, slot, n, torch.Generator().manual_seed(0))
    x, y, token, channel = (torch.tensor(found[key]) for key in ("x", "y", "token", "channel"))
    assert len(x) == len(y) == len(token) == len(channel) == min(n, idx.numel() * 16)
    assert len(set(zip(token.tolist(), channel.tolist(), strict=True))) == len(x)  # no element twice
    return found, x.double(), y.double(), token, channel


def sizes():
    """(64, 1): factors of the embedding's rows, so that the tokens' RMS differ as they do after training."""
    return torch.empty(64, 1).normal_(generator=torch.Generator().manual_seed(2)).exp()


def test_scatter_of_rmsnorm_is_a_line_for_each_token():
    net = solve("Pre-LN", idx=tokens(5, 9), scale=sizes())
    found, x, y, token, channel = scatter(net.model, net.idx, "blocks.1.attn.pre")
    entering = net.streams[1].flatten(0, 1)
    mean_square = (entering**2).mean(-1)
    assert error(x, entering[token, channel]) < 1e-5
    assert error(y, x / (mean_square[token] + net.eps) ** 0.5) < 1e-5
    assert token.unique().numel() == 45 and channel.unique().numel() == 16

    rms = (mean_square**0.5).tolist()
    mean = sum(rms) / 45
    assert close(found["token_rms_cv"], (sum((r - mean) ** 2 for r in rms) / 45) ** 0.5 / mean)
    assert found["token_rms_cv"] > 0.3

    def r2(curve):
        """Of the best multiple of `curve`."""
        residual = y - (curve @ y) / (curve @ curve) * curve
        return (1 - residual @ residual / ((y - y.mean()) ** 2).sum()).item()

    slopes = torch.logspace(-2, 1.5, 400)
    best = max(r2(torch.tanh(a * x)) for a in slopes.tolist())
    fitted = y - found["amplitude"] * torch.tanh(found["slope"] * x)
    assert close(found["r2"], (1 - fitted @ fitted / ((y - y.mean()) ** 2).sum()).item())
    assert best - 1e-6 < found["r2"] < best + 1e-3 and close(found["linear_r2"], r2(x)) and best > r2(x) + 0.05


def test_scatter_of_layernorm():
    model, idx = build(dict(norm="layernorm", norm_eps=1e-5, bias=True), dtype=torch.float32), tokens(5, 9)
    entering = diagnostics.streams(model, idx)[2].double().flatten(0, 1)
    found, x, y, token, channel = scatter(model, idx, "final_norm", n=10**6)  # more than there are
    assert torch.equal(x, entering[token, channel])
    assert error(y, reference.standardise(entering, 1e-5)[token, channel]) < 1e-4


def test_scatter_of_dyt_finds_its_tanh():
    net = solve("DyT, embed scale", idx=tokens(5, 9))
    for slot, alpha in (("blocks.1.mlp.pre", 0.8), ("final_norm", -0.3), ("blocks.0.attn.pre", 0.05)):
        with torch.no_grad():
            net.model.get_submodule(slot).alpha.fill_(alpha)
            net.model.get_submodule(slot).gain.fill_(3.0)  # comes after y
        found, x, y, *_ = scatter(net.model, net.idx, slot)
        assert error(y, torch.tanh(alpha * x)) < 1e-5
        assert found["r2"] > 1 - 1e-6 > found["linear_r2"]
        assert close(found["slope"], abs(alpha), 1e-2) and close(found["amplitude"], math.copysign(1, alpha), 1e-2)


# ------------------------------------------------------------------------------------------------------- 9. gains


def of_gain(values):
    n, mean = len(values), sum(values) / len(values)
    rms, std = (sum((v - centre) ** 2 / n for v in values) ** 0.5 for centre in (0, mean))
    return dict(rms=rms, min=min(values), max=max(values), std=std)


@pytest.mark.parametrize("param", ("direct", "magdir", "expmagdir"))
def test_gain_statistics(param):
    """HG, DP, post norms: each gain as it acts. Not SkipInit's scalar, in the place of the mid norm's."""
    flags = dict(gain="branch", gain_out="scale", mid_norm="attn", post_norm="mlp", branch_scale="skipinit")
    model = build(dict(flags, gain_param=param, qk_norm=True, n_kv_head=2), dtype=torch.float32)
    weights, wanted = floats(model), {}
    places = ["f.q.pre", "f.k.pre", "f.v.pre", "f.q.out", "f.k.out", "f.v.out", "f.q_norm", "f.k_norm"]
    places = [f"attn.{p}" for p in places] + ["mlp.f.up.pre", "mlp.f.up.out", "mlp.post"]
    for name in [f"blocks.{i}.{place}" for i in range(2) for place in places]:
        if param == "direct":
            gain = weights[name + ".gain"]
        else:
            size, direction = weights[name + ".magnitude"].item(), weights[name + ".direction"]
            size = math.exp(size) if param == "expmagdir" else size
            gain = size * direction / ((direction**2).sum() / len(direction)) ** 0.5
        wanted[name] = of_gain(gain.tolist())
    found = diagnostics.gain_statistics(model)
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert found[name].keys() == numbers.keys() and all(close(found[name][k], v) for k, v in numbers.items()), name
    assert diagnostics.gain_statistics(build(dict(gain="none"))) == {}


def test_qkv_cosines():
    model = build(dict(gain="branch", n_kv_head=2, post_norm_blocks=1), 3, torch.float32)
    found = diagnostics.qkv_cosines(model)
    assert len(found) == 3 and all(math.isnan(x) for x in found[0].values())  # a block of Mix-LN has no pre norm
    for i in (1, 2):
        gains = {part: getattr(model.blocks[i].attn.f, part).pre.gain.tolist() for part in "qkv"}
        dot = {a + b: sum(x * y for x, y in zip(gains[a], gains[b], strict=True)) for a in "qkv" for b in "qkv"}
        assert found[i].keys() == {"qk", "qv", "kv"}
        assert all(close(c, dot[ab] / math.sqrt(dot[ab[0] * 2] * dot[ab[1] * 2])) for ab, c in found[i].items())
    assert diagnostics.qkv_cosines(build(S5)) == []


# --------------------------------------------------------------------------------------------- 10. attention logits

LOGITS = {
    "Pre-LN": NETS["Pre-LN"],
    "S5": NETS["DNT S5"],
    "S5, GQA, rope": (dict(S5, **LLAMA), dict(S5_NET, **LLAMA_NET)),
    "DNP, MQA": (dict(gain_out="norm", n_kv_head=1), dict(PRE, out="norm", kv_heads=1)),
    "LNS": NETS["LNS"],
}


@pytest.mark.parametrize("name", LOGITS)
def test_logit_max_is_that_of_the_equations(name, monkeypatch):
    """The equations' softmax gets the scores of one head at a time, the future at -∞: note the largest of each."""
    flags, words = LOGITS[name]
    model, net, largest, softmax = (
        build(flags, 3, torch.float32),
        replace(NET, blocks=3, **words),
        [],
        reference.softmax,
    )

    def note(scores):
        largest.append(scores[scores > -math.inf].abs().max().item())
        return softmax(scores)

    monkeypatch.setattr(reference, "softmax", note)
    idx = tokens(3, 9)
    reference.forward(net, floats(model), idx)
    assert len(largest) == 3 * 4
    assert close(diagnostics.logit_max(model, idx), [max(largest[i : i + 4]) for i in (0, 4, 8)])


# ------------------------------------------------------------------------------------------------ 11. what is left


def test_nothing_is_left_behind():
    """No parameter, gradient, hook, mode, or random state is another one afterwards."""
    model, idx, generator = build(dict(LLAMA, norm="dyt"), dtype=torch.float32), tokens(2, 7), torch.Generator()
    targets, batches = tokens(2, 7, seed=2), two_batches()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    diagnostics.gradients(model, batches)
    diagnostics.sharpness(model, idx, 2, generator)
    for function in (diagnostics.streams, diagnostics.stream_variance, diagnostics.dyt_alphas, diagnostics.logit_max):
        function(model, idx)
    diagnostics.removal_drop(model, batches)
    diagnostics.norm_scatter(model, idx, "final_norm", 10, generator)
    for branch in ("attn", "mlp", "block"):
        diagnostics.residual_jacobian(model, idx, torch.tensor([1, 2]), 0, branch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(idx, targets)[1].requires_grad
