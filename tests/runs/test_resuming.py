"""Interrupted runs go on exactly: stopped, killed or crashed anywhere, they end with the bits of a
run that was not."""

import os
import random
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

import train
from model import GPT
from nanodnt.run import checkpoints as saving
from nanodnt.run.directory import RunDirectory
from support.runs import assert_same_run, column, contents, different, load, logged, run
from support.strikes import Crash, at_call, at_row, crash, kill_me

pytestmark = pytest.mark.usefixtures("quick")

# -------------------------------------------------------------------------------- kills and signals

CONFIG = dict(max_iters=45, eval_interval=15, save_interval=7, dropout=0.2, micro_batch_size=4)


@pytest.fixture(scope="module")
def undisturbed(dataset, quick, tmp_path_factory):
    """A run without interruption, that learns."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert run(out_dir=out, dataset=dataset, **CONFIG) == 0
    losses = column(out, "train_loss")
    assert list(losses) == list(range(1, 46)) and losses[45] < losses[1] - 1
    return out


def test_a_run_stopped_twice_goes_on_exactly(undisturbed, dataset, tmp_path, capsys):
    config = dict(CONFIG, dataset=dataset, out_dir=tmp_path / "run", init_from="auto")
    first, second = sorted(random.sample(range(2, 44), 2))
    print(f"drawn: steps {first} and {second}")
    with at_row(first, lambda: kill_me(signal.SIGTERM)):
        assert run(**config) == 128 + signal.SIGTERM  # auto starts where there is nothing to resume
    assert load(tmp_path / "run" / "last.pt")["step"] == first
    assert "SIGTERM" in capsys.readouterr().out
    with at_row(second, lambda: kill_me(signal.SIGINT)):
        assert run(**config) == 128 + signal.SIGINT
    assert load(tmp_path / "run" / "last.pt")["step"] == second
    assert run(**config) == 0
    assert_same_run(tmp_path / "run", undisturbed)
    before = contents(tmp_path / "run", "*.pt")
    assert run(**config) == 0  # a finished run has nothing left to do
    assert logged(tmp_path / "run") == logged(undisturbed)
    assert contents(tmp_path / "run", "*.pt") == before


# -------------------------------------------------------------------------------------- bad moments


def stop(*_):
    kill_me(signal.SIGTERM)


@contextmanager
def half_a_row():
    """A crash when half of a row is on disk."""

    def write_half(directory, row):
        with open(directory.metrics, "a", encoding="utf-8") as file:
            file.write('{"step": 17, "tok')
        crash()

    with at_call(RunDirectory, "write", 18, write_half):
        yield


INTERRUPTIONS = {  # of a run of 30 steps that is evaluated and saved every 10
    "SIGTERM in the evaluation of step 10": lambda: at_call(train, "evaluate", 2, stop),
    "SIGTERM in a training step": lambda: at_call(
        GPT, "forward", 14, stop, lambda model, *_: model.training
    ),
    "a crash while the only checkpoint is of step 0": lambda: at_call(
        RunDirectory, "write", 6, crash
    ),
    "a crash between an evaluated step's row and its checkpoint": lambda: at_call(
        saving, "save_checkpoint", 3, crash
    ),
    "a crash when prev.pt is replaced and last.pt not yet": lambda: at_call(
        os, "replace", 3, crash, lambda source, target: Path(target).name == "last.pt"
    ),
    "a crash in a row": half_a_row,
}


@pytest.mark.parametrize("moment", INTERRUPTIONS)
def test_interrupted_at_a_bad_moment(moment, short, dataset, tmp_path):
    with INTERRUPTIONS[moment](), pytest.raises(Crash) if "crash" in moment else nullcontext():
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=30) == 128 + signal.SIGTERM
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=30, init_from="resume") == 0
    assert_same_run(tmp_path, short)
    assert load(tmp_path / "best.pt")["step"] == load(short / "best.pt")["step"]


def test_interrupted_in_the_last_evaluation(first_20, dataset, tmp_path):
    """The resumed run evaluates and saves without another step. Learning rates are still those of
    the last step."""
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=20, lr_decay_iters=30)
    with at_call(train, "evaluate", 3, stop):
        assert run(**config) == 128 + signal.SIGTERM
    assert run(**config, init_from="resume") == 0
    assert_same_run(tmp_path, first_20)


def test_a_kill_in_the_first_save(dataset, tmp_path):
    """All that exists is the new file, which is not yet last.pt."""
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=4) == 0
    expected = load(tmp_path / "last.pt")["model"]
    assert (
        run(out_dir=tmp_path, dataset=dataset, max_iters=2, lr_decay_iters=4, overwrite=True) == 0
    )
    os.replace(tmp_path / "last.pt", tmp_path / "new.pt")
    (tmp_path / "prev.pt").unlink()
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=4, init_from="auto") == 0
    assert different(load(tmp_path / "last.pt")["model"], expected) == []


# ------------------------------------------------------------------------------------------- Ctrl-C


def test_a_second_ctrl_c_ends_the_run_at_once(dataset, tmp_path, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with at_row(7, lambda: kill_me(signal.SIGINT, signal.SIGINT)):
        assert run(out_dir=tmp_path, dataset=dataset) == 130
    assert load(tmp_path / "last.pt")["step"] == 0
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is handler  # restored


def test_ctrl_c_saves_although_stdout_is_closed(dataset, tmp_path, monkeypatch):
    """Ctrl-C in `python train.py | tee log` also ends tee."""
    end, other_end = os.pipe()
    with open(other_end, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with at_row(9, lambda: (os.close(end), kill_me(signal.SIGINT))):
            assert run(out_dir=tmp_path, dataset=dataset) == 130
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            stdout.close()
    assert load(tmp_path / "last.pt")["step"] == 9
