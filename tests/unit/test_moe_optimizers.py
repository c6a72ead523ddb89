"""Optimizers on mixtures of experts: updates of stacks are those of their matrices, the biases on the choice, and what
the gradient's norm counts."""

import math

import pytest
import torch

from layers.moe import Router
from layers.runtime import Runtime
from nanodnt.optim import Optimizer, lr_at, make_optimizer
from nanodnt.optim.orthogonal import newton_schulz
from support import reference
from support.models import error
from support.moe import batch_of, excess, mixture, take_step
from support.optimizers import MIXED, NAMES, settings, tiny, values

pytestmark = pytest.mark.usefixtures("one_thread")

BALANCED = "blocks.0.mlp.f.router.choice_bias"


def group_of(model, **changes) -> dict:
    """{parameter name: its group}."""
    groups = make_optimizer(model, settings(**changes)).param_groups
    return {name: group for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("schedule", ("cosine", "wsd", "dyt"))
def test_the_balance_rate_is_constant(schedule):
    """Through warm-up and decay, and whatever the blockwise ratios."""
    changes = dict(schedule=schedule, warmup_iters=4, lr_decay_iters=10, max_iters=12, balance_rate=0.02)
    config, model = settings(**changes, blockwise_lr=True, lr_ratio_router=3.0), tiny(**MIXED)
    groups = {group["label"]: group for group in make_optimizer(model, config).param_groups}
    assert {lr_at(step, config, groups["balance"]) for step in range(14)} == {0.02}
    assert len({lr_at(step, config, groups["router"]) for step in range(14)}) > 5


# ------------------------------------------------------------------------------------------------------------- updates


ORIGINAL = dict(optimizer="muon", muon_adjust_lr="original", nesterov=False)


@pytest.mark.parametrize("changes", [*(dict(optimizer=name) for name in NAMES), ORIGINAL], ids=str)
@pytest.mark.parametrize("shape", ((3, 24, 16), (4, 8, 40), (2, 16, 16)), ids=str)
def test_a_step_on_a_stack_is_one_on_each_matrix(shape, changes):
    """Bit by bit: in fp32, in the same order."""
    g = torch.Generator().manual_seed(0)
    model = tiny(**MIXED)
    group = group_of(model, **changes)["blocks.0.mlp.f.experts.up.weight"]
    stack = torch.randn(*shape, generator=g)
    single = [torch.nn.Parameter(w.clone()) for w in stack]
    stack = torch.nn.Parameter(stack)
    optimizers = [Optimizer([group | dict(params=ps, lr=0.1, param_names=None)]) for ps in ([stack], single)]
    for _ in range(3):
        stack.grad = torch.randn(*shape, generator=g) * torch.logspace(-3, 1, shape[0])[:, None, None]
        for w, grad in zip(single, stack.grad, strict=True):
            w.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack, torch.stack(single))


def test_a_stack_beyond_the_bound_is_orthogonalised_in_parts(monkeypatch):
    sizes, iterate = [], newton_schulz.newton_schulz
    stack = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    whole = newton_schulz.orthogonalize(stack, 5)
    note = lambda x, *args, **how: sizes.append(len(x)) or iterate(x, *args, **how)  # noqa: E731
    monkeypatch.setattr(newton_schulz, "newton_schulz", note)
    for bound, parts in ((2 * 24, [2, 2, 1]), (7, [1] * 5), (5 * 24, [5])):
        monkeypatch.setattr(newton_schulz, "STACK_ENTRIES", bound)
        assert torch.equal(newton_schulz.orthogonalize(stack, 5), whole) and sizes == parts
        sizes.clear()


# ------------------------------------------------------------------------------------------------- biases on the choice

RATE = 0.0625


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_biases_move_by_the_rate_against_the_load_of_the_whole_batch(optimizer):
    """However it is split into micro batches."""
    model, net = mixture("softmax, shared, bias, HG, DP" if optimizer == "adamw" else "sigmoid, shared, bias, llama")
    data, start, before = batch_of(4), model.state_dict(), values(model)
    start = {key: t.clone() for key, t in start.items()}
    with torch.no_grad():
        reference.forward(net, before, data[0], routed=(routed := []))
    for micro in (1, 2, 4):
        model.load_state_dict(start)
        take_step(model, micro, data=data, lr=1e-3, optimizer=optimizer, balance_rate=RATE)
        for (_, _, choices), (key, router) in zip(routed, model.routers().items(), strict=True):
            sign = torch.tensor(excess(choices, net.experts), dtype=torch.float64).sign()
            assert sign.abs().sum() > 1 and torch.equal(router.choice_bias, before[f"{key}.choice_bias"] - RATE * sign)


@pytest.mark.parametrize("parts", (1, 2, 3, 6))
def test_an_even_load_moves_no_bias(parts):
    """Exactly even over the batch, though not in its micro batches, whose mean loads are no fp32 numbers."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = (torch.arange(42) % 3)[torch.randperm(42, generator=g)]
        router = Router(3, 3, 1, balance="bias")
        with torch.no_grad():
            router.weight.copy_(torch.eye(3))
            router.choice_bias.zero_()
        router.runtime = Runtime(loss_scale=torch.ones(()) / parts)
        for part in torch.nn.functional.one_hot(order, 3).float().view(parts, 1, -1, 3):
            router(part)[0].sum().backward()
        assert not router.choice_bias.grad.count_nonzero()


@pytest.mark.parametrize("optimizer", NAMES)
def test_a_step_that_is_skipped_moves_nothing(optimizer):
    model, _ = mixture("sigmoid, shared, bias, llama", 1)
    weight = model.blocks[0].mlp.f.experts.up.weight
    hook = weight.register_hook(lambda grad: grad * math.nan)
    before = values(model)
    result, grads, made = take_step(model, 2, lr=1e-2, optimizer=optimizer, balance_rate=RATE)
    assert result.found_inf and grads[BALANCED].count_nonzero()
    assert all(torch.equal(p.double(), before[key]) for key, p in model.named_parameters())
    hook.remove()
    result, _, _ = take_step(model, 2, lr=1e-2, optimizer=optimizer, balance_rate=RATE)
    assert not result.found_inf and not torch.equal(values(model)[BALANCED], before[BALANCED])


# ------------------------------------------------------------------------------------------------------------ clipping


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

        changes = dict(optimizer=optimizer, balance_rate=RATE, z_coef=0.1, grad_clip=grad_clip, lr=1e-2)
        result, grads, _ = take_step(model, 2, at=note, **changes)
        loads = seen.pop(BALANCED)
        assert error(result.grad_norm, torch.nn.utils.get_total_norm(seen.values())) < 1e-6
        assert torch.equal(grads[BALANCED], loads)
        return values(model), grads, result.grad_norm

    (ours, our_grads, norm), (theirs, grads, their_norm) = step(0.05), step(0.0)
    assert norm == their_norm > 0.05
    for key in ours:
        assert error(ours[key], theirs[key], floor=1e-3) < 1e-6 and error(our_grads[key], grads[key], floor=1e-3) < 1e-6
