"""Parameter groups: which parameter gets which rule, LR and decay. Optimizer state, its size, and
loading it. A new optimizer, which is one new file: the docs' Lion is registered, and works in every
way that ours do.

tests/docs/test_docs.py puts that file into a copy of the tree and trains with it from the command
line; tests/distributed/test_optimizer_steps.py trains it on shards.
"""

import ast
import io
import re
from functools import cache

import pytest
import torch

from model import GPT
from nanodnt.optim import RULES, describe_groups, load_optimizer, make_optimizer, notes, state_bytes
from nanodnt.optim.registry import OPTIMIZERS, register
from support.optimizers import (
    ALL,
    DECAYED,
    DNT,
    LAYOUTS,
    MIXED,
    NAMES,
    OURS,
    VARIANTS,
    assert_steps,
    block_of_page,
    blocks_of,
    drive,
    driven,
    everything,
    filled,
    gradients,
    lion_source,
    registered,
    settings,
    spoil,
    tiny,
)
from support.runs import bits, different

# ------------------------------------------------------------------------------------------- groups


def table(text):
    """{label: (tensors, parameters, optimizer, peak LR, decay)} of describe_groups' table."""
    header, *lines = text.splitlines()
    assert header.split() == ["role", "tensors", "parameters", "optimizer", "peak", "LR", "decay"]
    rows = {}
    for line in lines:
        label, tensors, count, *rest = line.split()
        rows[label] = (int(tensors), int(count.replace(",", "")), *rest[:1], *map(float, rest[1:]))
    assert len(rows) == len(lines)
    return rows


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("layout", [*LAYOUTS, "experts"])
@pytest.mark.parametrize("name", NAMES)
def test_groups_hold_every_parameter_once_and_the_table_says_so(name, layout, blockwise):
    """Muon and SOAP have the matrices of the blocks, experts among them; routers go to AdamW, as
    all that reads the stream but no branch. The biases on the choice of experts have a rule and a
    rate of their own."""
    model = tiny(**(LAYOUTS | dict(experts=MIXED))[layout])
    optimizer = make_optimizer(model, settings(optimizer=name, blockwise_lr=blockwise))
    names = {id(p): n for n, p in model.named_parameters()}
    grouped = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(names.values())
    assert grouped == [n for g in optimizer.param_groups for n in g["param_names"]]
    assert all(
        model.roles()[n] == g["role"] for g in optimizer.param_groups for n in g["param_names"]
    )
    rest = RULES[name].fallback_rule or name
    assert rest == ("adamw" if name in ("muon", "soap") else name)
    for g in optimizer.param_groups:
        role = g["role"]
        assert g["rule"] == (
            "balance" if role == "balance" else name if role in ("qk", "vo", "ffn") else rest
        ), role
        # rows of a block: of a head, each by itself, or 0: the tensor's
        if g["rule"] == "adam_mini":
            assert g["block_rows"] == (8 if role == "qk" else int(role in DECAYED)), role
    rows = table(describe_groups(optimizer, model))
    assert sum(row[1] for row in rows.values()) == model.num_params()
    assert sum(row[0] for row in rows.values()) == len(names)
    if layout == "experts":
        assert rows["balance"] == (1, 3, "balance", 0.001, 0.0)
    elif layout != "all":  # width 16, 8 positions, FFN of 64
        assert rows["qk"][:2] == rows["vo"][:2] == (2, 512) and rows["ffn"][:2] == (2, 2048)
        assert rows["pos"][:2] == (1, 128) and ("head" in rows) == (layout == "dnt")


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters_and_those_without_gradient_are_left_alone(name):
    """Parameters that are frozen before the optimizer is made are in no group. Those that are
    frozen later, or not used in a step, get no decay, and their state does not change."""
    model = tiny()
    model.wpe.weight.requires_grad_(False)
    optimizer = make_optimizer(model, settings(optimizer=name))
    assert (
        "pos" not in {g["role"] for g in optimizer.param_groups}
        and model.wpe.weight not in optimizer.state
    )
    rows = table(describe_groups(optimizer, model))
    assert (
        rows["(frozen)"] == (1, 128) and sum(row[1] for row in rows.values()) == model.num_params()
    )
    grads = gradients(model, 2)
    unused = [
        "wpe.weight",
        "blocks.0.attn.f.v.weight",
        "head.weight",
        "blocks.0.attn.f.q.bias",
        "final_norm.gain",
    ]
    drive(model, optimizer, grads[:1])
    before = {n: bits([p, optimizer.state.get(p, {})]) for n, p in model.named_parameters()}
    drive(model, optimizer, [grads[1] | dict.fromkeys(unused)])
    unchanged = [
        n for n, p in model.named_parameters() if before[n] == bits([p, optimizer.state.get(p, {})])
    ]
    assert sorted(unchanged) == sorted(unused)


