"""Update rules against their recurrences in float64 and torch's own optimizers; steps whose
gradients are not finite; clipping; how many kernels a step takes.

Groups, decay, state and loading are in test_optim_groups.py, settings and schedules in
test_schedules.py, Muon in test_muon.py.
"""

import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from nanodnt.optim import make_optimizer
from support.depth import spread
from support.optimizers import (
    ALL,
    DNT,
    LAYOUTS,
    MIXED,
    OURS,
    STEPS,
    VARIANTS,
    assert_parameters,
    assert_steps,
    blocks_of,
    compile_updates,
    drive,
    driven,
    everything,
    gradients,
    settings,
    spoil,
    tiny,
    use_plain_operators,
    values,
    with_torch,
)
from support.tolerances import roundings

both_kernels = pytest.mark.usefixtures("kernel")


@pytest.fixture(params=["torch's", "plain", pytest.param("compiled", marks=pytest.mark.deep)])
def kernel(request, monkeypatch):
    """torch's kernels; plain operators, as on other devices; these compiled, as on a GPU."""
    if request.param == "plain":
        use_plain_operators(monkeypatch)
    if request.param == "compiled":
        compile_updates(monkeypatch)


# ------------------------------------------------------------------------------------- update rules


@both_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adamw_is_torchs(layout):
    """torch.optim.AdamW in float64, a parameter at a time, with decay on the matrices."""

    def update(role, w, decay, steps):
        p = torch.nn.Parameter(w)
        return with_torch(
            p, steps, torch.optim.AdamW([p], betas=(0.8, 0.9), weight_decay=decay, foreach=False)
        )

    assert_steps(update, tiny(**LAYOUTS[layout]), beta1=0.8, beta2=0.9)


@both_kernels
def test_adamw_is_its_definition_with_cautious_decay_and_an_epsilon():
    """Decay where m, the new average, has the sign of the weight, in float64."""

    def update(role, w, decay, steps):
        m = torch.zeros_like(w)
        v = torch.zeros_like(w)
        for t, (g, lr) in enumerate(steps):
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            u = m / (1 - 0.8 ** (t + 1)) / ((v / (1 - 0.9 ** (t + 1))).sqrt() + 1e-6)
            w = w - lr * (u + decay * torch.where(u * w >= 0, w, 0.0))
        return w

    flags = dict(cautious_decay=True, adam_eps=1e-6, beta1=0.8, beta2=0.9)
    assert_steps(update, tiny(**ALL), **flags)


SGD = [dict(), dict(dampening=0.3), dict(nesterov=True), dict(momentum=0.5), dict(momentum=0.0)]


@both_kernels
@pytest.mark.parametrize("options", SGD, ids=str)
def test_msgdw_is_torchs_sgd_plus_explicit_decay(options):
    """Decay first, w ← w (1 − ηλ), then torch.optim.SGD, whose first buffer is the whole
    gradient."""

    def update(role, w, decay, steps):
        p = torch.nn.Parameter(w)
        return with_torch(p, steps, torch.optim.SGD([p], **dict(momentum=0.9) | options), decay)

    assert_steps(update, tiny(**ALL), optimizer="msgdw", **options)


@both_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adam_mini_is_its_definition(layout):
    """One second moment a head of q and k, a row of other matrices, a whole tensor of all else; ε
    outside the root."""
    model = tiny(**LAYOUTS[layout])
    moments = []
    flags = dict(optimizer="adam_mini", beta1=0.8, beta2=0.9, adam_eps=1e-7)

    def update(role, w, decay, steps):
        blocks = blocks_of(role, len(w), head_dim=8)
        m = torch.zeros_like(w)
        v = [0.0] * len(blocks)
        for t, (g, lr) in enumerate(steps):
            w = w * (1 - lr * decay)
            m = 0.8 * m + 0.2 * g
            for i, rows in enumerate(blocks):
                v[i] = 0.9 * v[i] + 0.1 * float((g[rows] ** 2).sum()) / g[rows].numel()
                corrected = m[rows] / (1 - 0.8 ** (t + 1)), v[i] / (1 - 0.9 ** (t + 1))
                w[rows] -= lr * corrected[0] / (math.sqrt(corrected[1]) + 1e-7)
        moments.append(torch.tensor(v, dtype=torch.float64))
        return w

    optimizer = assert_steps(update, model, **flags)
    if layout == "all":  # 2 heads of q, one of k
        heads = {
            n: len(v)
            for (n, role), v in zip(model.roles().items(), moments, strict=True)
            if role == "qk"
        }
        assert heads == {"blocks.0.attn.f.q.weight": 2, "blocks.0.attn.f.k.weight": 1}
    for p, v in zip(model.parameters(), moments, strict=True):
        torch.testing.assert_close(
            optimizer.state[p]["block_sq"].double(), v, rtol=roundings(10 * STEPS), atol=0.0
        )


