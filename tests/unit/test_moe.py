"""Mixtures of experts against the equations in float64 (support/reference.py, support/moe.py), and
against what they must equal: a dense FFN, themselves in another order, in parts, cached, compiled.
Under optimizers: updates of stacks, the biases on the choice, and what the gradient's norm
counts."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from layers import moe
from layers.moe import OPERATORS, Router, Routes
from layers.runtime import Runtime
from nanodnt.generate import KVCache
from nanodnt.optim import Optimizer, lr_at, make_optimizer
from support import reference
from support.depth import spread
from support.models import LLAMA, S4, batch, build, error, floats, tokens
from support.moe import (
    MIXTURES,
    backward,
    batch_of,
    difference,
    excess,
    minimised,
    mixture,
    take_step,
)
from support.operators import NoWaiting, fresh_compiler
from support.optimizers import MIXED, NAMES, settings, tiny, values
from support.tolerances import as_near, roundings

each_mixture = pytest.mark.parametrize("name", MIXTURES)
TIGHT = 1e-10
FP32 = roundings(8)  # a sum of 16 terms is 4, and a few products


# ------------------------------------------------------------------------------------ the equations


@each_mixture
def test_logits_are_the_equations_token_by_token(name):
    """From a cache that begins with so many tokens. (Whole batches: in their loss, below.)"""
    (model, net), idx = mixture(name), tokens(2, 9)
    logits = reference.forward(net, floats(model), idx)[0]
    for rows, prefill in product((1, 2), (1, 4)):
        cache = [KVCache(9) for _ in model.blocks]
        parts = [model(idx[:rows, :prefill], cache=cache)[0]]
        parts += [model(idx[:rows, t : t + 1], cache=cache)[0] for t in range(prefill, 9)]
        assert error(torch.cat(parts, 1), logits[:rows]) < TIGHT


@pytest.mark.parametrize(
    "coefs", spread([(0.7, 0.3), (0.7, 0.0), (0.0, 0.3), (0.0, 0.0)], [(0.7, 0.3)]), ids=str
)
@each_mixture
def test_gradients_are_those_of_all_that_is_minimised(name, coefs):
    """The loss, and the gradient of every parameter, to 1e-10 of its largest entry: in training
    mode of cross-entropy + coef · balance + z_coef · z, summed over the blocks; in evaluation mode
    of the cross-entropy. The gradient of the biases on the choice is the load above the mean, times
    the number of experts."""
    (model, net), (coef, z_coef) = mixture(name), coefs
    idx, targets = batch()
    model.set_runtime(balance_coef=coef, z_coef=z_coef).train()
    loss, wanted, chosen = minimised(
        model, net, idx, targets, coef * (model.config.balance == "loss"), z_coef
    )
    for block, choices in enumerate(chosen if net.choice_bias else ()):
        load = net.experts * torch.tensor(excess(choices, net.experts), dtype=torch.float64)
        wanted[f"blocks.{block}.mlp.f.router.choice_bias"] = load
    found, grads = backward(model, idx, targets)
    assert error(found, loss) < TIGHT
    assert difference(grads, wanted) < TIGHT
    evaluated, grads = backward(model.eval(), idx, targets)
    assert torch.equal(evaluated, found)
    assert difference(grads, minimised(model, net, idx, targets)[1]) < TIGHT


@pytest.mark.parametrize("ignored", (False, True), ids=("all count", "some ignored"))
@pytest.mark.parametrize(
    "name", spread(MIXTURES, ("sigmoid, shared, bias, llama", "sigmoid, not normalised, unified"))
)
def test_a_step_is_the_same_in_any_micro_batches(name, ignored):
    """4 sequences as 4, 2 or 1 micro batches: the gradients of the whole batch. `ignored`: targets
    of which the rows have uneven numbers, as examples have; their tokens still count as load."""
    idx, targets = batch_of(4, T=5)
    if ignored:
        targets[0, 1:], targets[1, :3], targets[3, 4] = -1, -1, -1
    # shares are fp32
    targets_per_rank, tolerance = (float((targets != -1).sum()), FP32) if ignored else (None, TIGHT)
    model, net = mixture(name, 1)
    coefs = dict(balance_coef=0.7) if model.config.balance == "loss" else {}
    loss, wanted, chosen = minimised(model, net, idx, targets, coefs.get("balance_coef", 0.0), 0.3)
    if net.choice_bias:
        load = net.experts * torch.tensor(excess(chosen[0], net.experts), dtype=torch.float64)
        wanted["blocks.0.mlp.f.router.choice_bias"] = load
    for micro in (1, 2, 4):
        data = dict(data=(idx, targets), targets_per_rank=targets_per_rank, z_coef=0.3, **coefs)
        result, grads, _ = take_step(mixture(name, 1)[0], micro, **data)
        assert error(result.loss, loss) < FP32  # the sum of a step is fp32
        assert difference(grads, wanted) < tolerance


# ---------------------------------------------------------------------------------- where tokens go


def route(scores, k, **how):
    """Weights and experts that a router gives to tokens with these logits (T, E)."""
    E = scores.shape[-1]
    router = Router(E, E, k, **how).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    return router(scores.double()[None])


def test_scores_near_0_are_normalised_and_scores_of_0_are_no_nan():
    logits = torch.tensor([[-30.0, -31.0, -40.0], [-800.0, -800.0, -800.0]])
    weights, _ = route(logits, 2, score="sigmoid")
    assert weights[0, 0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert weights[0, 1].tolist() == [0, 0]


# even; first, middle, last and two empty
ENDS = [[4, 8, 12], [0, 5, 12], [7, 7, 12], [3, 12, 12], [0, 12, 12]]


def like_a_gpus(product, a, b, offs):
    """A product of groups whose kernel takes no strides of 0, and leaves NaN where it has nothing
    to write: in the matrices of empty groups."""
    assert 0 not in (*a.stride(), *b.stride())
    y, is_empty = product(a, b, offs=offs), torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    return y.masked_fill(is_empty[:, None, None], math.nan) if y.ndim > 2 else y


@pytest.mark.parametrize("way", ("operator", "grouped_mm"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_each_way_to_multiply_is_the_matrices_one_by_one(ends, bias, way, monkeypatch):
    """In value and gradient; `grouped_mm` as on a GPU, by torch's own for a CPU."""
    dtype, tolerance = (torch.float32, FP32) if way == "grouped_mm" else (torch.float64, 1e-12)
    g = torch.Generator().manual_seed(0)
    x, w, b, dy = (
        torch.randn(*shape, generator=g).to(dtype)
        for shape in ((12, 8), (3, 16, 8), (3, 16), (16,))
    )
    inputs, dy = [t.requires_grad_() for t in ((x, w, b) if bias else (x, w))], dy.expand(12, 16)
    if way == "grouped_mm":
        monkeypatch.setattr(moe, "grouped_product", lambda *_: partial(like_a_gpus, F.grouped_mm))
    y = moe.grouped(
        x, w, b if bias else None, Routes(None, None, torch.tensor(ends, dtype=torch.int32))
    )
    grads = torch.autograd.grad(y, inputs, dy)
    expert = [sum(row >= end for end in ends) for row in range(12)]
    wanted = torch.stack([w[e] @ x[row] + (b[e] if bias else 0) for row, e in enumerate(expert)])
    for ours, theirs in zip(
        (y, *grads), (wanted, *torch.autograd.grad(wanted, inputs, dy)), strict=True
    ):
        assert ours.dtype == dtype and error(ours, theirs) < tolerance


