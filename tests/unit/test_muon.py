"""Muon: its Newton-Schulz iteration against the plain one in float64, the SVD and torch's own;
updates; owners of matrices."""

import math
import random
from functools import partial
from itertools import product

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torchs_iteration
from torch.utils.flop_counter import FlopCounterMode

from nanodnt.optim import make_optimizer
from nanodnt.optim.orthogonal.messages import assign_owners
from nanodnt.optim.orthogonal.newton_schulz import ITERATIONS, newton_schulz, split_into_stacks
from support.depth import spread
from support.optimizers import compile_updates, drive, gradients, settings, tiny, values, with_torch
from support.tolerances import roundings

NS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, written out
# {coefficients: (norm at the start, (a, b, c) of each step)}. Those of Polar Express are derived
# below.
SERIES = {"jordan": (1.0, [NS] * 5), "polar": (1 / 1.02, ITERATIONS["polar"].steps)}
# singular values of at least so much of the norm, and where five steps take them
BANDS = {"jordan": (0.002, 0.68, 1.21), "polar": (0.001, 0.84, 1.15)}
BLOCK_ROLES = ("qk", "vo", "ffn")
STEPS = 20
STEPS_ERROR = roundings(4 * STEPS)  # of four operations on a weight each
muon = partial(settings, optimizer="muon")

# SwiGLU and grouped queries: square, tall and wide matrices; biases, gains, scalars and a head of
# its own
LAYOUT = dict(n_kv_head=1, n_ff=40, mlp="swiglu", bias=True)
LAYOUT |= dict(qk_norm=True, mid_norm="both", branch_scale="skipinit", tie_weights=False)


# ------------------------------------------------------------------------------------ Newton-Schulz


def plain_iteration(x, steps, kind="jordan", dtype=torch.float64):
    """X ← aX + (bA + cA²)X, A = XXᵀ, from X/‖X‖_F or a little less, without any savings."""
    start, series = SERIES[kind]
    x = x.to(dtype) * start / x.to(dtype).norm().clamp(min=1e-7)
    for a, b, c in series[:steps]:
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    return x


def polynomial(s, steps, kind="jordan"):
    """What the iteration turns a singular value into, where ‖X‖_F is 1."""
    start, series = SERIES[kind]
    s = start * s
    for a, b, c in series[:steps]:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("kind", SERIES)
def test_five_steps_take_singular_values_into_a_band(kind):
    """In exact arithmetic; the pages have these numbers."""
    least, low, high = BANDS[kind]
    s = polynomial(torch.logspace(math.log10(least), 0, 10_001, dtype=torch.float64), 5, kind)
    assert low < s.min() < low + 0.01 and high - 0.01 < s.max() < high


def test_the_steps_of_polar_express_are_the_best():
    """arXiv 2505.16932, Algorithm 1: p(x) = a x + b x³ + c x⁵ is the best approximation to a
    constant on [max(ℓ, u/50), u]: at the ends and where p' = 0 it is off by E, in turns. Its scale
    makes p(ℓ) + p(u) = 2. All but the last are then taken at x/1.02, and p(ℓ) is the next ℓ."""
    low, high = 1e-3, 1.0
    for t, (a, b, c) in enumerate(SERIES["polar"][1]):
        safety = 1.02 if t < 4 else 1.0
        p = lambda x, a=a, b=b, c=c: a * x + b * x**3 + c * x**5  # noqa: E731
        root = math.sqrt(9 * b * b - 20 * a * c)
        peak, trough = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
        assert p(peak) == pytest.approx(p(high * safety), rel=1e-9)
        assert p(trough) == pytest.approx(p(max(low, high / 50) * safety), rel=1e-9)
        assert p(low * safety) + p(high * safety) == pytest.approx(2, rel=1e-9)
        low = p(low)
        high = 2 - low


