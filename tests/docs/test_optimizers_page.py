"""docs/optimizers.md says what the code does: flags are accepted or refused, recipes are the config files'."""

import inspect
import re
from dataclasses import fields

import pytest
import torch

from configurator import read_file, read_knobs
from layers.roles import ROLES
from model import GPT
from nanodnt.optim import OPTIMIZERS, RULES, defaults, fill_defaults, groups, make_optimizer
from nanodnt.settings import TrainConfig
from support.pages import CONFIGS, FLAGS, ROOT, load, rows_with

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
REFUSED = [text for row in rows_with(PAGE, "refused flags") for text in FLAGS.findall(row["refused flags"])]
ACCEPTED = sorted(set(FLAGS.findall(PAGE)) - set(REFUSED))
RECIPES = rows_with(PAGE, "`train.py` with")


def start(text):
    """What a run does with flags `a=b c=d` before its first step."""
    model, config = load(*(f"--{flag}" for flag in text.split()))
    model.vocab_size = 64
    config.check()
    fill_defaults(config)
    with torch.device("meta"):
        return make_optimizer(GPT(model), config)


def test_the_tables_are_found():
    assert len(REFUSED) > 15 and len(ACCEPTED) > 10 and len(RECIPES) > 20


def test_flags_on_the_page_are_accepted():
    for text in ACCEPTED:
        start(text)


def test_refused_flags_are_refused_and_every_refusal_is_in_the_table():
    reached = set()
    for text in REFUSED:
        with pytest.raises(ValueError) as caught:
            start(text)
        assert len(str(caught.value).splitlines()) == 1
        reached |= {(entry.frame.code.name, entry.lineno + 1) for entry in caught.traceback}
    checks = [function for _, function in inspect.getmembers(defaults, inspect.isfunction)]
    checks += [entry.check for entry in OPTIMIZERS.values()] + [groups.decayed_roles]
    raised = 0
    for check in checks:
        lines, first = inspect.getsourcelines(check)
        raises = {number for number, line in enumerate(lines, first) if "raise ValueError" in line}
        missing = {number for number in raises if (check.__name__, number) not in reached}
        assert missing == set(), f"{check.__name__}: a refusal without a row, lines {missing}"
        raised += len(raises)
    assert raised >= 14


def test_every_flag_of_optimizers_and_schedules_is_on_the_page():
    names = [f.name for f in fields(TrainConfig)]
    names = names[names.index("optimizer") : names.index("eval_interval")]
    assert names[-1] == "blockwise_decay"
    assert [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)] == []
    for name, knob in read_knobs(TrainConfig).items():
        if name in ("optimizer", "schedule", "muon_adjust_lr", "wsd_decay", "decay_gains", "blockwise_start"):
            choices = re.findall(r"'(\w+)'", str(knob.hint))
            assert len(choices) >= 2
            assert [c for c in choices if not re.search(rf"`(\w+=)?{c}`|={c}\b", PAGE)] == [], name


def test_every_optimizer_has_a_row_with_its_defaults():
    rows = {row["`optimizer`"]: row for row in rows_with(PAGE, "defaults: LR, decay")}
    assert set(rows) == {f"`{name}`" for name in OPTIMIZERS}
    assert RULES.keys() - OPTIMIZERS.keys() == {"balance"}  # a role's own rule, under every optimizer
    for name, entry in OPTIMIZERS.items():
        if not entry.defaults_for(TrainConfig(optimizer=name)):
            cell = rows[f"`{name}`"]["defaults: LR, decay"].partition(";")[0].rpartition(":")[2]
            assert [float(x) for x in cell.split(",")] == [
                entry.defaults["learning_rate"],
                entry.defaults["weight_decay"],
            ]


def test_every_role_has_a_row():
    rows = [row for row in rows_with(PAGE, "role") if "blockwise ratio" in row]
    assert sorted(role for row in rows for role in re.findall(r"`(\w+)`", row["role"])) == sorted(ROLES)


def test_every_overlay_is_on_the_page():
    files = set(re.findall(r"config/[\w/]+\.py", PAGE))
    assert files <= {str(path) for path in CONFIGS}
    assert {str(path) for path in CONFIGS if path.parent.name in ("optimizers", "decay", "blockwise")} <= files


def number(cell):
    """Of a cell: 200K, or 47,684 [I], or 2e-3."""
    text = cell.removesuffix("[I]").strip().replace(",", "")
    return float(text[:-1]) * 1000 if text.endswith("K") else float(text)


@pytest.mark.parametrize("row", RECIPES, ids=lambda row: f"{row['optimizer']}: {row['run'][:30]}")
def test_recipes_are_the_config_files(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = re.findall(r"`([^`]+)`", row["`train.py` with"])
    names = {"AdamW": "adamw", "Adam": "adamw", "mSGDW": "msgdw", "Muon": "muon", "Adam-mini": "adam_mini"}
    assert files
    for arguments in files:
        _, c = load(*arguments.split())
        fill_defaults(c)
        assert c.optimizer == names[row["optimizer"]], arguments
        values = (c.learning_rate, c.weight_decay, c.warmup_iters, c.min_lr, c.max_iters, c.lr_decay_iters)
        steps = number(row["steps"])
        wanted = (*(number(row[key]) for key in ("peak LR", "decay", "warm-up", "min LR")), steps, steps)
        assert values == pytest.approx(wanted), arguments
        betas = [float(beta) for beta in row["betas or momentum"].removesuffix("[I]").split(",")]
        assert betas == ([c.beta1, c.beta2] if c.momentum is None else [c.momentum]), arguments
        rest = re.search(r"the rest at (\S+)", row["run"])
        assert c.adamw_learning_rate == (float(rest[1]) if rest else c.learning_rate if c.momentum == 0.95 else None)
        assert c.grad_clip == (0.0 if "config/lns" in arguments else 1.0)


def test_blockwise_ratios_are_the_config_files():
    rows = [row for row in rows_with(PAGE, "overlay") if "qk" in row]
    assert len(rows) == 8
    for row in rows:
        name, path = re.fullmatch(r"\[(\w+)\]\(\.\./(config/blockwise/\w+\.py)\)", row["overlay"]).groups()
        keys = read_file(str(ROOT / path))
        assert path.endswith(f"/{name}.py")
        for block in ("emb", "qk", "ffn", "vo", "norm", "head"):
            assert keys[f"lr_ratio_{block}"][0] == float(row[block]), (name, block)
