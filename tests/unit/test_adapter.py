"""--optimizer=MODULE:CLASS: classes of torch.optim and others under our groups, rates, decay,
clipping, skipped steps and checkpoints."""

import copy
import io
import re

import pytest
import torch

from model import GPT
from nanodnt.optim import (
    OPTIMIZERS,
    describe_groups,
    fill_defaults,
    load_optimizer,
    make_optimizer,
    notes,
    state_bytes,
)
from nanodnt.optim.adapter import print_note
from nanodnt.settings import TrainConfig
from support import foreign
from support.optimizers import (
    ALL,
    MIXED,
    assert_steps,
    block_of_page,
    drive,
    driven,
    everything,
    gradients,
    settings,
    spoil,
    tiny,
    values,
)
from support.runs import bits, different, tensors

NESTED = dict(optimizer="support.foreign:Nested")
CLASSES = {  # lazy and eager state; none at all; a step on the CPU, in tensors, in numbers
    "RMSprop": "momentum=0.9,centered=True",
    "Adagrad": "",
    "NAdam": "betas=(0.8, 0.9), decoupled_weight_decay=True",
    "SGD": "",
    "Adafactor": "",
    "AdamW": "amsgrad=True,foreach=False,",
}
CHOICES = [dict(optimizer=f"torch.optim:{n}", optimizer_args=a) for n, a in CLASSES.items()]
CHOICES.append(NESTED)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_class_itself_with_our_rates_and_decay(name):
    """The same bits as the class alone, in groups with these learning rates and decays."""
    flags = dict(optimizer=f"torch.optim:{name}", optimizer_args=CLASSES[name])
    model = tiny()
    other = copy.deepcopy(model)
    steps = gradients(model, 5)
    optimizer = make_optimizer(model, settings(**flags, decay_gains="all"))
    groups = [
        dict(
            params=[other.get_parameter(name) for name in group["param_names"]],
            weight_decay=0.3 if group["role"] not in ("scalar", "bias") else 0.0,
        )
        for group in optimizer.param_groups
    ]
    theirs = getattr(torch.optim, name)(groups, lr=0.01, **eval(f"dict({CLASSES[name]})"))
    rates = drive(model, optimizer, steps, torch.tensor(0.0), torch.tensor(1.7))
    for t, grads in enumerate(steps):
        for name, p in other.named_parameters():
            p.grad = grads[name].float() / 1.7
        for group, ours in zip(theirs.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = rates[ours["param_names"][0]][t]
        theirs.step()
    assert different(dict(model.named_parameters()), dict(other.named_parameters())) == []
    # the norm of the gradients is logged after the step
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_groups_ratios_and_the_printed_table():
    config = settings(**NESTED, blockwise_lr=True, optimizer_args="mu=0.5")
    model = tiny(**MIXED)
    optimizer = make_optimizer(model, config)
    rows = {line.split()[0]: line.split() for line in describe_groups(optimizer, model).split("\n")}
    assert rows["qk"][3:] == ["support.foreign:Nested", "0.08", "0.3"]
    assert rows["bias_qk"][3:] == ["support.foreign:Nested", "0.08", "0"]
    assert rows["balance"][3:] == ["balance", "0.001", "0"]  # has a rule of its own, as always
    inner = {group["label"]: group for group in optimizer.inner.param_groups}
    assert "balance" not in inner and inner["qk"]["mu"] == 0.5 and inner["qk"]["lr"] == 0.08
    (note,) = notes(config, model)
    assert "those for support.foreign:Nested are our choice" in note
    assert "beta1" in notes(settings(**NESTED, beta1=0.8), model)[0]


@pytest.mark.parametrize("flags", CHOICES, ids=lambda flags: flags["optimizer"])
def test_a_skipped_step_changes_nothing(flags):
    """In the first step and later; also where the bad gradient was on another process. The rule of
    the balance skips too."""
    runs = []
    for with_spoilt in (False, True):
        model = tiny(**MIXED)
        optimizer = make_optimizer(model, settings(**flags))
        grads = gradients(model, 3)
        for t in range(3):
            for kind in ("nan", "other") if with_spoilt else ():
                before = everything(model, optimizer)
                drive(model, optimizer, [spoil(grads[t], kind)], torch.tensor(1.0))
                assert everything(model, optimizer) == before, (t, kind)
            drive(model, optimizer, grads[t : t + 1], torch.tensor(0.0))
        runs.append(everything(model, optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("flags", CHOICES, ids=lambda flags: flags["optimizer"])
def test_training_continues_bit_by_bit_after_loading(flags):
    """State is loaded by name, with its dtypes, its strides and what is no tensor; and a count that
    the class keeps in its groups."""
    grads = gradients(tiny(**ALL), 5)
    model, first = driven(flags, grads[:3], **ALL)
    other, second = driven(flags, [], **ALL)
    other.load_state_dict(model.state_dict())
    saved = first.state_dict()
    strides = {name: t.stride() for name, t in tensors(saved["state"]).items()}
    loaded = through_a_file(saved)
    before = bits(loaded)
    load_optimizer(second, loaded, step=3)
    again = second.state_dict()
    assert {name: t.stride() for name, t in tensors(again["state"]).items()} == strides
    drive(model, first, grads[3:])
    drive(other, second, grads[3:])
    assert everything(model, first) == everything(other, second)
    assert repr(first.state_dict()["param_groups"]) == repr(second.state_dict()["param_groups"])
    assert bits(loaded) == before, "the optimizer works on the loaded tensors themselves"


def test_what_is_configured_wins_on_loading_and_counts_are_kept():
    _, first = driven(NESTED | dict(optimizer_args="mu=0.5"), gradients(tiny(), 3))
    _, second = driven(NESTED | dict(optimizer_args="mu=0.8", weight_decay=0.2), [])
    load_optimizer(second, through_a_file(first.state_dict()), step=3)
    for group in second.inner.param_groups:
        assert (group["mu"], group["count"], group["total"].item()) == (0.8, 3, 3)
        assert group["weight_decay"] in (0.2, 0.0)
    state = next(iter(second.state.values()))
    assert state["counts"]["n"] == 3 and state["counts"]["none"] is None
    assert state["parts"][0].dtype == torch.float64 and state["parts"][1:] == [[], (1.5, "text")]


def test_a_state_of_other_parameters_is_refused():
    saved = driven(NESTED, gradients(tiny(**ALL), 1), **ALL)[1].state_dict()
    _, optimizer = driven(NESTED, [])
    with pytest.raises(ValueError, match="does not fit this optimizer on this model"):
        load_optimizer(optimizer, saved, step=1)


def test_state_bytes_are_counted_by_a_step_without_contents(capsys):
    """Adagrad: a sum a parameter, and a count on the CPU, 4 bytes. Nested: 8 bytes and a count of
    8; one more for each group."""
    real = tiny()
    with torch.device("meta"):
        meta = GPT(real.config)
    n = real.num_params()
    tensors_of = len(list(real.parameters()))
    for model in (real, meta):
        config = settings(optimizer="torch.optim:Adagrad")
        assert state_bytes(model, config) == 4 * n + 4 * tensors_of
        assert state_bytes(model, settings(**NESTED)) == 8 * n + 8 * tensors_of
    print_note.cache_clear()
    for _ in range(2):
        assert state_bytes(meta, settings(optimizer="support.foreign:Reads")) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: the state of support.foreign:Reads is not counted (RuntimeError")


def test_a_learning_rate_is_needed_and_decay_is_off():
    with pytest.raises(ValueError, match="^optimizer=torch.optim:SGD needs --learning_rate: "):
        fill_defaults(TrainConfig(optimizer="torch.optim:SGD"))
    config = TrainConfig(optimizer="torch.optim:SGD", learning_rate=0.5)
    fill_defaults(config)
    assert (config.weight_decay, config.min_lr, config.momentum) == (0.0, 0.05, None)
    with pytest.raises(ValueError) as error:
        settings(optimizer="torch.optim:SGD", momentum=0.9)
    assert "momentum=0.9 has no effect on torch.optim:SGD: leave it out, or" in str(error.value)
    assert str(error.value).endswith(", or set optimizer_args=momentum=0.9")


def test_the_class_of_the_page(tmp_path, monkeypatch):
    """docs/optimizers.md: m ← μ m + g; w ← w (1 − ηλ) − η sign(m), in float64."""
    source = block_of_page(r"whole of `my_signum\.py`, [\w\s]+`train\.py`:\n\n```python\n(.*?)```")
    (tmp_path / "my_signum.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    def update(role, w, decay, steps):
        m = torch.zeros_like(w)
        for g, lr in steps:
            m = 0.5 * m + g
            w = w * (1 - lr * decay) - lr * torch.sign(m)
        return w

    flags = dict(optimizer="my_signum:Signum", optimizer_args="momentum=0.5")
    assert_steps(update, tiny(**ALL).double(), 1e-12, **flags)


FOREIGN = "support.foreign"
REFUSED = {
    "sgd": f"optimizer='sgd' is unknown: allowed are {', '.join(OPTIMIZERS)}, or MODULE:CLASS",
    "nowhere.at.all:X": "no module 'nowhere' in this environment: install",
    ":SGD": "it must be MODULE:CLASS, as in from MODULE import CLASS",
    f"{FOREIGN}:": "must be MODULE:CLASS, as in",
    "./support.foreign:Nested": "must be MODULE:CLASS, as in",
    f"{FOREIGN}.py:Nested": "in this environment: leave .py out",
    f"{FOREIGN}:Nothing": f"{FOREIGN} has no subclass of torch.optim.Optimizer named Nothing",
    f"{FOREIGN}:no_class": "has no subclass of torch.optim.Optimizer named no_class",
    "torch.nn:Linear": "torch.nn has no subclass of torch.optim.Optimizer named Linear",
    f"{FOREIGN}:Silent": "has no lr in its groups: it would ignore the schedule",
    f"{FOREIGN}:Regroups": "must hand its groups to super().__init__: learning rates would not",
    f"{FOREIGN}:WithoutRate": "refuses its settings: TypeError: WithoutRate.__init__() got",
    f"{FOREIGN}:Bare": "must hand its groups to super().__init__",
    f"{FOREIGN}:Exits": "refuses its settings: SystemExit: 3",
    f"{FOREIGN}:NeedsClosure": "needs a closure, which a training step does not have",
    "torch.optim:Rprop": "Rprop has no weight_decay: leave --weight_decay out",
    f"{FOREIGN}:Nested mu=2": "refuses its settings: ValueError: invalid lr 0.01 or mu 2",
    f"{FOREIGN}:Nested mu=-1,nu=2": "got an unexpected keyword argument 'nu'",
    "torch.optim:SGD momentum='high'": "refuses its settings: TypeError: '<' not supported",
    f"{FOREIGN}:Nested mu=0.9,mu=0.8": "mu=0.9,mu=0.8 must be keyword arguments, each once",
    f"{FOREIGN}:Nested lr=2": "optimizer_args=lr=2: use --learning_rate and --weight_decay",
    "adamw mu=2": "optimizer_args=mu=2 has no effect on adamw",
}
REFUSED |= {
    f"{FOREIGN}:Nested {text}": f"optimizer_args={text} must be keyword arguments"
    for text in ("0.9", "mu", "mu=open('x')", "mu=1)+f(mu=2", "**{'mu':1}", "mu=0.9;", "mu=")
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_mistake_gets_one_line(flags):
    name, _, arguments = flags.partition(" ")
    with pytest.raises(ValueError) as error:
        make_optimizer(tiny(), settings(optimizer=name, optimizer_args=arguments))
    assert REFUSED[flags] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, words", [("Unsavable", "its state holds a set"), ("Global", "not kept by parameter")]
)
def test_a_state_that_no_checkpoint_holds_ends_the_first_step(name, words):
    with pytest.raises(ValueError, match=words):
        driven(dict(optimizer=f"{FOREIGN}:{name}"), gradients(tiny(), 1))


def test_an_error_of_its_step_gets_one_line(monkeypatch):
    """It names optimizer, place, kind and message; the error itself is its cause. Out of memory
    has a line of its own."""
    steps = gradients(tiny(), 2)
    with pytest.raises(ValueError) as caught:
        driven(dict(optimizer=f"{FOREIGN}:Fails"), steps)
    assert re.fullmatch(
        rf"optimizer={FOREIGN}:Fails failed in its step \(foreign.py, line \d+\): "
        "ArithmeticError: a mistake of its author",
        str(caught.value),
    )
    assert type(caught.value.__cause__) is ArithmeticError
    with pytest.raises(torch.OutOfMemoryError):
        driven(dict(optimizer=f"{FOREIGN}:RunsOut"), steps)
    for kind in (ValueError, SystemExit):
        monkeypatch.setattr(foreign.Fails, "error", kind)
        with pytest.raises(ValueError, match=f"{kind.__name__}: a mistake of its author"):
            driven(dict(optimizer=f"{FOREIGN}:Fails"), steps)


def test_a_gradient_that_is_missing_leaves_its_parameter_alone():
    model = tiny()
    optimizer = make_optimizer(model, settings(**NESTED))
    (grads,) = gradients(model, 1)
    before = values(model)
    drive(model, optimizer, [grads | {"wte.weight": None}])
    assert torch.equal(model.wte.weight.double(), before["wte.weight"])
    assert model.wte.weight not in optimizer.state
    assert len(optimizer.state_dict()["state"]) == len(grads) - 1