# -------------------------------------------------------------------------------------------- decay


@cache
def looked_at(*flags):
    """A model that tests only look at."""
    return tiny(**dict(flags))


def decays(flags, **changes):
    """{parameter name: weight decay} of the groups."""
    config = settings(**dict(weight_decay=0.1) | changes)
    groups = make_optimizer(looked_at(*flags.items()), config).param_groups
    return {name: g["weight_decay"] for g in groups for name in g["param_names"]}


ROLE_DECAY = [
    (dict(), {}),
    (dict(decay_gains="all"), dict(gain_in=0.1, gain_out=0.1)),
    (dict(decay_gains="input"), dict(gain_in=0.1)),
    (dict(decay_gains="output"), dict(gain_out=0.1)),
    (dict(decay_emb=False, decay_gains="all", decay_scalars=True),
     dict(emb=0, pos=0, gain_in=0.1, gain_out=0.1, scalar=0.1, bias=0.1)),
]  # fmt: skip


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("changes, moved", ROLE_DECAY, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decay_of_every_role(name, changes, moved, blockwise):
    """By default only matrices decay, under every optimizer; directions never do. The
    rest of Muon and SOAP has its own decay."""
    want = {role: 0.1 if role in DECAYED else 0.0 for role in (*DECAYED, "gain_in", "gain_out")}
    want |= dict(scalar=0.0, bias=0.0, gain_dir=0.0, balance=0.0) | moved
    rest = dict(adamw_weight_decay=0.02) if name in ("muon", "soap") else {}
    seen = set()
    for flags in (DNT, ALL, dict(DNT, tie_weights=True), MIXED):
        roles = looked_at(*flags.items()).roles()
        for n, decay in decays(
            flags, optimizer=name, blockwise_lr=blockwise, **changes, **rest
        ).items():
            part = 0.2 if rest and roles[n] not in ("qk", "vo", "ffn") else 1.0
            assert decay == pytest.approx(want[roles[n]] * part), n
        seen |= set(roles.values())
    assert seen == want.keys()


@pytest.mark.parametrize("name", NAMES)
def test_decay_gains_without_such_gains_is_refused(name):
    bare = (
        dict(gain="none"),
        dict(norm="none", pre_norm="none", mid_norm="none", input_norm=False, qk_norm=False),
    )
    for flags in bare:
        for choice, role in (("input", "gain_in"), ("output", "gain_out")):
            with pytest.raises(
                ValueError,
                match=rf"decay_gains={choice}, but the model has no such gains \({role}\)",
            ):
                decays(DNT | flags, optimizer=name, decay_gains=choice)
        decays(DNT | flags, optimizer=name, decay_gains="all")  # all means none here


OPEN = {  # of input_gains: the parameters
    "v": r".*attn\.f\.(v\.out|v_norm)\.(gain|magnitude)",
    "up": r".*mlp\.f\.((experts|shared)\.)?up\.out\.(gain|magnitude)",
    "final": r"(final_norm|blocks\.0\.mlp\.post)\.(gain|magnitude)",
}
SWIGLU = dict(DNT, mlp="swiglu", gain_out="scale", tie_weights=True)


@pytest.mark.parametrize("choice", ["none", "v", "up", "v,up", "v,final", "v,up,final"])
@pytest.mark.parametrize("flags", [SWIGLU, dict(SWIGLU, post_norm="mlp", v_norm=True), ALL, MIXED])
def test_input_gains_move_the_named_gains_alone(flags, choice):
    """Between what input and what output decays; a gain is of the one or of the other. The default
    is `final`."""
    usual = decays(flags, decay_gains="input")
    gains = decays(flags, decay_gains="all")
    named = {n: part for n in gains for part, pattern in OPEN.items() if re.fullmatch(pattern, n)}
    assert set(named.values()) == {*OPEN} and all(
        usual[n] == 0.1 * (part == "final") for n, part in named.items()
    )
    wanted = usual | {n: 0.1 * (part in choice.split(",")) for n, part in named.items()}
    assert decays(flags, decay_gains="input", input_gains=choice) == wanted
    matrices = decays(flags)
    wanted = {n: d or 0.1 * (gains[n] > 0 and not wanted[n]) for n, d in matrices.items()}
    assert decays(flags, decay_gains="output", input_gains=choice) == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*OURS, "muon_2026"])
