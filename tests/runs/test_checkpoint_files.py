"""Checkpoints of a run: what they hold, writes that fail, files that are damaged."""

import errno
import math
import os
import resource
import signal
from pathlib import Path

import pytest

import train
from model import GPT, GPTConfig
from support.depth import spread
from support.hostile import refusal
from support.runs import assert_same_run, contents, damage, load, resume, run
from support.strikes import ALWAYS, Crash, at_call, at_row, crash, kill_me

pytestmark = pytest.mark.usefixtures("quick")


def test_what_a_checkpoint_holds(short):
    checkpoint = load(short / "last.pt")  # with weights_only: nothing but tensors and plain values
    names = "model optimizer scaler step tokens best_val_loss"
    names += " model_config train_config meta skipped wandb_id"
    assert set(names.split()) <= checkpoint.keys()
    assert (
        checkpoint["model_config"]["n_layer"] == 2 and checkpoint["train_config"]["max_iters"] == 30
    )
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
    assert {load(tmp_path / name)["best_val_loss"] for name in ("best.pt", "last.pt")} == {
        min(losses)
    }


def test_a_file_system_without_hard_links(short, dataset, tmp_path):
    def fail(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    with at_call(os, "link", 1, fail, times=ALWAYS):
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=30) == 0
    assert_same_run(tmp_path, short)
    for name in ("best.pt", "prev.pt"):
        assert load(tmp_path / name)["step"] == load(short / name)["step"]


def test_a_file_that_may_not_grow(begun, short, dataset, capsys):
    """The real thing: the system refuses the bytes after the first 100,000. Earlier checkpoints are
    what they were."""
    before, limits = contents(begun, "*.pt"), resource.getrlimit(resource.RLIMIT_FSIZE)
    with at_row(25, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))):
        code = resume(begun, dataset)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refusal(capsys, code, "cannot write")
    assert contents(begun, "*.pt") == before
    assert resume(begun, dataset) == 0  # once there is room
    assert_same_run(begun, short)


# ------------------------------------------------------------------------ damaged and foreign files


def test_damaged_last_falls_back_to_prev(begun, short, dataset, capsys):
    damage(begun / "last.pt")
    assert resume(begun, dataset) == 0
    assert f"going on from {begun / 'prev.pt'}, step 10" in capsys.readouterr().out
    assert_same_run(begun, short)


def test_a_damaged_last_never_becomes_prev(begun, dataset):
    damage(begun / "last.pt")
    assert resume(begun, dataset, max_iters=20, lr_decay_iters=30) == 0
    assert [load(begun / name)["step"] for name in ("prev.pt", "last.pt")] == [10, 20]


def test_a_crash_after_falling_back_loses_nothing(begun, short, dataset):
    damage(begun / "last.pt")
    with (
        at_call(os, "replace", 1, crash, lambda a, b: Path(b).name == "last.pt"),
        pytest.raises(Crash),
    ):
        resume(begun, dataset)
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)