@both_kernels
@pytest.mark.parametrize(
    "changes",
    [dict(optimizer="adam_mini", beta1=0.0), dict(optimizer="muon", momentum=0.0, nesterov=False)],
    ids=str,
)
def test_without_momentum_the_average_is_the_last_gradient(changes):
    model, optimizer = driven(changes, grads := gradients(tiny(), 3))
    for group in optimizer.param_groups:
        key = dict(adam_mini="exp_avg", muon="momentum_buffer").get(group["rule"])
        for name, p in zip(group["param_names"], group["params"], strict=True) if key else ():
            assert torch.equal(optimizer.state[p][key], grads[-1][name].float()), name


def test_adam_mini_refuses_a_head_that_does_not_divide_the_rows():
    model = tiny()
    f = model.blocks[0].attn.f
    f.k.weight = torch.nn.Parameter(torch.zeros(12, 16))
    with pytest.raises(ValueError, match="a tensor of 12 rows does not divide into blocks of 8"):
        make_optimizer(model, settings(optimizer="adam_mini"))


# --------------------------------------------------------- steps with gradients that are not finite


@both_kernels
@pytest.mark.parametrize("kind", ["nan", "inf", "one", "other"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_found_inf_makes_a_step_change_nothing(variant, kind):
    """Neither parameters nor state change by a bit, in the first step or a later one; nor do the
    steps that follow. Experts have stacks of matrices, and biases with a rule of their own."""
    runs = []
    for with_spoilt in (False, True):
        model = tiny(**MIXED)
        optimizer = make_optimizer(model, settings(**VARIANTS[variant]))
        grads = gradients(model, 3)
        spoilt = spoil(gradients(model, 1, seed=1)[0], kind)
        for t in range(4):
            if with_spoilt:
                before = everything(model, optimizer)
                drive(
                    model,
                    optimizer,
                    [spoilt],
                    found_inf=torch.tensor(2.0 if kind == "other" else 1.0),
                )
                assert everything(model, optimizer) == before, f"after {t} good steps"
            drive(model, optimizer, grads[t : t + 1], found_inf=torch.tensor(0.0))
        runs.append(everything(model, optimizer))
    assert runs[0] == runs[1]


@both_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_of_zero_makes_no_nan(variant):
    """As of a token that no row has, or of an expert that gets no token: at first, and later."""
    some = gradients(tiny(), 1)
    none = [{name: torch.zeros_like(g) for name, g in some[0].items()}]
    model, optimizer = driven(VARIANTS[variant], none + some + none)
    state = (
        t
        for s in optimizer.state_dict()["state"].values()
        for t in s.values()
        if torch.is_tensor(t)
    )
    assert all(t.isfinite().all() for t in (*model.parameters(), *state))


def second_step(variant, decays: bool) -> tuple:
    """(Its gradients, how it changes each parameter, what decay takes of each that decays), in
    float64. The first one, with LR 0, had the same gradients: SOAP's first step moves nothing."""
    model = tiny()
    grads = gradients(tiny(), 1, small=())
    optimizer = make_optimizer(model, settings(**VARIANTS[variant]))
    for rate in (0.0, 0.01):
        before = values(model)
        for group in optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] *= decays
        for name, p in model.named_parameters():
            p.grad = grads[0][name].to(p.dtype)
        optimizer.step()
    after = values(model)
    shares = {}
    for group in optimizer.param_groups:
        decay = 0.01 * group["weight_decay"]
        for name in group["param_names"]:
            shares[name] = decay * before[name]
            if group["rule"] == "soap":  # it decays after the step
                shares[name] = decay / (1 - decay) * after[name]
    return grads[0], {name: w - before[name] for name, w in after.items()}, shares


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_goes_down_and_decay_shrinks_the_weights(variant):
    """Along the gradient the loss falls. With decay each weight loses ηλw more, whatever else the
    step does; with cautious decay, each that the step brings nearer to zero."""
    grads, changes, _ = second_step(variant, decays=False)
    assert [name for name, g in grads.items() if not (g * changes[name]).sum() < 0] == []
    _, decayed, shares = second_step(variant, decays=True)
    assert any(share.any() for share in shares.values())
    for name, share in shares.items():
        lost = changes[name] - decayed[name]
        if VARIANTS[variant].get("cautious_decay"):
            share = torch.where(changes[name] * share <= 0, share, 0.0)
        # of weights up to 5
        torch.testing.assert_close(lost, share, rtol=0.0, atol=roundings(20), msg=name)


@both_kernels
@pytest.mark.parametrize(
    "found_inf, grad_scale", [(None, None), (0.0, 1.0), (0.0, 1.7), (1.0, 1.0)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_divided_by_grad_scale_and_stay_as_they_are_otherwise(
    variant, found_inf, grad_scale
):
    """After the step a run looks for the first gradient that is not finite, and tracking looks at
    all of them."""
    steps = gradients(tiny(), 2)
    model, _ = driven(VARIANTS[variant], steps, found_inf, grad_scale)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, steps[-1][name].float() / (grad_scale or 1.0)), name


@both_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_grad_scale_is_the_same_as_smaller_gradients(variant):
    """Bit by bit: a step on gradients and a scale is a step on the gradients divided by it."""
    scale = torch.tensor(1.7)
    grads = [{n: g.float() for n, g in step.items()} for step in gradients(tiny(), 3)]
    smaller = [{name: g / scale for name, g in step.items()} for step in grads]
    runs = (
        driven(VARIANTS[variant], grads, 0.0, scale),
        driven(VARIANTS[variant], smaller, 0.0, 1.0),
    )
    assert everything(*runs[0]) == everything(*runs[1])


# -------------------------------------------------------------------------------- kernels of a step


class Kernels(TorchDispatchMode):
    """Counts the kernels that a GPU would start: operators, without views. One on lists of tensors
    counts as one, or as one for each tensor where its lists differ in shape or, but for copies, in
    dtype: then torch takes them singly."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and torch.is_tensor(a[0])]
        name = func.overloadpacket.__name__
        tensors = zip(*lists, strict=False)
        of_shapes = all(len({t.shape for t in same}) == 1 for same in tensors)
        of_dtypes = len({t.dtype for ts in lists for t in ts}) <= 1 or name == "_foreach_copy_"
        singly = name.startswith("_foreach_") and not (of_shapes and of_dtypes)
        self.count += 0 if func.is_view else len(lists[0]) if singly else 1
        return func(*args, **kwargs or {})


def count_kernels(n_layer, changes) -> tuple:
    """(kernels of an optimizer step that clips, number of matrices, number of parameters) of a
    model with so many layers."""
    model = GPT(GPTConfig(n_layer=n_layer, n_head=2, n_embd=16, block_size=8, vocab_size=31, **DNT))
    model.set_runtime(compute_dtype=torch.bfloat16)
    optimizer = make_optimizer(model, settings(**changes))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.found_inf = torch.tensor(False)
    optimizer.grad_scale = torch.tensor(1.7)
    with Kernels() as kernels:
        optimizer.step()
    return (
        kernels.count,
        len([p for p in model.parameters() if p.ndim == 2]),
        len(list(model.parameters())),
    )


@pytest.mark.parametrize(
    "variant", [name for name, changes in VARIANTS.items() if changes["optimizer"] in OURS]
)
def test_deeper_models_take_no_more_kernels(variant):
    """But Adam-mini, for each matrix one for the norms of its rows and one for its update; SOAP,
    which takes matrix by matrix; dampening, which copies each gradient; and cautious decay, for
    each matrix nine and the two of AdamW's average."""
    (few, *small), (many, *large) = (
        count_kernels(n_layer, VARIANTS[variant]) for n_layer in (2, 5)
    )
    matrices, parameters = (b - a for a, b in zip(small, large, strict=True))
    assert (matrices, parameters) == (3 * 6, 3 * 17)
    # SOAP's first step: of L and R each the product, its average, this in float64, eigenvectors,
    # their order, and the basis; and the count of steps, which the host reads twice
    more = dict(adam_mini=2 * matrices, msgdw_dampening=parameters, soap=15 * matrices)
    more |= dict(adamw_cautious=11 * matrices, muon_2026=9 * matrices)
    assert many - few == more.get(variant, 0)


COMPILED = ("adam_mini", "muon_2026", "muon", "adamw_cautious")
COMPILED = [name for name in COMPILED if name in VARIANTS]


@pytest.mark.parametrize("variant", spread(COMPILED, COMPILED[:2]))
def test_updates_are_compiled_once(variant, monkeypatch):
    """LRs change in every step, and nothing is compiled after the first; with compile=False nothing
    at all."""
    first, *steps = gradients(tiny(**MIXED), STEPS)
    found = []
    for changes in (dict(compile=False), dict()):
        counters.clear()
        compile_updates(monkeypatch, "aot_eager")
        model, optimizer = driven(VARIANTS[variant] | changes, [first], 0.0, 1.7, **MIXED)
        compiled = counters["stats"]["unique_graphs"]
        drive(model, optimizer, steps, torch.tensor(0.0), torch.tensor(1.7))
        assert counters["stats"]["unique_graphs"] == compiled and (compiled > 0) == (not changes)
        found.append(model)
    assert_parameters(found[1], values(found[0]), 16 * STEPS * torch.finfo(torch.float32).eps)
