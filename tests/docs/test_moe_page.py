"""docs/moe.md says what the code does: its flags build or are refused."""

import inspect
from dataclasses import fields

import pytest

from layers import rules
from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.optim.groups import check_penalties
from nanodnt.settings import TrainConfig
from support.models import rule_lines
from support.pages import FLAGS, ROOT, load, rows_with

PAGE = (ROOT / "docs" / "moe.md").read_text()
REFUSED = [text for row in rows_with(PAGE, "refused flags") for text in FLAGS.findall(row["refused flags"])]
METHODS = [row["flags"].strip("`") for row in rows_with(PAGE, "as in")]
BALANCE = ("balance_coef", "balance_rate", "z_coef", "lr_ratio_router")


def start(text):
    """What a run does with flags `a=b c=d` before its first step."""
    model, config = load(*(f"--{flag}" for flag in text.split()))
    model.vocab_size, model.n_layer = 64, 1
    config.check()
    fill_defaults(config)
    make_optimizer(GPT.empty(model), config)
    return model


def test_flags_as_in_papers_build_and_print_no_notes():
    assert len(METHODS) >= 6
    for text in METHODS:
        assert rules.notes(start(text)) == []


def test_one_active_expert_whose_weight_is_always_1_is_noted():
    notes = {text: rules.notes(start(f"n_expert=4 n_expert_active=1 {text}")) for text in ("", "router_norm=False")}
    assert "router_norm=False" in notes[""][0] and notes["router_norm=False"] == []
    assert rules.notes(start("n_expert=1 n_expert_active=1")) == []


def test_every_flag_is_on_the_page_with_its_default():
    names = [f.name for f in fields(GPTConfig)]
    names = ["n_ff", *names[names.index("n_expert") : names.index("patch_size")], *BALANCE]
    defaults = {f.name: f.default for schema in (GPTConfig, TrainConfig) for f in fields(schema)}
    rows = {row["flag"]: row["default"] for row in rows_with(PAGE, "default")}
    assert rows == {f"`{name}`": f"`{defaults[name]}`" for name in names}


def test_refused_flags_are_refused_and_every_refusal_is_in_the_table():
    reached = set()
    for text in REFUSED:
        with pytest.raises(ValueError) as caught:
            start(text)
        assert len(str(caught.value).splitlines()) == 1
        reached |= {entry.lineno + 1 for entry in caught.traceback if entry.frame.code.name == "check_penalties"}
    lines, first = inspect.getsourcelines(check_penalties)
    raises = {number for number, line in enumerate(lines, first) if "raise ValueError" in line}
    assert raises and raises <= reached
    missing = rule_lines(rules.experts).keys() - {line for text in REFUSED for line in refusing_lines(text)}
    assert missing == set(), "no row of the table is refused by these lines of layers/rules.py"


def refusing_lines(text):
    """(function, line number) of every rule on experts that refuses flags `a=b c=d`."""
    found = rules.experts(load(*(f"--{flag}" for flag in text.split()))[0])
    return [("experts", found.gi_frame.f_lineno) for wrong, _ in found if wrong]
