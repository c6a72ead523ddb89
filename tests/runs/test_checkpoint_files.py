"""Checkpoints of a run: what they hold, writes that fail, files that are damaged or foreign."""

import errno
import math
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import nanodnt.files
import train
from model import GPT, GPTConfig
from support.depth import spread
from support.hostile import refusal
from support.runs import (
    Crash,
    assert_same_run,
    at_row,
    checkpoints,
    column,
    contents,
    crash,
    damage,
    evaluated,
    kill_me,
    load,
    resume,
    run,
)

pytestmark = pytest.mark.usefixtures("quick")

# ------------------------------------------------------------------------------------------------ what they hold

PLAIN = (torch.Tensor, dict, list, tuple, str, int, float, bool, type(None))


def plain(value):
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return isinstance(value, PLAIN) and all(plain(key) and plain(part) for key, part in parts)


def test_what_a_checkpoint_holds(short):
    checkpoint = load(short / "last.pt")  # weights_only
    assert plain(checkpoint)
    assert not plain({"a": [np.float64(1.0).reshape(1)]})
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
    assert load(tmp_path / "last.pt")["best_val_loss"] == min(losses)


def test_best_is_the_model_of_its_loss(short, dataset, tmp_path, capsys):
    best = load(short / "best.pt")["step"]
    assert best == min(column(short, "val_loss").items(), key=lambda item: item[1])[0]
    assert run(out_dir=tmp_path / "none", dataset=dataset, init_from=short / "best.pt", eval_only=True) == 0
    assert evaluated(capsys) == pytest.approx(column(short, "val_loss")[best], abs=6e-7)
    assert load(short / "best.pt")["best_val_loss"] == column(short, "val_loss")[best]


# ------------------------------------------------------------------------------------------------ writes that fail


def fail(error, original, when, times=10**6):
    """A function that raises in the first `times` calls for which `when` is true; otherwise it is the original."""
    calls = []

    def call(*args, **kwargs):
        if when(*args, **kwargs):
            calls.append(args)
            if len(calls) <= times:
                if args and hasattr(args[-1], "write"):
                    args[-1].write(b"half of it")
                raise type(error)(*error.args)
        return original(*args, **kwargs)

    return call


NO_SPACE, IO_ERROR = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
FAILURES = {  # what fails: (module, function, error, in which calls)
    "torch.save": (torch, "save", NO_SPACE, lambda *a, **k: True),
    "torch.save, in its own words": (torch, "save", RuntimeError("unexpected pos 64 vs 0"), lambda *a, **k: True),
    "fsync": (os, "fsync", IO_ERROR, lambda *a: True),
    "rename to new.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "new.pt"),
    "rename to prev.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "prev.pt"),
    "rename to last.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "last.pt"),
}


@pytest.mark.parametrize("name", spread(FAILURES, ["torch.save, in its own words", "fsync", "rename to last.pt"]))
def test_a_write_that_fails_for_good(name, begun, short, dataset, monkeypatch, capsys):
    module, function, error, when = FAILURES[name]
    failing = fail(error, getattr(module, function), when)
    before, patch = checkpoints(begun), pytest.MonkeyPatch()
    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: patch.setattr(module, function, failing)):
        try:
            code = resume(begun, dataset)
        finally:
            patch.undo()
    refusal(capsys, code, error.args[-1])
    after = {path: digest for path, digest in checkpoints(begun).items() if path in before}
    if name == "rename to last.pt":  # then the other files are replaced already
        assert after["last.pt"] == before["last.pt"]
    else:
        assert after == before
    assert [load(begun / name)["step"] for name in after]  # all of them can be read
    assert resume(begun, dataset) == 0  # once there is room
    assert_same_run(begun, short)


@pytest.mark.parametrize("name", spread(FAILURES, ["torch.save", "rename to prev.pt"]))
def test_a_write_that_fails_once(name, begun, short, dataset, monkeypatch):
    module, function, error, when = FAILURES[name]
    failing = fail(error, getattr(module, function), when, times=1)
    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: monkeypatch.setattr(module, function, failing)):
        assert resume(begun, dataset) == 0
    assert getattr(module, function) is failing
    monkeypatch.undo()
    assert_same_run(begun, short)


def test_a_file_that_may_not_grow(begun, short, dataset, monkeypatch, capsys):
    """The real thing: the system refuses the bytes after the first 100,000."""
    before, limits = checkpoints(begun), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))):
        try:
            code = resume(begun, dataset)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refusal(capsys, code, "cannot write")
    assert checkpoints(begun) == before
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


def test_a_file_system_without_hard_links(short, dataset, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
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
    replace = os.replace
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "replace", lambda a, b: replace(a, b) if Path(b).name != "last.pt" else crash())
        resume(begun, dataset)
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


def test_nothing_left_to_resume_from(begun, dataset, tmp_path, capsys):
    for name in ("last.pt", "prev.pt"):
        damage(begun / name)
    before = contents(begun)
    for source in ("resume", "auto"):
        refusal(capsys, resume(begun, dataset, init_from=source), begun / "last.pt", begun / "prev.pt", "damaged")
    refusal(capsys, resume(tmp_path / "empty", dataset), "nothing to resume", tmp_path / "empty", "--init_from=scratch")
    assert contents(begun) == before and not (tmp_path / "empty").exists()


def test_the_prefix_of_a_compiled_model_is_tolerated(begun, short, dataset):
    checkpoint = load(begun / "last.pt")
    checkpoint["model"] = {f"_orig_mod.{name}": p for name, p in checkpoint["model"].items()}
    (begun / "last.pt").unlink()
    torch.save(checkpoint, begun / "last.pt")
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)
