"""Signals that ask a run to end soon: it saves, once; where nothing can be lost, it ends at
once."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

import train
from nanodnt.run import signals
from nanodnt.run.metrics import draw_loss
from nanodnt.run.signals import NAMES
from support.processes import Forked, call_main, finish
from support.runs import ROOT, contents, flags, load, metrics, run
from support.strikes import at_call, at_row, kill_me

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
def nothing_ignored():
    """Whatever pytest was started to ignore, by nohup for one."""
    before = {number: signal.getsignal(number) for number in map(partial(getattr, signal), NAMES)}
    for number in before:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", NAMES)
def test_each_signal_saves_once(name, dataset, tmp_path, capsys):
    number = signal.Signals[name]
    with at_row(7, lambda: kill_me(number)):
        assert run(out_dir=tmp_path, dataset=dataset) == 128 + number
    assert load(tmp_path / "last.pt")["step"] == 7 == metrics(tmp_path)[-1]["step"]
    assert capsys.readouterr().out.count(f"{name}: saving, then exiting\n") == 1
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_second_signal_of_another_kind_changes_nothing(dataset, tmp_path):
    """SLURM's USR1, then its TERM; a closed terminal, then Ctrl-C."""
    with at_row(7, lambda: kill_me(signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)):
        code = run(out_dir=tmp_path, dataset=dataset)
    assert code in {
        128 + number for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    }
    assert load(tmp_path / "last.pt")["step"] == 7


@pytest.mark.parametrize("name", NAMES)
def test_what_is_ignored_stays_ignored(name, dataset, tmp_path):
    """As by nohup."""
    number = signal.Signals[name]
    signal.signal(number, signal.SIG_IGN)
    with at_row(7, lambda: kill_me(number)):
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=9) == 0
    assert signal.getsignal(number) == signal.SIG_IGN and load(tmp_path / "last.pt")["step"] == 9


# ---------------------------------------------------------------------------------- nothing to lose


def wait_in_torch(number: int) -> None:
    """Be sent a signal while a function of torch waits for another process: no code of Python runs
    meanwhile."""
    threading.Timer(0.2, kill_me, [number]).start()
    torch.distributed.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=True)


def wait_in_python(number: int) -> None:
    kill_me(number)
    time.sleep(60)


MOMENTS = {  # the function in which the signal comes, and how the process waits
    "set-up": ("set_up", wait_in_python),
    "waiting for others": ("describe_run", wait_in_torch),
    "compilation": ("compile_if_worthwhile", wait_in_python),
    "the evaluation before the first step": ("evaluate", wait_in_torch),
}


def train_until(moment: str, number: int, *argv) -> None:
    """train.py, which is sent a signal at that moment."""
    function, wait = MOMENTS[moment]
    with at_call(train, function, 1, lambda *_: wait(number)):
        call_main("train", *argv)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_before_the_first_step_ends_a_run_at_once(moment, dataset, tmp_path):
    name = name_for(moment)
    number, out = signal.Signals[name], tmp_path / "run"
    process = Forked(out, train_until, moment, number, *flags(out_dir=out, dataset=dataset))
    _, err = finish(process, 128 + number)
    assert err == f"{name}: nothing to save, exiting\n"
    assert not (out / "last.pt").exists()
    assert run(out_dir=out, dataset=dataset, max_iters=2, init_from="auto") == 0


def name_for(moment: str) -> str:
    """Another signal for each moment."""
    return NAMES[list(MOMENTS).index(moment)]


def test_a_resumed_run_without_a_step_has_nothing_to_lose(dataset, tmp_path):
    out = tmp_path / "run"
    assert run(out_dir=out, dataset=dataset, max_iters=5) == 0
    before = contents(out)
    argv = flags(out_dir=out, dataset=dataset, init_from="resume")
    _, err = finish(Forked(out, train_until, "compilation", signal.SIGTERM, *argv), 143)
    assert err == "SIGTERM: nothing to save, exiting\n"
    assert contents(out) == before


def test_a_checkpoint_that_was_begun_is_finished(dataset, tmp_path):
    """That of step 0, when the signal comes before the first step."""
    with at_call(train, "save", 1, lambda *_: kill_me(signal.SIGTERM), after=True):
        assert run(out_dir=tmp_path, dataset=dataset) == 143
    assert load(tmp_path / "last.pt")["step"] == 1  # the step was made before it was asked


def test_stopped_before_the_first_row(dataset, tmp_path, monkeypatch, capsys):
    """In the first evaluation, by what ends no process at once, as the death of torchrun. There is
    nothing to draw."""
    monkeypatch.setattr(train, "draw_loss", draw_loss)
    with at_call(
        train, "evaluate", 1, lambda *arguments: setattr(arguments[-1], "signal", signal.SIGTERM)
    ):
        assert run(out_dir=tmp_path, dataset=dataset) == 143
    assert metrics(tmp_path) == [] and load(tmp_path / "last.pt")["step"] == 0
    printed = capsys.readouterr()
    assert (
        "loss.png is not drawn: metrics.jsonl has no rows yet\n" in printed.out
        and printed.err == ""
    )
    monkeypatch.undo()
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=2, init_from="resume") == 0


# ----------------------------------------------------------------------------------------- commands

COMMANDS = ["train", "sample", "bench", "analyze", "reproduce", "sweep"]
COMMANDS += ["export", "evaluate", "chat"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_while_a_command_imports_torch(command, tmp_path):
    """No traceback, and the exit code that shells report. In place of torch there is a file that
    sends it."""
    if not (ROOT / f"{command}.py").exists():
        pytest.skip("this fork has deleted it")
    name = NAMES[COMMANDS.index(command) % 4]
    text = f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(text)
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    call = [sys.executable, ROOT / f"{command}.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        call, env=environment, capture_output=True, text=True, preexec_fn=listen, timeout=60
    )
    assert (done.returncode, done.stdout) == (128 + signal.Signals[name], "")
    assert done.stderr == f"{name}: nothing to save, exiting\n"


def test_importing_a_command_leaves_signals_alone():
    """In a test, a notebook, or a script of the user's, whose `finally` Ctrl-C must reach."""
    assert "train" in sys.modules and signals.IMPORTING == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
