"""Runs whose optimizer is a class of others: killed and resumed to the same bits, refused in one
line."""

import signal

import pytest
import torch

from support.runs import assert_same_run, column, load, run
from support.strikes import Crash, at_row, crash, kill_me

pytestmark = pytest.mark.usefixtures("quick")
NADAM = dict(optimizer="torch.optim:NAdam", optimizer_args="betas=(0.9,0.95)")
NESTED = dict(optimizer="support.foreign:Nested", optimizer_args="mu=0.8", learning_rate=0.05)


@pytest.mark.parametrize("flags", [NADAM, NESTED], ids=lambda flags: flags["optimizer"])
def test_an_interrupted_run_ends_with_the_same_bits(flags, dataset, tmp_path, capsys):
    """A signal saves at once; a crash goes back to the last checkpoint. Blockwise rates make more
    groups."""
    config = flags | dict(dataset=dataset, max_iters=24, eval_interval=8, save_interval=4)
    config |= dict(blockwise_lr=True, min_lr=0.0, dropout=0.1, weight_decay=0.01)
    assert run(**config, out_dir=tmp_path / "whole") == 0
    losses = column(tmp_path / "whole", "train_loss")
    assert losses[24] < losses[1] - 0.3
    config |= dict(out_dir=tmp_path / "cut", init_from="auto")
    with at_row(7, lambda: kill_me(signal.SIGTERM)):
        assert run(**config) == 128 + signal.SIGTERM
    with at_row(18, crash), pytest.raises(Crash):
        run(**config)
    assert load(tmp_path / "cut" / "last.pt")["step"] == 16
    capsys.readouterr()
    assert run(**config) == 0
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert "step 16" in capsys.readouterr().out


def test_the_settings_are_in_the_run_and_changes_are_printed(dataset, tmp_path, capsys):
    config = dict(dataset=dataset, out_dir=tmp_path, max_iters=4, eval_interval=2)
    assert run(**config, **NADAM) == 0
    out = capsys.readouterr().out
    assert "torch.optim:NAdam" in out
    saved = load(tmp_path / "last.pt")
    assert saved["train_config"]["optimizer_args"] == "betas=(0.9,0.95)"
    assert saved["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    state = saved["optimizer"]["state"][0]
    assert state["step"] == 4 and state["mu_product"].dtype == torch.float32
    config |= dict(init_from="resume", max_iters=5)
    other = NADAM | dict(optimizer_args="betas=(0.8,0.95)")
    assert run(**config, **other) == 0
    assert "optimizer_args betas=(0.9,0.95) → betas=(0.8,0.95)" in capsys.readouterr().out
    assert run(**config | dict(max_iters=6)) == 0  # with adamw
    assert "optimizer torch.optim:NAdam → adamw: its state starts fresh" in capsys.readouterr().out
    assert run(**config | dict(max_iters=7), **NESTED) == 0


def test_mistakes_end_the_start(dataset, tmp_path, capsys):
    for flags, words in (
        (dict(optimizer="lionn"), "optimizer='lionn' is unknown: allowed are adamw, "),
        (dict(optimizer="torch.optim:LBFGS"), "refuses its settings: ValueError: LBFGS"),
    ):
        assert run(**flags, dataset=dataset, out_dir=tmp_path) == 1
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1


def test_an_error_of_its_step_ends_the_run_in_one_line(dataset, tmp_path, capsys):
    flags = dict(dataset=dataset, out_dir=tmp_path, learning_rate=0.05)
    assert run(**flags, optimizer="support.foreign:Fails") == 1
    error = capsys.readouterr().err
    assert "optimizer=support.foreign:Fails failed in its step" in error
    assert len(error.splitlines()) == 1
    assert load(tmp_path / "last.pt")["step"] == 0
