"""A new optimizer is one new file: the docs' Lion is registered, and works in every way that ours do.

tests/docs/test_docs.py puts the file into a copy of the tree and trains with it from the command line;
tests/distributed/test_optimizer_steps.py trains it on shards.
"""

from collections import Counter
from pkgutil import iter_modules

import pytest
import torch

from nanodnt import optim
from nanodnt.optim import OPTIMIZERS, RULES, describe_groups, load_optimizer, make_optimizer, notes
from nanodnt.optim import state_bytes as count_state_bytes
from nanodnt.optim.registry import register
from support.optimizers import (
    ALL,
    DECAYED,
    assert_steps,
    drive,
    driven,
    everything,
    filled,
    gradients,
    lion_source,
    registered,
    settings,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def lion():
    with registered(lion_source()):
        yield


def test_lion_is_its_recurrence(lion):
    """w ← w (1 − ηλ) − η sign(β₁ m + (1 − β₁) g); m ← β₂ m + (1 − β₂) g, in float64."""

    def update(role, w, decay, steps):
        m = torch.zeros_like(w)
        for g, lr in steps:
            w = w * (1 - lr * decay) - lr * torch.sign(0.8 * m + 0.2 * g)
            m = 0.9 * m + 0.1 * g
        return w

    assert_steps(update, tiny(**ALL).double(), 1e-12, optimizer="lion", beta1=0.8, beta2=0.9)


def test_lions_state_is_counted_and_kept(lion):
    """It is part of the optimizer's state, which loads into another; a step that is not finite changes nothing."""
    grads = gradients(tiny(), 4)
    (model, optimizer), other = driven(dict(optimizer="lion"), grads[:2]), driven(dict(optimizer="lion"), [])
    other[0].load_state_dict(model.state_dict())
    load_optimizer(other[1], optimizer.state_dict(), step=2)
    drive(model, optimizer, [grads[2] | {"wte.weight": torch.full((64, 16), torch.nan)}], torch.ones(()))
    for pair in ((model, optimizer), other):
        drive(*pair, grads[2:])
    assert everything(model, optimizer) == everything(*other)
    assert count_state_bytes(model, settings(optimizer="lion")) == 4 * model.num_params()


def test_lions_settings(lion):
    """Its own defaults; flags that it does not understand are refused; groups, ratios and notes as for ours."""
    config = filled(optimizer="lion")
    assert (config.learning_rate, config.weight_decay, config.min_lr) == (1e-4, 1.0, 1e-5)
    with pytest.raises(ValueError, match="momentum=0.9 has no effect on lion: leave it out, or choose msgdw or muon"):
        filled(optimizer="lion", momentum=0.9)
    with pytest.raises(ValueError, match=r"shrink every matrix by 50% a step: .* \(the default is 1\)"):
        filled(optimizer="lion", learning_rate=0.5)
    model, config = tiny(), settings(optimizer="lion", blockwise_lr=True, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    assert {group["rule"] for group in optimizer.param_groups} == {"lion"}
    ratios = {g["label"]: g["lr_ratio"] for g in optimizer.param_groups if g["role"] in DECAYED}
    assert ratios == dict(emb=10, pos=1, head=1, qk=8, vo=4, ffn=6)
    assert describe_groups(optimizer, model).count(" lion ") == len(optimizer.param_groups)
    (note,) = notes(config, model)
    assert note.startswith("blockwise_lr: the paper has ratios for adamw and adam_mini; these for lion are our")


def test_a_rest_of_its_own(lion):
    """Lion on the matrices of the blocks alone. The rest has adamw's rule, and LR and decay of the matrices unless it
    is given its own."""
    defaults = dict(learning_rate=1e-4, weight_decay=1.0, adamw_learning_rate=None, adamw_weight_decay=0.2)
    source = f"from nanodnt.optim.registry import register, RULES\nregister('both', *RULES['lion'], defaults={defaults}"
    with registered(f"{source}, rest='adamw', uses_betas=False)"):
        config = filled(optimizer="both", beta1=0.5)
        assert (config.adamw_learning_rate, config.adamw_weight_decay) == (1e-4, 0.2)
        model = tiny()
        rules = {g["role"]: g["rule"] for g in make_optimizer(model, config).param_groups}
        assert {role for role, rule in rules.items() if rule == "both"} == {"qk", "vo", "ffn"}
        assert set(rules.values()) == {"both", "adamw"}
        assert notes(config, model) == ["beta1 and beta2 have no effect on both"]
    assert "both" not in OPTIMIZERS and "both" not in RULES


def test_what_register_refuses(lion):
    rule, defaults = RULES["lion"], dict(learning_rate=1.0, weight_decay=0.0)
    with pytest.raises(ValueError, match="two optimizers register as 'lion'"):
        register("lion", *rule, defaults=defaults)
    for flag in defaults:
        with pytest.raises(ValueError, match=f"optimizer 'tiger' needs a default for {flag}"):
            register("tiger", *rule, defaults={k: v for k, v in defaults.items() if k != flag})
    assert "tiger" not in OPTIMIZERS and "tiger" not in RULES


def test_order_and_names(lion):
    """adamw first, the others by name; and each of ours in a file of its name."""
    assert list(OPTIMIZERS) == ["adamw", *sorted(OPTIMIZERS.keys() - {"adamw", "lion"}), "lion"]  # registered last
    assert RULES.keys() - OPTIMIZERS.keys() == {"balance"}  # of the routers' biases, beside every optimizer
    assert OPTIMIZERS.keys() <= RULES.keys()
    files = Counter(module.name for module in iter_modules(optim.__path__))
    assert all(files[name] == 1 for name in RULES.keys() - {"lion"})
