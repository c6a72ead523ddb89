"""Stochastic depth: rates by block, whole samples, an expectation that stays, and no trace where it
is off."""

import pytest
import torch

from layers.slot import Slot
from model import GPT, GPTConfig, Residual
from support.models import S5, SIZE, build, error, gradients
from support.moe import batch_of
from support.operators import assert_same_gradients, fresh_compiler, standing_for


def mids(model) -> dict:
    """{name: mid slot} of all branches."""
    return {name: m.mid for name, m in model.named_modules() if isinstance(m, Residual)}


@pytest.mark.parametrize("n_layer, rate", ((1, 0.3), (12, 0.99)))
def test_rates_are_linear_from_0_in_the_first_block(n_layer, rate):
    model = GPT.empty(GPTConfig(**{**SIZE, "n_layer": n_layer, "drop_path": rate}))
    rates = {
        name: m.drop.item()
        for name, m in model.named_modules()
        if isinstance(m, Slot) and m.drop is not None
    }
    wanted = {
        f"{name}.mid": rate * int(name.split(".")[1]) / max(1, n_layer - 1) for name in mids(model)
    }
    assert rates == pytest.approx(wanted, rel=1e-12) and len(rates) == 2 * n_layer


def test_blocks_drop_at_their_rates():
    """Counted in a network of three blocks: none in the first, each branch by itself, and samples
    independently."""
    model, n = build(dict(S5, drop_path=0.6), n_layer=3).train(), 800
    gone = {name: [] for name in mids(model)}
    for name, mid in mids(model).items():
        mid.register_forward_hook(
            lambda _, args, y, name=name: gone[name].append((y == 0).flatten(1).all(1))
        )
    torch.manual_seed(3)
    with torch.no_grad():
        model(*batch_of(n))
    gone = {name: torch.cat(found).double() for name, found in gone.items()}
    for name, found in gone.items():
        rate = 0.3 * int(name.split(".")[1])
        assert abs(found.mean() - rate) <= 4.5 * (rate * (1 - rate) / n) ** 0.5, name
    drawn_at_random = torch.stack([gone[name] for name in gone if not name.startswith("blocks.0")])
    assert (torch.corrcoef(drawn_at_random) - torch.eye(4)).abs().max() < 4.5 / n**0.5


def test_a_dropped_branch_adds_exactly_nothing():
    """The stream behind it is the stream before it, bit by bit; a kept one is divided by 1 −
    rate."""
    model, calls, seen = build(dict(S5, drop_path=0.5), n_layer=2).train(), [], set()
    parts = model.blocks[1].attn, model.blocks[1].mlp
    handles = [part.register_forward_hook(lambda *call: calls.append(call)) for part in parts]
    for seed in range(6):
        torch.manual_seed(seed)
        model(*batch_of(4))
    for handle in handles:
        handle.remove()
    for residual, (before, *_), after in calls:
        branch = residual.eval()(before) - before
        for row in range(4):
            is_gone = torch.equal(after[row], before[row])
            seen.add(is_gone)
            assert is_gone or error(after[row] - before[row], 2 * branch[row]) < 1e-10
    assert seen == {True, False} and len(calls) == 12


def test_off_in_evaluation_and_where_the_rate_is_0():
    """The bits of a network without it; training with the rate 0 draws no random number."""
    inputs, targets = batch_of(2)
    plain, dropping = (build(dict(S5, **f), 3) for f in (dict(), dict(drop_path=0.7)))
    assert torch.equal(dropping(inputs)[0], plain(inputs)[0])
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert torch.equal(dropping(inputs)[0], plain(inputs)[0]) and torch.equal(
        torch.get_rng_state(), state
    )
    plain.train()(inputs, targets)
    assert torch.equal(torch.get_rng_state(), state)
    dropping.train()(inputs, targets)
    assert not torch.equal(torch.get_rng_state(), state)
    assert list(plain.state_dict()) == list(dropping.state_dict())


@pytest.mark.deep
@fresh_compiler()
def test_one_graph_of_the_whole_model():
    """Without a break; recomputed by the compiler, drops stay those of the forward pass (a gradient
    that fits)."""
    model, parts = build(dict(S5, drop_path=0.6), 2).train(), batch_of(4)
    compiled = standing_for(
        model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    )
    for seed in range(3):
        torch.manual_seed(seed)
        ours = gradients(compiled, *parts)
        torch.manual_seed(seed)
        assert_same_gradients(ours, gradients(model, *parts), 1e-9)
