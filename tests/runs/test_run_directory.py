"""The files of a run directory: checksums, what is written when, what is kept, and who may
write."""

import errno
import os
import threading
import time

import pytest
import torch

import nanodnt.files
import train
from nanodnt.run.checkpoints import load_checkpoint, save_checkpoint
from support.processes import train_forked, wait_for_row
from support.runs import assert_same_run, contents, different, load, metrics, run
from support.strikes import ALWAYS, at_call, at_row

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def keeping(dataset, tmp_path_factory):
    """A run of 20 steps that keeps every fifth checkpoint."""
    out = tmp_path_factory.mktemp("keeping")
    assert run(out_dir=out, dataset=dataset, keep_every=5) == 0
    return out


def test_loading_maps_the_file_and_changes_no_byte_of_it(keeping, tmp_path):
    copy = tmp_path / "copy.pt"
    copy.write_bytes((keeping / "last.pt").read_bytes())
    weights = load_checkpoint(copy)["model"]
    weights["wte.weight"].fill_(7.0)  # no code does this
    assert copy.read_bytes() == (keeping / "last.pt").read_bytes()


# ---------------------------------------------------------------------------------- what is on disk


def test_every_nth_checkpoint_is_kept(keeping, dataset, tmp_path):
    assert {path.name for path in keeping.glob("step_*")} == {
        f"step_{n}.pt" for n in (0, 5, 10, 15, 20)
    }
    kept = load(keeping / "step_15.pt")  # not evaluated there
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=15, lr_decay_iters=20) == 0
    assert (
        kept["step"] == 15 and different(kept["model"], load(tmp_path / "last.pt")["model"]) == []
    )


def test_overwriting_removes_what_was_kept_and_nothing_else(dataset, tmp_path):
    config = dict(out_dir=tmp_path, dataset=dataset, keep_every=5)
    assert run(**config, max_iters=10) == 0
    (tmp_path / "kept_by_hand.pt").write_text("mine")
    assert run(**config, overwrite=True, max_iters=4) == 0
    assert {path.name for path in tmp_path.glob("*ep*")} == {"step_0.pt", "kept_by_hand.pt"}


def test_a_folder_is_synced_after_each_rename(keeping, tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def note_replace(a, b):
        done.append(str(b).rpartition("/")[2])
        replace(a, b)

    def note_fsync(handle):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    state = load(keeping / "last.pt")
    save_checkpoint(tmp_path, state, best=False)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_fsync)
    save_checkpoint(tmp_path, state, best=True)
    renames = [
        ["file", "new.pt", "folder"],
        *([name, "folder"] for name in ("prev.pt", "best.pt", "last.pt")),
    ]
    assert done == sum(renames, [])