def test_state_bytes_by_hand_and_without_storage(name, layout):
    config = settings(**VARIANTS[name])
    real = tiny(**LAYOUTS[layout])
    with torch.device("meta"):
        meta = GPT(real.config)
    sizes = {n: (role, real.get_parameter(n)) for n, role in real.roles().items()}
    want = 0
    for role, p in sizes.values():
        if name == "msgdw" or (config.optimizer == "muon" and role in ("qk", "vo", "ffn")):
            want += 4 * p.numel()  # a momentum
            want += 4 * len(p) * (name == "muon_2026")  # and a number a row
        elif name == "adam_mini":  # a momentum, a number a block, a count of steps
            want += 4 * p.numel() + 4 * len(blocks_of(role, len(p), head_dim=8)) + 4
        else:  # two moments, a count of steps
            want += 8 * p.numel() + 4
        if name == "soap" and role in ("qk", "vo", "ffn"):  # an average and a basis of each side
            want += 8 * sum(n * n for n in p.shape)
    assert state_bytes(meta, config) == state_bytes(real, config) == want


# ----------------------------------------------------------------------------------- state, loading


def through_a_file(value):
    """`value`, saved and loaded like a checkpoint."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_training_continues_bit_by_bit_after_loading():
    grads = gradients(tiny(), 4)
    for variant, changes in VARIANTS.items():
        first = driven(changes, grads[:2])
        second = driven(changes, [])
        saved = through_a_file([part.state_dict() for part in first])
        before = bits(saved)
        second[0].load_state_dict(saved[0])
        load_optimizer(second[1], saved[1], step=2)
        for pair in (first, second):
            drive(*pair, grads[2:])
        assert everything(*first) == everything(*second), variant
        assert bits(saved) == before, "the optimizer works on the loaded tensors themselves"


@pytest.mark.parametrize("name", NAMES)
def test_state_is_loaded_by_name_into_other_groups(name):
    """Under blockwise LRs biases and scalars have groups of their own. Their state still finds its
    parameter. LR, decay and all else of a group stay as they are configured."""
    model, first = driven(dict(optimizer=name), gradients(tiny(**ALL), 2), **ALL)
    other, second = driven(dict(optimizer=name, blockwise_lr=True, weight_decay=0.2), [], **ALL)
    assert len(second.param_groups) > len(first.param_groups)
    second.param_groups[0]["lr"] = 0.2
    before = [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups]
    load_optimizer(second, through_a_file(first.state_dict()), step=2)
    assert [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups] == before
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert different(first.state[p], second.state[q]) == [], n
    back = make_optimizer(model, settings(optimizer=name))
    load_optimizer(back, through_a_file(second.state_dict()), step=2)
    assert different(back.state_dict()["state"], first.state_dict()["state"]) == []


def last(saved):
    """The state of the last parameter. All others stay intact."""
    return saved["state"][max(saved["state"])]


def moment(saved):
    """The name of a tensor in it that is no count of steps."""
    return [key for key in last(saved) if key != "step"][0]


DAMAGE = [
    lambda saved: last(saved).popitem(),
    lambda saved: last(saved).update({moment(saved): torch.zeros(3, 5)}),
    lambda saved: last(saved).update({moment(saved): last(saved)[moment(saved)].double()}),
    lambda saved: saved["state"].popitem(),
    lambda saved: saved["param_groups"][-1].pop("param_names"),
    lambda saved: saved["param_groups"].pop(),
    dict.clear,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(name):
    config = settings(optimizer=name)
    _, source = driven(dict(optimizer=name), gradients(tiny(), 2))
    other, target = driven(dict(optimizer=name), gradients(tiny(), 1, seed=5))
    saved = [through_a_file(source.state_dict()) for _ in DAMAGE]
    for damage, state in zip(DAMAGE, saved, strict=True):
        damage(state)
    saved += [None, make_optimizer(tiny(**ALL), config).state_dict()]
    before = everything(other, target)
    for i, state in enumerate(saved):
        with pytest.raises(
            ValueError, match="does not fit this optimizer on this model.*--init_from"
        ):
            load_optimizer(target, state, step=2)
            pytest.fail(f"number {i} was loaded")
    assert everything(other, target) == before
    load_optimizer(target, through_a_file(source.state_dict()), step=2)


# ---------------------------------------------------------------------------------- a new optimizer


@pytest.fixture
def lion():
    with registered(lion_source()):
        yield


def test_lion_is_short():
    """The update, and a call that registers it: at most 12 lines without docstring and empty
    ones."""
    docstring, *statements = ast.parse(lion_source()).body
    lines = [node.end_lineno - node.lineno + 1 for node in statements]
    assert isinstance(docstring, ast.Expr) and sum(lines) <= 12


def test_lion_is_its_recurrence(lion):
    """w ← w (1 − ηλ) − η sign(β₁ m + (1 − β₁) g); m ← β₂ m + (1 − β₂) g, in float64."""

    def update(role, w, decay, steps):
        m = torch.zeros_like(w)
        for g, lr in steps:
            w = w * (1 - lr * decay) - lr * torch.sign(0.8 * m + 0.2 * g)
            m = 0.9 * m + 0.1 * g
        return w

    assert_steps(update, tiny(**ALL).double(), 1e-12, optimizer="lion", beta1=0.8, beta2=0.9)


def test_an_update_without_betas():
    """The page's `options`: the groups have them, and the betas have no effect."""
    imports = "from nanodnt.optim.registry import Group, register_update\n\n"
    update = (
        "def update(p, g, state, group, t):\n    p.sub_(group['lr'] * group['momentum'] * g)\n\n"
    )
    source = imports + update + block_of_page(r"```python\n(def options.*?)```")
    with registered(source):
        config = settings(optimizer="signum", beta2=0.99)
        groups = make_optimizer(tiny(), config).param_groups
        assert all(g["momentum"] == 0.9 and "betas" not in g for g in groups)
        assert notes(config, tiny()) == ["beta1 and beta2 have no effect on signum"]