def matrix(kind, m, n, seed=0):
    """A matrix in float64. `ill`: singular values from 1 down to 0.002 of ‖X‖_F; `rank`: the lower
    half are zero."""
    g = torch.Generator().manual_seed(seed)
    k = min(m, n)
    draw = [
        torch.randn(rows, columns, generator=g).double()
        for rows, columns in ((m, n), (m, k), (n, k))
    ]
    if kind == "random":
        return draw[0]
    u, v = (torch.linalg.qr(d)[0] for d in draw[1:])
    s = torch.ones(k, dtype=torch.float64)
    for _ in range(50):  # the norm depends on the smallest: a fixed point
        s = torch.logspace(0, math.log10(0.00201 * s.norm()), k, dtype=torch.float64)
    if kind == "rank":
        s[(k + 1) // 2 :] = 0
    return u * s @ v.T


# Square; a little wide or tall; vectors; large enough and at least twice as wide or tall, where two
# steps are one.
SMALL = [(24, 24), (24, 40), (40, 24), (1, 30), (30, 1), (1, 1), (64, 130), (150, 64)]
SHAPES = spread([*SMALL, (24, 48), (24, 100), (100, 24), (300, 700), (300, 300)], SMALL)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "ill", "rank"])
@pytest.mark.parametrize("series", SERIES)
def test_it_is_the_plain_iteration(series, kind, shape):
    """In float64 and fp32 to their rounding: a step makes small singular values, and their errors,
    a times larger. Singular values become the polynomial's values, and singular vectors stay: the
    SVD. In bf16 the error of the plain iteration is the measure, for Keller Jordan's numbers that
    of torch's: in Frobenius norm, relative to float64. Where Polar Express is steep, at the norm of
    a vector, a rounding moves the result through the whole band, and the band is the measure."""
    x = matrix(kind, *shape)
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    _, low, high = BANDS[series]
    for steps in (1, 2, 5):
        growth = math.prod(a for a, _, _ in SERIES[series][1][:steps])
        for dtype in (torch.float64, torch.float32):
            tolerance = 1e-12 if dtype == torch.float64 else roundings(4 + growth)
            y = newton_schulz(x[None].to(dtype), steps, series)
            assert y.dtype == dtype and y.shape == (1, *shape)
            want = plain_iteration(x.to(dtype), steps, series)
            torch.testing.assert_close(y[0].double(), want, rtol=0.0, atol=tolerance)
        by_svd = u * polynomial(s, steps, series) @ v
        torch.testing.assert_close(y[0].double(), by_svd, rtol=0.0, atol=tolerance)
        rounded = x.bfloat16()
        y = newton_schulz(rounded[None], steps, series)[0]
        want = plain_iteration(rounded, steps, series)
        assert y.dtype == torch.bfloat16 and y.shape == shape
        theirs = plain_iteration(rounded, steps, series, torch.bfloat16)
        if series == "jordan":
            theirs = torchs_iteration(rounded, NS, steps, 1e-7)
        error, usual_error = ((z.double() - want).norm() / want.norm() for z in (y, theirs))
        is_steep = series == "polar" and min(shape) == 1
        assert is_steep or error <= 1.5 * usual_error + 0.01, f"{steps} steps"
    s = torch.linalg.svdvals(want)
    found = torch.linalg.svdvals(y.double())
    assert found.max() < high + roundings(4, torch.bfloat16)
    # else rounding changes small singular values more
    if kind == "random" and shape != (300, 300) or min(shape) == 1:
        lowest = low if min(shape) == 1 else s.min()
        assert found.min() > lowest - 0.03 > low - 0.25


@pytest.mark.parametrize("series", SERIES)
def test_matrices_of_a_stack_are_by_themselves(series):
    """Bit by bit, beside one of zeros, which stays zero."""
    for shape in ((64, 130), (24, 24), (30, 1)):
        stack = torch.stack([matrix("random", *shape).float(), torch.zeros(shape)])
        found = newton_schulz(stack, 5, series)
        assert torch.equal(newton_schulz(stack[:1], 5, series)[0], found[0])
        assert not found[1].any()


def test_work():
    """Tall matrices cost as much as wide ones: 2m²n + m³ multiplications a step. The first two
    steps of a wide matrix take two products of m × n instead of four, and five of m × m instead of
    two."""
    m = 64
    n = 200
    pair = 2 * m * m * n - 3 * m**3
    wide = [((m, n), pair), ((n, m), pair), ((m, m), 0)]
    for (shape, saved), series in product(wide, SERIES):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.ones(1, *shape), 5, series)
        short, long = sorted(shape)
        assert counter.get_total_flops() == 2 * (5 * (2 * short**2 * long + short**3) - saved), (
            shape
        )


# ------------------------------------------------------------------------------------------ updates