@pytest.mark.parametrize("code, ends", [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(code, ends, dataset, tmp_path, monkeypatch, capsys):
    """A network disk that cannot do it is no error. A real error is retried once; if it persists,
    it ends the run."""
    failed = []

    def fail(handle):
        failed.append(handle)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)
    for times, expected in ((1, 0), (ALWAYS, int(ends))):
        failed.clear()
        with at_call(
            os, "fsync", 1, fail, lambda handle: os.path.isdir(f"/proc/self/fd/{handle}"), times
        ):
            assert run(out_dir=tmp_path / str(times), dataset=dataset, max_iters=2) == expected
        assert failed
    assert ("cannot write" in capsys.readouterr().err) == ends


def test_a_run_that_another_has_overtaken_is_refused(dataset, tmp_path, capsys):
    """Another run starts and ends while this one builds its model, before it has the lock."""
    config, codes = dict(out_dir=tmp_path, dataset=dataset, init_from="auto"), []
    with at_call(train, "fill_model", 1, lambda *_: codes.append(run(**config))):
        assert run(**config, max_iters=12) == 1
    assert codes == [0]
    assert "another run has written to" in capsys.readouterr().err
    assert load(tmp_path / "last.pt")["step"] == 20


def test_a_run_directory_that_cannot_be_is_refused_before_training(
    dataset, tmp_path, monkeypatch, capsys
):
    """A link to a disk that is not mounted, say. Nothing is made, above all no folder in its
    place."""
    (tmp_path / "dead").symlink_to(tmp_path / "disk" / "run")
    monkeypatch.setattr("nanodnt.start.start_fresh", None)
    monkeypatch.setattr(train, "open_data", None)
    assert run(out_dir=tmp_path / "dead", dataset=dataset) == 1
    why = f"{tmp_path}/dead is no folder to write to"
    assert (
        capsys.readouterr().err
        == f"error: cannot write to {tmp_path}/dead ({why}): choose another --out_dir\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["dead"]


def test_a_folder_source_of_the_users_is_not_replaced(dataset, tmp_path, capsys):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "mine.py").touch()
    assert run(out_dir=tmp_path, dataset=dataset) == 1
    assert "/source is of no run" in capsys.readouterr().err
    assert (tmp_path / "source" / "mine.py").exists() and not (tmp_path / "config.json").exists()


def test_a_run_directory_in_use_is_refused(dataset, tmp_path, capsys):
    """By the same command and by another. After the first was killed, the folder is free."""
    config = dict(out_dir=tmp_path / "run", dataset=dataset)
    first = train_forked(**config, max_iters=100_000, eval_interval=100_000)
    wait_for_row(first, tmp_path / "run", 3)
    while not (tmp_path / "run" / "last.pt").exists():
        time.sleep(0.01)
    before = contents(tmp_path / "run", "*.pt")
    for changes in (dict(init_from="auto"), dict(overwrite=True)):
        assert run(**config, **changes) == 1
        err = capsys.readouterr().err
        assert (
            "is in use by another run (process " in err
            and str(first.pid) in err
            and err.count("\n") == 1
        )
    assert contents(tmp_path / "run", "*.pt") == before
    first.kill()
    first.join()
    assert run(**config, overwrite=True) == 0
    assert run(**config, init_from="resume", max_iters=21) == 0


# ------------------------------------------------------------------------------ beside the training


def test_training_goes_on_during_a_write_and_the_file_holds_the_state_of_its_step(
    dataset, tmp_path
):
    """The first write waits until step 4 is logged; the next save waits for the first."""
    go_on, in_time = threading.Event(), []

    def let_it_write():
        assert not (tmp_path / "slow" / "last.pt").exists()
        go_on.set()

    config = dict(dataset=dataset, max_iters=10, save_interval=5, keep_every=5)
    with (
        at_call(torch, "save", 1, lambda *_: in_time.append(go_on.wait(60))),
        at_row(4, let_it_write),
    ):
        assert run(out_dir=tmp_path / "slow", **config) == 0
    assert in_time == [True]
    assert run(out_dir=tmp_path / "usual", **config) == 0
    assert_same_run(tmp_path / "slow", tmp_path / "usual")
    for n in (0, 5, 10):
        slow, usual = (load(tmp_path / name / f"step_{n}.pt") for name in ("slow", "usual"))
        assert slow["step"] == n and different(slow["model"], usual["model"]) == []
        assert not n or different(slow["optimizer"], usual["optimizer"]) == []


def test_what_a_run_waits_for_is_counted(dataset, tmp_path, monkeypatch):
    """In the row after: half a second of each save, and of the evaluation, are no time of
    training."""
    monkeypatch.setattr(train, "save", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(train, "evaluate_and_record", lambda *_: time.sleep(0.5) or False)
    assert (
        run(
            out_dir=tmp_path,
            dataset=dataset,
            max_iters=12,
            log_interval=2,
            eval_interval=4,
            save_interval=4,
        )
        == 0
    )
    after = {
        row["step"]: (row["evaluating_s"], row["saving_s"], row["goodput"])
        for row in metrics(tmp_path)[1:]
    }
    assert min(after[6][:2]) >= 0.5 > max(after[4][:2]) and after[6][2] < after[4][2]


def test_a_row_is_written_once_though_the_first_attempt_left_a_part(dataset, tmp_path, monkeypatch):
    failed = []

    def open_broken(path, mode="r", **kwargs):
        file = open(path, mode, **kwargs)
        if mode == "ab" and not failed:
            failed.append(path)
            file.write(b'{"step": ')
            file.flush()
            raise OSError(errno.EIO, "Input/output error")
        return file

    monkeypatch.setattr(nanodnt.files.time, "sleep", lambda seconds: None)
    monkeypatch.setattr("nanodnt.run.directory.open", open_broken, raising=False)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=3) == 0
    assert failed and [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]