def test_adamw_completes_a_rule_that_has_none_of_its_flags():
    with registered(lion_source().replace("defaults=", "fallback_rule='adamw', defaults=")):
        groups = make_optimizer(tiny(), settings(optimizer="lion")).param_groups
        found = {(g["eps"], g["cautious"]) for g in groups if g["rule"] == "adamw"}
        assert found == {(1e-8, False)}


def test_lion_clips_and_skips(lion):
    """Gradients are divided by grad_scale; where one is not finite, parameters, state and the count
    of steps keep their bits, in the first step and later."""
    grads = [{n: g.float() for n, g in step.items()} for step in gradients(tiny(), 3)]
    smaller = [{n: g / 1.7 for n, g in step.items()} for step in grads]
    model, optimizer = driven(dict(optimizer="lion"), grads[:0])
    scale = torch.tensor(1.7)
    for step in grads:
        for kind in ("nan", "inf", "one", "other"):
            before = everything(model, optimizer)
            drive(model, optimizer, [spoil(step, kind)], torch.tensor(1.0), torch.tensor(1.0))
            assert everything(model, optimizer) == before, kind
        drive(model, optimizer, [step], torch.tensor(0.0), scale)
    assert everything(model, optimizer) != before
    other = driven(dict(optimizer="lion"), [])
    for step in smaller:
        drive(*other, [step])
    assert everything(model, optimizer) == everything(*other)
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}