@pytest.mark.deep
def test_the_operator_is_sound():
    """Fake tensors and schema, as torch checks operators."""
    x = torch.randn(12, 8)
    w = torch.randn(3, 16, 8)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    torch.library.opcheck(OPERATORS.multiply.default, (x, w.mT, ends))
    torch.library.opcheck(OPERATORS.multiply.default, (torch.randn(12, 16).mT, x, ends))


@pytest.mark.parametrize("cast", (False, True), ids=("computing in bf16", "cast to bf16"))
def test_router_logits_are_fp32_where_all_else_is_bf16(cast):
    model = mixture("softmax, shared, bias, HG, DP", dtype=torch.float32)[0].set_runtime(
        compute_dtype=torch.bfloat16
    )
    router = (model.bfloat16() if cast else model).blocks[0].mlp.f.router
    u = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, weight = router.logits(u), router.weight.float() * router.pre.gain.float()
    assert logits.dtype == router(u)[0].dtype == torch.float32
    assert error(logits, u.double() @ weight.double().T) < FP32


COMPILED = {
    "much": dict(LLAMA, gain="branch", gain_out="scale", bias=True, n_expert=3, balance="bias"),
    "softmax": dict(n_expert=4),
    "sigmoid": dict(
        S4, n_expert=4, n_expert_shared=1, router="sigmoid", n_expert_active=1, router_norm=False
    ),
}


