"""Learning rates in the loop: schedules extended on resume, and the rates of every role, against
numbers by hand."""

import math

import pytest

import train
from nanodnt.optim import lr_at
from nanodnt.settings import TrainConfig
from support.runs import call, column, flags, load, metrics, run

pytestmark = pytest.mark.usefixtures("quick")


def cosine(q):
    return 0.5 * (1 + math.cos(math.pi * q))


# {name: (flags of steps 1 to 20, flags of steps 21 to 30, learning rates by hand)}. Peak 0.01 at
# step 5, min_lr 0.001.
EXTENDED = {
    "cosine": (
        {},
        {},
        {10: 1e-3 + 9e-3 * cosine(1 / 3), 20: 1e-3, 21: 1e-3 + 9e-3 * cosine(16 / 25), 30: 1e-3},
    ),
    "wsd": (
        dict(schedule="wsd"),
        {},
        {16: 1e-2, 18: 5.5e-3, 20: 1e-3, 21: 1e-2, 24: 1e-2, 27: 5.5e-3, 30: 1e-3},
    ),
    "constant, then wsd": (
        dict(schedule="constant"),
        dict(schedule="wsd"),
        {6: 1e-2, 24: 1e-2, 27: 5.5e-3, 30: 1e-3},
    ),
}


@pytest.mark.parametrize("name", EXTENDED)
def test_a_schedule_extended_on_resume(name, dataset, tmp_path, capsys):
    """From there on it is the longer schedule, exactly."""
    first, then, rates = EXTENDED[name]
    config = dict(out_dir=tmp_path, dataset=dataset, **first)
    assert run(**config, max_iters=20) == 0
    capsys.readouterr()
    assert run(**config | then, max_iters=30, init_from="resume") == 0
    printed = capsys.readouterr().out
    assert "lr_decay_iters 20 → 30" in printed
    assert ("wsd_decay_iters 4 → 6" in printed) == (name == "wsd")
    found = column(tmp_path, "lr")
    assert {step: found[step] for step in rates} == pytest.approx(rates, rel=1e-12)
    for role in ("emb", "pos", "qk", "vo", "ffn", "gain_in", "gain_out"):
        assert column(tmp_path, f"lr_{role}") == found
    settings = TrainConfig(**load(tmp_path / "last.pt")["train_config"])
    assert all(found[step] == lr_at(step - 1, settings) for step in range(21, 31))


# Learning rates by hand at steps 1, 5 (end of warm-up), 10 (half of the cosine), 15 (end)
BY_ROLE = {
    "emb": (4e-4, 2e-3, 1.1e-2, 2e-3),
    "qk bias_qk": (4e-4, 2e-3, 8.8e-3, 1.6e-3),
    "ffn bias_ffn": (4e-4, 2e-3, 6.6e-3, 1.2e-3),
    "vo bias_vo": (4e-4, 2e-3, 4.4e-3, 8e-4),
    "head": (4e-4, 2e-3, 5.5e-3, 1e-3),
    "pos gain_in gain_out bias": (4e-4, 2e-3, 1.1e-3, 2e-4),
}


def test_learning_rates_by_role(dataset, tmp_path):
    """From the end of warm-up, to proportional floors: metrics.jsonl has one of each role, and that
    of learning_rate with a ratio of 1."""
    flags = dict(
        blockwise_lr=True, learning_rate=2e-3, tie_weights=False, bias=True, norm="layernorm"
    )
    flags |= dict(blockwise_start="warmup_end", blockwise_min_lr="proportional", lr_ratio_head=5)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=15, **flags) == 0
    rows = metrics(tmp_path)
    expected = {f"lr_{role}": rates for roles, rates in BY_ROLE.items() for role in roles.split()}
    assert {key for key in rows[5] if key.startswith("lr_")} == expected.keys()
    for key, rates in (expected | {"lr": (4e-4, 2e-3, 1.1e-3, 2e-4)}).items():
        assert [rows[step][key] for step in (1, 5, 10, 15)] == pytest.approx(
            rates, rel=1e-12, abs=1e-18
        ), key


@pytest.mark.parametrize("given", [False, True])
def test_an_optimizer_with_the_learning_rate_of_a_file(given, dataset, tmp_path, capsys):
    (file := tmp_path / "mine.py").write_text("learning_rate = 0.02\n")
    argv = flags(out_dir=tmp_path / "out", dataset=dataset, max_iters=0, optimizer="msgdw")
    assert (
        call(train.main, file, *(flag for flag in argv if given or "learning_rate" not in flag))
        == 0
    )
    note = f"learning_rate=0.02 is from {file}:1; does it suit this optimizer?"
    assert (note in capsys.readouterr().out) != given
