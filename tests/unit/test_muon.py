"""Muon: its Newton-Schulz iteration against the plain one in float64 and torch's own; updates;
owners of matrices."""

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
from nanodnt.optim.orthogonal.newton_schulz import newton_schulz, split_into_stacks
from support.depth import spread
from support.optimizers import compile_updates, drive, gradients, settings, tiny, values, with_torch
from support.tolerances import roundings

NS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, written out
BAND = (0.68, 1.21)  # of singular values after five steps
BLOCK_ROLES = ("qk", "vo", "ffn")
STEPS = 20
STEPS_ERROR = roundings(4 * STEPS)  # of four operations on a weight each
muon = partial(settings, optimizer="muon")

# SwiGLU and grouped queries: square, tall and wide matrices; biases, gains, scalars and a head of
# its own
LAYOUT = dict(n_kv_head=1, n_ff=40, mlp="swiglu", bias=True)
LAYOUT |= dict(qk_norm=True, mid_norm="both", branch_scale="skipinit", tie_weights=False)


# ------------------------------------------------------------------------------------ Newton-Schulz


def plain_iteration(x, steps):
    """X ← aX + (bA + cA²)X, A = XXᵀ, from X/‖X‖_F, in float64, without any savings."""
    a, b, c = NS
    x = x.double() / x.double().norm().clamp(min=1e-7)
    for _ in range(steps):
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    return x


def polynomial(s, steps):
    """What the iteration turns a singular value into."""
    for _ in range(steps):
        s = NS[0] * s + NS[1] * s**3 + NS[2] * s**5
    return s


def matrix(kind, m, n, seed=0):
    """A matrix in float64. `ill`: singular values from 1 down to 0.002 of ‖X‖_F; `rank`: the lower
    half are zero."""
    g, k = torch.Generator().manual_seed(seed), min(m, n)
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
def test_it_is_the_plain_iteration(kind, shape):
    """In float64 and fp32 to their rounding: a step makes small singular values, and their errors,
    3.4 times larger. Singular values become the polynomial's values. In bf16 torch's error is the
    measure: in Frobenius norm, relative to float64."""
    x = matrix(kind, *shape)
    s = torch.linalg.svdvals(x) / x.norm()
    for steps in (1, 2, 5):
        for dtype in (torch.float64, torch.float32):
            tolerance = 1e-12 if dtype == torch.float64 else roundings(4 + NS[0] ** steps)
            y = newton_schulz(x[None].to(dtype), steps)
            assert y.dtype == dtype and y.shape == (1, *shape)
            torch.testing.assert_close(
                y[0].double(), plain_iteration(x.to(dtype), steps), rtol=0.0, atol=tolerance
            )
        found, rounded = torch.linalg.svdvals(y[0].double()), x.bfloat16()
        torch.testing.assert_close(
            found, polynomial(s, steps).sort(descending=True)[0], rtol=0.0, atol=tolerance
        )
        y, want = newton_schulz(rounded[None], steps)[0], plain_iteration(rounded, steps)
        assert y.dtype == torch.bfloat16 and y.shape == shape
        theirs = torchs_iteration(rounded, NS, steps, 1e-7)
        error, torchs_error = ((z.double() - want).norm() / want.norm() for z in (y, theirs))
        assert error <= 1.5 * torchs_error + 0.01, f"{steps} steps"
    kept = s > 0.002
    assert kept.all() or kind != "ill"
    assert BAND[0] < found[: kept.sum()].min() and found.max() < BAND[1]
    s, found = torch.linalg.svdvals(want), torch.linalg.svdvals(y.double())
    assert found.max() < BAND[1] + roundings(4, torch.bfloat16)
    # else rounding changes small singular values more
    if kind == "random" and shape != (300, 300) or min(shape) == 1:
        assert found.min() > s.min() - 0.03 > 0.45


def test_work():
    """Tall matrices cost as much as wide ones: 2m²n + m³ multiplications a step. The first two
    steps of a wide matrix take two products of m × n instead of four, and five of m × m instead of
    two."""
    m, n = 64, 200
    pair = 2 * m * m * n - 3 * m**3
    for shape, saved in (((m, n), pair), ((n, m), pair), ((m, m), 0)):
        with FlopCounterMode(display=False) as counter:
            newton_schulz(torch.ones(1, *shape), 5)
        short, long = sorted(shape)
        assert counter.get_total_flops() == 2 * (5 * (2 * short**2 * long + short**3) - saved), (
            shape
        )


# ------------------------------------------------------------------------------------------ updates


def take_steps(config, how, dtype=None):
    """Random steps with LRs that change: (model, optimizer, parameters before, {name: [(gradient,
    LR)]}). `how`: with compiled updates, as on GPUs, or with plain ones."""
    model = tiny(**LAYOUT).set_runtime(compute_dtype=dtype)
    optimizer, start = make_optimizer(model, config), values(model)
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
ADJUST, BOTH, HOW = ("original", "match_rms_adamw"), (True, False), ("plain", "compiled")


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
        w, ours = start[name], model.get_parameter(name).detach().double()
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
            p, decay = torch.nn.Parameter(w), 0.2 if role in ("emb", "head", "pos") else 0.0
            theirs = torch.optim.AdamW([p], betas=(0.8, 0.95), eps=1e-8, weight_decay=decay)
            torch.testing.assert_close(
                ours,
                with_torch(p, past[name], theirs),
                rtol=roundings(4 * STEPS),
                atol=roundings(4 * STEPS),
            )


FAST = {("original", True, "plain"), ("match_rms_adamw", False, "plain")}


@pytest.mark.parametrize("case", spread(list(product(ADJUST, BOTH, HOW)), FAST), ids=str)
def test_in_fp32_it_is_the_recurrence_in_float64(case):
    """m ← μ m + (1 − μ) g."""
    (adjust, nesterov, how), mu = case, 0.95
    model, optimizer, start, past = take_steps(muon(muon_adjust_lr=adjust, nesterov=nesterov), how)
    for name in (name for name, role in model.roles().items() if role in BLOCK_ROLES):
        w, m, p = start[name], torch.zeros_like(start[name]), model.get_parameter(name)
        for g, lr in past[name]:
            m = mu * m + (1 - mu) * g
            u = mu * m + (1 - mu) * g if nesterov else m
            w = (1 - lr * 0.3) * w - lr * size_of(adjust, *w.shape) * plain_iteration(u, 5)
        torch.testing.assert_close(p.detach().double(), w, rtol=0.0, atol=STEPS_ERROR)
        torch.testing.assert_close(
            optimizer.state[p]["momentum_buffer"].double(), m, rtol=0.0, atol=roundings(8)
        )


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
        matrix, items = torch.empty(rows, rows, device="meta"), list(range(count))
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