WAYS = [("much", "aot_eager", True), ("much", "inductor", True), ("softmax", "inductor", False)]
WAYS += [("sigmoid", "inductor", False)]


@pytest.mark.parametrize("way", spread(WAYS, WAYS[:1]), ids=str)
@fresh_compiler()
def test_compiled_steps_are_the_eager_ones_and_one_graph(way):
    """Gradients, with other tokens and so other loads in every micro batch and step, and other
    weights."""
    name, backend, checkpointing = way
    dtype = torch.float64 if backend == "aot_eager" else torch.float32
    model, eager = (build(COMPILED[name], n_layer=1, dtype=dtype).train() for _ in range(2))
    exact = build(COMPILED[name], n_layer=1).train()
    model.runtime.checkpointing = checkpointing
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    torch._dynamo.utils.counters.clear()
    settings = dict(balance_coef=0.7) if model.config.balance == "loss" else dict(balance_rate=0.02)
    settings |= dict(z_coef=0.3, lr=1e-2)
    for step in range(2):
        data = batch_of(4, seed=step + 5)
        grads = take_step(model, 2, data=data, run=compiled, **settings)[1]
        wanted = take_step(eager, 2, data=data, **settings)[1]
        if dtype == torch.float64:
            assert difference(grads, wanted) < TIGHT
        else:
            assert as_near(grads, wanted, take_step(exact, 2, data=data, **settings)[1])
        for other in (eager, exact):
            other.load_state_dict(model.state_dict())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_step_waits_for_nothing_but_the_loop():
    """Where the product of all experts is one operator, nothing in a step reads the device."""
    model = mixture("sigmoid, shared, bias, llama", dtype=torch.float32)[0]
    with pytest.MonkeyPatch.context() as patch, NoWaiting() as watch:
        patch.setattr(moe, "grouped_product", lambda *_: F.grouped_mm)
        take_step(model, 2, z_coef=0.1)
    assert watch.calls


# --------------------------------------------------------------------------------------- optimizers

BALANCED = "blocks.0.mlp.f.router.choice_bias"


def group_of(model, **changes) -> dict:
    """{parameter name: its group}."""
    groups = make_optimizer(model, settings(**changes)).param_groups
    return {name: group for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("schedule", ("cosine", "dyt"))
def test_the_balance_rate_is_constant(schedule):
    """Through warm-up and decay, and whatever the blockwise ratios."""
    changes = dict(
        schedule=schedule, warmup_iters=4, lr_decay_iters=10, max_iters=12, balance_rate=0.02
    )
    config, model = settings(**changes, blockwise_lr=True, lr_ratio_router=3.0), tiny(**MIXED)
    groups = {group["label"]: group for group in make_optimizer(model, config).param_groups}
    assert {lr_at(step, config, groups["balance"]) for step in range(14)} == {0.02}
    assert len({lr_at(step, config, groups["router"]) for step in range(14)}) > 5


ORIGINAL = dict(optimizer="muon", muon_adjust_lr="original", nesterov=False)


@pytest.mark.parametrize("changes", [*(dict(optimizer=name) for name in NAMES), ORIGINAL], ids=str)
@pytest.mark.parametrize("shape", ((3, 24, 16), (4, 8, 40)), ids=str)
def test_a_step_on_a_stack_is_one_on_each_matrix(shape, changes):
    """Bit by bit: in fp32, in the same order."""
    g = torch.Generator().manual_seed(0)
    model = tiny(**MIXED)
    group = group_of(model, **changes)["blocks.0.mlp.f.experts.up.weight"]
    stack = torch.randn(*shape, generator=g)
    single = [torch.nn.Parameter(w.clone()) for w in stack]
    stack = torch.nn.Parameter(stack)
    optimizers = [
        Optimizer([group | dict(params=ps, lr=0.1, param_names=None)]) for ps in ([stack], single)
    ]
    for _ in range(3):
        stack.grad = (
            torch.randn(*shape, generator=g) * torch.logspace(-3, 1, shape[0])[:, None, None]
        )
        for w, grad in zip(single, stack.grad, strict=True):
            w.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack, torch.stack(single))


