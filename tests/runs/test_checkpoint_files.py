"""Checkpoints of a run: what they hold, writes that fail, files that are damaged or foreign."""

import errno
import math
import os
import resource
import signal
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import nanodnt.files
import train
from model import GPT, GPTConfig
from support.depth import spread
from support.hostile import refusal
from support.runs import assert_same_run, contents, damage, load, resume, run
from support.strikes import ALWAYS, Crash, at_call, at_row, crash, kill_me

pytestmark = pytest.mark.usefixtures("quick")

# ------------------------------------------------------------------------------------------------ what they hold


def test_what_a_checkpoint_holds(short):
    checkpoint = load(short / "last.pt")  # with weights_only: nothing but tensors and plain values
    names = "model optimizer scaler step tokens best_val_loss model_config train_config meta skipped wandb_id"
    assert set(names.split()) <= checkpoint.keys()
    assert checkpoint["model_config"]["n_layer"] == 2 and checkpoint["train_config"]["max_iters"] == 30
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    assert list(checkpoint["model"]) == [name for name, _ in model.named_parameters()]
    assert not list(short.glob("*.tmp")) and not (short / "new.pt").exists()


BEST = {  # validation losses at steps 0, 10 … 40: the step of best.pt
    (5, 3, 1, 2, 4): 20,
    (5, 4, 3, 2, 1): 40,
    (1, 2, 3, 4, math.nan): 0,
}


@pytest.mark.parametrize("losses", spread(BEST, list(BEST)[1:]))
def test_best_prev_and_last(losses, dataset, tmp_path, monkeypatch):
    script = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *_: dict(val_loss=float(next(script))))
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=40)
    with at_row(25, lambda: kill_me(signal.SIGTERM)):  # the best so far is remembered
        assert run(**config) == 143
    assert run(**config, init_from="resume") == 0
    steps = {path.name: load(path)["step"] for path in tmp_path.glob("*.pt")}
    assert steps == {"last.pt": 40, "prev.pt": 30, "best.pt": BEST[losses]}
    assert {load(tmp_path / name)["best_val_loss"] for name in ("best.pt", "last.pt")} == {min(losses)}


# ------------------------------------------------------------------------------------------------ writes that fail


@contextmanager
def failing(module, function, error, target="", times=ALWAYS):
    """A function that raises instead of writing, where its last argument is a path of this name."""

    failed = []

    def fail(*args):
        failed.append(args)
        if hasattr(args[-1], "write"):
            args[-1].write(b"half of it")
        raise type(error)(*error.args)

    def when(*args):
        return not target or Path(args[-1]).name == target

    with at_call(module, function, 1, fail, when, times):
        yield
    assert failed


@contextmanager
def files_that_may_not_grow():
    """The real thing: the system refuses the bytes after the first 100,000."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


NO_SPACE, IO_ERROR = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
OWN_WORDS = RuntimeError("unexpected pos 64 vs 0")
FAILURES = {  # what fails: (a context manager, words of the message)
    "torch.save": (partial(failing, torch, "save", NO_SPACE), "No space left"),
    "torch.save, in its own words": (partial(failing, torch, "save", OWN_WORDS), "unexpected pos 64"),
    "fsync": (partial(failing, os, "fsync", IO_ERROR), "Input/output error"),
    "rename to new.pt": (partial(failing, os, "replace", IO_ERROR, "new.pt"), "Input/output error"),
    "rename to prev.pt": (partial(failing, os, "replace", IO_ERROR, "prev.pt"), "Input/output error"),
    "rename to last.pt": (partial(failing, os, "replace", IO_ERROR, "last.pt"), "Input/output error"),
    "a file that may not grow": (files_that_may_not_grow, "cannot write"),
}
FOR_GOOD = ["torch.save, in its own words", "fsync", "rename to last.pt", "a file that may not grow"]


@pytest.fixture
def no_pause(monkeypatch):
    """Before a write is tried again."""
    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("name", spread(FAILURES, FOR_GOOD))
def test_a_write_that_fails_for_good(name, begun, short, dataset, no_pause, capsys):
    failure, words = FAILURES[name]
    before = contents(begun, "*.pt")
    with ExitStack() as stack, at_row(25, lambda: stack.enter_context(failure())):
        code = resume(begun, dataset)
    refusal(capsys, code, words)
    after = {path: content for path, content in contents(begun, "*.pt").items() if path in before}
    if name == "rename to last.pt":  # then the other files are replaced already
        assert after["last.pt"] == before["last.pt"]
    else:
        assert after == before
    assert [load(begun / name)["step"] for name in after]  # all of them can be read
    assert resume(begun, dataset) == 0  # once there is room
    assert_same_run(begun, short)


@pytest.mark.parametrize("name", spread([*FAILURES][:-1], ["torch.save", "rename to prev.pt"]))
def test_a_write_that_fails_once(name, begun, short, dataset, no_pause):
    with ExitStack() as stack, at_row(25, lambda: stack.enter_context(FAILURES[name][0](times=1))):
        assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


def test_a_file_system_without_hard_links(short, dataset, tmp_path):
    with failing(os, "link", OSError(errno.EPERM, "Operation not permitted")):
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=30) == 0
    assert_same_run(tmp_path, short)
    for name in ("best.pt", "prev.pt"):
        assert load(tmp_path / name)["step"] == load(short / name)["step"]


# ------------------------------------------------------------------------------------------- damaged and foreign files


def test_damaged_last_falls_back_to_prev(begun, short, dataset, capsys):
    path = begun / "last.pt"
    damage(path, path.read_bytes()[: path.stat().st_size // 2])
    assert resume(begun, dataset) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert f"{path} cannot be read" in warnings[0] and f"going on from {begun / 'prev.pt'}, step 10" in warnings[0]
    assert_same_run(begun, short)


def test_a_damaged_last_never_becomes_prev(begun, dataset):
    damage(begun / "last.pt")
    assert resume(begun, dataset, max_iters=20, lr_decay_iters=30) == 0
    assert [load(begun / name)["step"] for name in ("prev.pt", "last.pt")] == [10, 20]


def test_a_crash_after_falling_back_loses_nothing(begun, short, dataset):
    damage(begun / "last.pt")
    with at_call(os, "replace", 1, crash, lambda a, b: Path(b).name == "last.pt"), pytest.raises(Crash):
        resume(begun, dataset)
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)