def take_steps(config, how, dtype=None):
    """Random steps with LRs that change: (model, optimizer, parameters before, {name: [(gradient,
    LR)]}). `how`: with compiled updates, as on GPUs, or with plain ones."""
    model = tiny(**LAYOUT).set_runtime(compute_dtype=dtype)
    optimizer = make_optimizer(model, config)
    start = values(model)
    grads = gradients(model, STEPS, small=())
    with pytest.MonkeyPatch.context() as patch:
        if how == "compiled":
            compile_updates(patch)
        rates = drive(model, optimizer, grads)
    return (
        model,
        optimizer,
        start,
        {n: [(g[n], lr) for g, lr in zip(grads, rates[n], strict=True)] for n in start},
    )


def size_of(adjust, rows, columns):
    """The factor of an update: methods' two conventions."""
    return (
        math.sqrt(max(1, rows / columns))
        if adjust == "original"
        else 0.2 * math.sqrt(max(rows, columns))
    )


OPTIONS = {"defaults": {}, "others": dict(momentum=0.8, muon_steps=3)}
FAST = {("original", True, "defaults", "plain"), ("match_rms_adamw", True, "others", "plain")}
FAST |= {("original", False, "others", "plain"), ("match_rms_adamw", False, "defaults", "plain")}
ADJUST = ("original", "match_rms_adamw")
BOTH = (True, False)
HOW = ("plain", "compiled")


@pytest.mark.parametrize("case", spread(list(product(ADJUST, BOTH, OPTIONS, HOW)), FAST), ids=str)
def test_it_is_torchs_muon_and_torchs_adamw(case):
    """Hidden matrices by torch.optim.Muon, the rest by torch.optim.AdamW, decay on matrices.

    Both iterations round to bf16, in another order where two steps are one. Their results then
    differ by about 2 % in Frobenius norm. The weights differ by no more than that, relative to the
    length of their path: by 1 % here, by 0 for square matrices."""
    adjust, nesterov, options, how = case
    options = OPTIONS[options]
    config = muon(
        muon_adjust_lr=adjust, nesterov=nesterov, adamw_weight_decay=0.2, beta1=0.8, **options
    )
    model, _, start, past = take_steps(config, how, torch.bfloat16)
    for name, role in model.roles().items():
        w = start[name]
        ours = model.get_parameter(name).detach().double()
        if role in BLOCK_ROLES:
            numbers = dict(
                momentum=options.get("momentum", 0.95), ns_steps=options.get("muon_steps", 5)
            )
            p = torch.nn.Parameter(w.float())
            theirs = torch.optim.Muon(
                [p], nesterov=nesterov, adjust_lr_fn=adjust, weight_decay=0.3, **numbers
            )
            theirs = with_torch(p, past[name], theirs)
            path = (
                sum(lr for _, lr in past[name])
                * size_of(adjust, *w.shape)
                * math.sqrt(min(w.shape))
            )
            assert (ours - theirs).norm() < 0.02 * path, name
        else:
            p = torch.nn.Parameter(w)
            decay = 0.2 if role in ("emb", "head", "pos") else 0.0
            theirs = torch.optim.AdamW([p], betas=(0.8, 0.95), eps=1e-8, weight_decay=decay)
            torch.testing.assert_close(
                ours,
                with_torch(p, past[name], theirs),
                rtol=roundings(4 * STEPS),
                atol=roundings(4 * STEPS),
            )


FORMS = {
    "plain": {},
    "rows": dict(muon_row_norm=True, beta2=0.9),
    "cautious": dict(cautious_decay=True),
    "all": dict(muon_coefficients="polar", muon_row_norm=True, cautious_decay=True),
}
FAST = {("original", True, "plain", form) for form in FORMS}
FAST |= {("match_rms_adamw", False, "plain", form) for form in FORMS}


