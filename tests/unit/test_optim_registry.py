"""A new optimizer is one new file: the docs' Lion is registered, and works in every way that ours do.

tests/docs/test_docs.py puts the file into a copy of the tree and trains with it from the command line;
tests/distributed/test_optimizer_steps.py trains it on shards.
"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pkgutil import iter_modules

import pytest
import torch

from nanodnt import optim
from nanodnt.optim import OPTIMIZERS, RULES, describe_groups, fill_defaults, load_optimizer, make_optimizer, notes
from nanodnt.optim import state_bytes as count_state_bytes
from nanodnt.optim.registry import register
from nanodnt.settings import TrainConfig
from support.optimizers import (
    ALL,
    DECAYED,
    STEPS,
    assert_parameters,
    drive,
    everything,
    gradients,
    lion_source,
    registered,
    settings,
    tiny,
    values,
)
from support.runs import ROOT, assert_same_run, column, flags

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def lion():
    with registered(lion_source()):
        yield


def test_lion_is_its_recurrence(lion):
    """w ← w (1 − ηλ) − η sign(β₁ m + (1 − β₁) g); m ← β₂ m + (1 − β₂) g, in float64."""
    model = tiny(**ALL).double()
    optimizer = make_optimizer(model, settings(optimizer="lion", beta1=0.8, beta2=0.9))
    want, grads, roles = values(model), gradients(model, STEPS), model.roles()
    rates = drive(model, optimizer, grads)
    for name, w in want.items():
        m = torch.zeros_like(w)
        for t, lr in enumerate(rates[name]):
            g = grads[t][name]
            decay = 0.3 if roles[name] in DECAYED else 0.0
            w = w * (1 - lr * decay) - lr * torch.sign(0.8 * m + 0.2 * g)
            m = 0.9 * m + 0.1 * g
        want[name] = w
    assert_parameters(model, want, 1e-12)


def test_lion_learns(lion):
    """Least squares: the loss of a linear map falls."""
    model, config = tiny(), settings(optimizer="lion", learning_rate=0.01, weight_decay=0.0, warmup_iters=0)
    optimizer, losses = make_optimizer(model, config), []
    tokens = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(0))
    for step in range(STEPS):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = optim.lr_at(step, config, group)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_lion_changes_nothing_where_a_gradient_is_not_finite(lion):
    model = tiny()
    optimizer = make_optimizer(model, settings(optimizer="lion"))
    good, spoilt = gradients(model, 2)
    drive(model, optimizer, [good])
    before = everything(model, optimizer)
    drive(model, optimizer, [spoilt | {"wte.weight": torch.full_like(spoilt["wte.weight"], torch.nan)}], torch.ones(()))
    assert everything(model, optimizer) == before


def test_lions_state_is_saved_loaded_and_counted(lion):
    config, models = settings(optimizer="lion"), (tiny(), tiny())
    first, second = (make_optimizer(model, config) for model in models)
    grads = gradients(models[0], 4)
    drive(models[0], first, grads[:2])
    models[1].load_state_dict(models[0].state_dict())
    load_optimizer(second, first.state_dict(), step=2)
    for model, optimizer in zip(models, (first, second), strict=True):
        drive(model, optimizer, grads[2:])
    assert everything(models[0], first) == everything(models[1], second)
    assert count_state_bytes(models[0], config) == 4 * models[0].num_params()
    with pytest.raises(ValueError, match="does not fit this optimizer"):
        load_optimizer(make_optimizer(tiny(), settings(optimizer="adamw")), first.state_dict(), step=4)


def test_lions_settings(lion):
    """Its own defaults; knobs that it does not understand are refused; groups, ratios and notes as for ours."""
    fill_defaults(config := TrainConfig(optimizer="lion"))
    assert (config.learning_rate, config.weight_decay, config.min_lr) == (1e-4, 1.0, 1e-5)
    with pytest.raises(ValueError, match="momentum=0.9 has no effect on lion: leave it out, or choose msgdw or muon"):
        fill_defaults(TrainConfig(optimizer="lion", momentum=0.9))
    with pytest.raises(ValueError, match=r"shrink every matrix by 50% a step: .* \(the default is 1\)"):
        fill_defaults(TrainConfig(optimizer="lion", learning_rate=0.5))
    model, config = tiny(), settings(optimizer="lion", blockwise_lr=True, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    assert {group["rule"] for group in optimizer.param_groups} == {"lion"}
    assert {g["label"]: g["lr_ratio"] for g in optimizer.param_groups if g["role"] in DECAYED} == dict(
        emb=10, pos=1, head=1, qk=8, vo=4, ffn=6
    )
    assert describe_groups(optimizer).count(" lion ") == len(optimizer.param_groups)
    assert [note.partition(" are our")[0] for note in notes(config, model)] == [
        "blockwise_lr: the paper has ratios for adamw and adam_mini; these for lion"
    ]


def test_a_rest_of_its_own(lion):
    """Lion on the matrices of the blocks alone. The rest has adamw's rule, and LR and decay of the matrices unless it
    is given its own."""
    defaults = dict(learning_rate=1e-4, weight_decay=1.0, adamw_learning_rate=None, adamw_weight_decay=0.2)
    source = f"from nanodnt.optim.registry import register, RULES\nregister('both', *RULES['lion'], defaults={defaults}"
    with registered(f"{source}, rest='adamw', uses_betas=False)"):
        fill_defaults(config := TrainConfig(optimizer="both", beta1=0.5))
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
    for knob in defaults:
        with pytest.raises(ValueError, match=f"optimizer 'tiger' needs a default for {knob}"):
            register("tiger", *rule, defaults={k: v for k, v in defaults.items() if k != knob})
    assert "tiger" not in OPTIMIZERS and "tiger" not in RULES


def test_order_and_names(lion):
    """adamw first, the others by name; and each of ours in a file of its name."""
    assert list(OPTIMIZERS) == ["adamw", *sorted(OPTIMIZERS.keys() - {"adamw"})]
    assert RULES.keys() - OPTIMIZERS.keys() == {"balance"}  # of the routers' biases, beside every optimizer
    assert OPTIMIZERS.keys() <= RULES.keys()
    files = Counter(module.name for module in iter_modules(optim.__path__))
    assert all(files[name] == 1 for name in RULES.keys() - {"lion"})


COMMANDS = """
import json, runpy, sys