RATE = 0.0625


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_biases_move_by_the_rate_against_the_load_of_the_whole_batch(optimizer):
    """However it is split into micro batches."""
    model, net = mixture(
        "softmax, shared, bias, HG, DP" if optimizer == "adamw" else "sigmoid, shared, bias, llama"
    )
    data, start, before = batch_of(4), model.state_dict(), values(model)
    start = {key: t.clone() for key, t in start.items()}
    with torch.no_grad():
        reference.forward(net, before, data[0], routed=(routed := []))
    for micro in (1, 2, 4):
        model.load_state_dict(start)
        take_step(model, micro, data=data, lr=1e-3, optimizer=optimizer, balance_rate=RATE)
        for (_, _, choices), (key, router) in zip(routed, model.routers().items(), strict=True):
            sign = torch.tensor(excess(choices, net.experts), dtype=torch.float64).sign()
            assert sign.abs().sum() > 1 and torch.equal(
                router.choice_bias, before[f"{key}.choice_bias"] - RATE * sign
            )


@pytest.mark.parametrize("parts", (1, 2, 3, 6))
def test_an_even_load_moves_no_bias(parts):
    """Exactly even over the batch, though not in its micro batches, whose mean loads are no fp32
    numbers."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = (torch.arange(42) % 3)[torch.randperm(42, generator=g)]
        router = Router(3, 3, 1, balance="bias")
        with torch.no_grad():
            router.weight.copy_(torch.eye(3))
            router.choice_bias.zero_()
        router.runtime = Runtime(loss_scale=torch.ones(()) / parts)
        for part in F.one_hot(order, 3).float().view(parts, 1, -1, 3):
            router(part)[0].sum().backward()
        assert not router.choice_bias.grad.count_nonzero()


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_norm_is_that_of_all_but_the_loads_and_clipping_is_torchs(optimizer):
    """Parameters and gradients are those of torch's clip_grad_norm_ over all other parameters."""

    def step(grad_clip):
        """A step that clips; or, with grad_clip=0, that finds its gradients clipped by torch."""
        model, _ = mixture("sigmoid, shared, bias, llama", 1)
        others, seen = [p for key, p in model.named_parameters() if key != BALANCED], {}

        def note(phase):
            if phase == "clip":
                seen.update({key: p.grad.clone() for key, p in model.named_parameters()})
                if not grad_clip:
                    torch.nn.utils.clip_grad_norm_(others, 0.05)

        changes = dict(
            optimizer=optimizer, balance_rate=RATE, z_coef=0.1, grad_clip=grad_clip, lr=1e-2
        )
        result, grads, _ = take_step(model, 2, at=note, **changes)
        loads = seen.pop(BALANCED)
        assert error(result.grad_norm, torch.nn.utils.get_total_norm(seen.values())) < FP32
        assert torch.equal(grads[BALANCED], loads)
        return values(model), grads, result.grad_norm

    (ours, our_grads, norm), (theirs, grads, their_norm) = step(0.05), step(0.0)
    assert norm == their_norm > 0.05
    for key in ours:
        assert error(ours[key], theirs[key], floor=1e-3) < FP32
        assert error(our_grads[key], grads[key], floor=1e-3) < FP32