@pytest.mark.parametrize("case", spread(list(product(ADJUST, BOTH, HOW, FORMS)), FAST), ids=str)
def test_in_fp32_it_is_the_recurrence_in_float64(case):
    """m ← μ m + (1 − μ) g. NorMuon divides rows by their size, then scales back: to the norm of
    before, as its authors' code does, or to an RMS of 0.2 (its paper, line 10). Cautious decay
    leaves out entries whose update has another sign; where one is about 0, either is right."""
    adjust, nesterov, how, form = case
    flags = FORMS[form]
    mu, beta2 = 0.95, flags.get("beta2", 0.95)
    config = muon(muon_adjust_lr=adjust, nesterov=nesterov, **flags)
    model, optimizer, start, past = take_steps(config, how)
    for name in (name for name, role in model.roles().items() if role in BLOCK_ROLES):
        w = start[name]
        m = torch.zeros_like(w)
        v = torch.zeros(len(w), 1, dtype=torch.float64)
        clear = torch.ones_like(w, dtype=torch.bool)
        p = model.get_parameter(name)
        for g, lr in past[name]:
            m = mu * m + (1 - mu) * g
            u = mu * m + (1 - mu) * g if nesterov else m
            o = plain_iteration(u, 5, flags.get("muon_coefficients", "jordan"))
            size = size_of(adjust, *w.shape)
            if "muon_row_norm" in flags:
                v = beta2 * v + (1 - beta2) * (o**2).mean(1, keepdim=True)
                norm = o.norm() if adjust == "original" else 0.2 * w.numel() ** 0.5 / size
                o = o / (v.sqrt() + 1e-10)
                o = o * norm / o.norm()
            decay = 0.3 * w
            if "cautious_decay" in flags:
                decay = torch.where(o * w < 0, 0.0, decay)
                clear &= o.abs() > 1e-5
            w = w - lr * (size * o + decay)
        assert clear.double().mean() > 0.99
        found = p.detach().double()
        torch.testing.assert_close(found[clear], w[clear], rtol=0.0, atol=STEPS_ERROR)
        state = {key: t.double() for key, t in optimizer.state[p].items()}
        torch.testing.assert_close(state["momentum_buffer"], m, rtol=0.0, atol=roundings(8))
        if "muon_row_norm" in flags:
            torch.testing.assert_close(state["row_squares"], v[:, 0], rtol=0.0, atol=STEPS_ERROR)
        assert ("row_squares" in state) == ("muon_row_norm" in flags)


@pytest.mark.parametrize(
    "dtype, expected", [(None, "float32"), (torch.float16, "float32"), (torch.bfloat16, "bfloat16")]
)
def test_the_iteration_is_in_bf16_where_the_model_is(dtype, expected):
    """Not in fp16, whose range is too small."""
    groups = make_optimizer(tiny().set_runtime(compute_dtype=dtype), muon()).param_groups
    assert {g["ns_dtype"] for g in groups if g["rule"] == "muon"} == {expected}


def test_what_is_stacked_is_bounded():
    """At most 64M entries at a time, but at least one matrix; and each matrix once."""
    for rows, count in ((4096, 9), (2**14, 3), (64, 5)):
        matrix = torch.empty(rows, rows, device="meta")
        items = list(range(count))
        stacks = split_into_stacks(items, matrix)
        assert [i for stack in stacks for i in stack] == items
        assert all(len(stack) == 1 or len(stack) * rows**2 <= 2**26 for stack in stacks)
        assert len(stacks) == -(-count // max(1, 2**26 // rows**2))
    assert split_into_stacks([], matrix) == []


# ------------------------------------------------------------------------------------------- owners


def cost(shape):
    """Multiplications of a plain step: XXᵀ, its square, and the product with X; of every matrix of
    a stack."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * (m * m * n + m * m * m + m * m * n)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 100])
def test_the_work_of_ranks_differs_by_at_most_a_matrix(world):
    rng = random.Random(world)
    models = [
        [(768, 768)] * 48 + [(3072, 768), (768, 3072)] * 12,
        [(64, 64)],
        [(4, 96, 64)] + [(64, 96)] * 5,
    ]
    models += [
        [(rng.randint(1, 300), rng.randint(1, 300)) for _ in range(rng.randint(1, 40))]
        for _ in range(20)
    ]
    for shapes in models:
        owners = assign_owners(tuple(shapes), world)
        load = [
            sum(cost(s) for s, owner in zip(shapes, owners, strict=True) if owner == rank)
            for rank in range(world)
        ]
        assert sum(load) == sum(map(cost, shapes))
        assert all(abs(x - sum(load) / world) <= max(map(cost, shapes)) for x in load)
        if world >= len(shapes):  # more ranks than matrices: none has two
            assert max(owners.count(rank) for rank in range(world)) == 1