def test_lions_state_is_counted_and_kept(lion):
    """It is part of the optimizer's state, which loads into another; a step that is not finite
    changes nothing."""
    grads = gradients(tiny(), 4)
    model, optimizer = driven(dict(optimizer="lion"), grads[:2])
    other = driven(dict(optimizer="lion"), [])
    other[0].load_state_dict(model.state_dict())
    load_optimizer(other[1], optimizer.state_dict(), step=2)
    drive(
        model,
        optimizer,
        [grads[2] | {"wte.weight": torch.full((64, 16), torch.nan)}],
        torch.ones(()),
    )
    for pair in ((model, optimizer), other):
        drive(*pair, grads[2:])
    assert everything(model, optimizer) == everything(*other)
    tensors_of = len(list(model.parameters()))  # each with a count of its steps
    n_bytes = 4 * model.num_params() + 4 * tensors_of
    assert state_bytes(model, settings(optimizer="lion")) == n_bytes


def test_lions_settings(lion):
    """Its own defaults; flags that it does not understand are refused; groups, ratios and notes as
    for ours."""
    config = filled(optimizer="lion")
    assert (config.learning_rate, config.weight_decay, config.min_lr) == (1e-4, 1.0, 1e-5)
    with pytest.raises(
        ValueError,
        match="momentum=0.9 has no effect on lion: leave it out, or choose msgdw or muon",
    ):
        filled(optimizer="lion", momentum=0.9)
    model = tiny()
    config = settings(optimizer="lion", blockwise_lr=True, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    assert {group["rule"] for group in optimizer.param_groups} == {"lion"}
    ratios = {g["label"]: g["lr_ratio"] for g in optimizer.param_groups if g["role"] in DECAYED}
    assert ratios == dict(emb=10, pos=1, head=1, qk=8, vo=4, ffn=6)
    (note,) = notes(config, model)
    assert note.startswith(
        "blockwise_lr: the paper has ratios for adamw and adam_mini; those for lion are our"
    )


def test_a_name_registers_once(lion):
    with pytest.raises(ValueError, match="two optimizers register as 'lion'"):
        register("lion", *RULES["lion"][:3], defaults=dict(learning_rate=1.0, weight_decay=0.0))


@pytest.mark.parametrize("flag", ["beta2", "no_such_flag"])
def test_defaults_that_could_not_act_are_refused(flag):
    """Nor do they harm the other optimizers: nothing is registered."""
    defaults = {"learning_rate": 1.0, "weight_decay": 0.0, flag: 0.99}
    with pytest.raises(ValueError, match=f"signum cannot have a default for {flag}: "):
        register("signum", *RULES["adamw"][:3], defaults=defaults)
    assert "signum" not in OPTIMIZERS and "signum" not in RULES