for name, *argv in json.loads(sys.argv[1]):
    sys.argv = [name, *argv]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{sys.argv}: exit code {end.code}"
"""


@pytest.mark.deep  # the fast suite runs README's example, which is the same file
def test_the_file_alone_is_enough(tmp_path, dataset):
    """In a copy of the code with this one file more, the commands know Lion: --help, the tables of model.py, training,
    which is the same uninterrupted and resumed. All in one process, because its start takes the longest."""
    for name in ("layers", "nanodnt"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configurator.py", "model.py", "vision.py", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "nanodnt" / "optim" / "lion.py").write_text(lion_source())
    changes = dict(dataset=dataset, optimizer="lion", learning_rate=3e-3, eval_interval=3)
    whole = ["train.py", *flags(**changes, out_dir="whole", max_iters=6, lr_decay_iters=6)]
    first = ["train.py", *flags(**changes, out_dir="resumed", max_iters=3, lr_decay_iters=6)]
    second = ["train.py", *flags(**changes, out_dir="resumed", max_iters=6, lr_decay_iters=6, init_from="resume")]
    table = ["model.py", "--optimizer=lion", "--n_layer=1", "--vocab_size=50"]
    argv = [whole, first, second, table, ["train.py", "--help"]]
    command = [sys.executable, "-c", COMMANDS, json.dumps(argv)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    assert column(tmp_path / "whole", "train_loss")[6] < column(tmp_path / "whole", "train_loss")[1]
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["train"]["optimizer"] == "lion"
    assert re.search(r"^ +qk .* lion +0\.0001 +1$", done.stdout, re.MULTILINE)  # a group, at Lion's defaults
    assert re.search(r"^ *lion .* 4\.00$", done.stdout, re.MULTILINE)  # bytes of state a parameter
    assert re.search(r"--optimizer=.*?\[adamw \|[^]]*\blion \|[^]]*\]", done.stdout, re.DOTALL)


def test_lion_is_not_one_of_ours():
    assert "lion" not in OPTIMIZERS and "lion" not in RULES
