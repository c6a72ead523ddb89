"""Checkpoints: checksums, those that are kept, writing beside the training; and going back after a loss spike."""

import errno
import threading
import zipfile

import pytest
import torch
from helpers import assert_same_run, different, files, finish, load, logged, metrics, run, start, wait_for_row

import loader
import rundir
import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rundir, "draw_loss", lambda *_: None)


@pytest.fixture(scope="module")
def short(dataset, tmp_path_factory):
    """A run of 20 steps that keeps every fifth checkpoint."""
    out = tmp_path_factory.mktemp("short")
    assert run(out_dir=out, dataset=dataset, keep_every=5) == 0
    return out


# ------------------------------------------------------------------------------------------------------- checksums


def records(path) -> list:
    """(name, where its data begins, its length) of each record in a zip archive that has any."""
    found = []
    with zipfile.ZipFile(path) as archive, open(path, "rb") as f:
        for info in archive.infolist():
            f.seek(info.header_offset + 26)
            lengths = [int.from_bytes(f.read(2), "little") for _ in range(2)]  # of the name, of the extra field
            found.append((info.filename, info.header_offset + 30 + sum(lengths), info.file_size))
    return [record for record in found if record[2]]


def test_one_changed_bit_in_any_record_is_found(short, tmp_path):
    content, copy = (short / "last.pt").read_bytes(), tmp_path / "copy.pt"
    found = records(short / "last.pt")
    assert len(found) > 50
    for i, (name, begin, size) in enumerate(found):
        changed = bytearray(content)
        changed[begin + (size * i // len(found))] ^= 1 << i % 8
        copy.write_bytes(changed)
        with pytest.raises(ValueError, match=f"copy.pt .* damaged or foreign .checksum of {name}"):
            rundir.load_checkpoint(copy)
    copy.write_bytes(content)
    assert different(rundir.load_checkpoint(copy)["model"], load(short / "last.pt")["model"]) == []


def test_loading_maps_the_file_and_changes_no_byte_of_it(short, tmp_path):
    copy = tmp_path / "copy.pt"
    copy.write_bytes((short / "last.pt").read_bytes())
    weights = rundir.load_checkpoint(copy)["model"]
    weights["wte.weight"].fill_(7.0)  # nobody does that, but if somebody did
    assert copy.read_bytes() == (short / "last.pt").read_bytes()


# ------------------------------------------------------------------------------------------------- what is on disk


def test_every_nth_checkpoint_is_kept(short, dataset, tmp_path):
    assert {path.name for path in short.glob("step_*")} == {f"step_{n}.pt" for n in (0, 5, 10, 15, 20)}
    for n in (5, 15):  # not evaluated there
        kept = load(short / f"step_{n}.pt")
        assert kept["step"] == n
        out = tmp_path / str(n)
        assert run(out_dir=out, dataset=dataset, max_iters=n, lr_decay_iters=20) == 0
        assert different(kept["model"], load(out / "last.pt")["model"]) == []
    assert run(out_dir=tmp_path / "on", dataset=dataset, init_from=short / "step_5.pt", max_iters=1) == 0


def test_overwriting_removes_what_was_kept_and_nothing_else(dataset, tmp_path):
    config = dict(out_dir=tmp_path, dataset=dataset)
    assert run(**config, keep_every=5, max_iters=10) == 0
    (tmp_path / "step_one.pt").write_text("mine")
    assert run(**config, overwrite=True, keep_every=4, max_iters=4) == 0
    assert {path.name for path in tmp_path.glob("step_*")} == {"step_0.pt", "step_4.pt", "step_one.pt"}


def test_a_folder_is_synced_after_each_rename(dataset, tmp_path, monkeypatch):
    done, fsync, replace = [], rundir.os.fsync, rundir.os.replace

    def note_replace(a, b):
        done.append(str(b).rpartition("/")[2])
        replace(a, b)

    def note_fsync(handle):
        done.append("folder" if rundir.os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    assert run(out_dir=tmp_path, dataset=dataset, max_iters=1) == 0
    monkeypatch.setattr(rundir.os, "replace", note_replace)
    monkeypatch.setattr(rundir.os, "fsync", note_fsync)
    state = load(tmp_path / "last.pt")
    rundir.save_checkpoint(tmp_path, state, best=True)
    renames = [["file", "new.pt", "folder"], *([name, "folder"] for name in ("prev.pt", "best.pt", "last.pt"))]
    assert done == sum(renames, [])


@pytest.mark.parametrize("names_too", [False, True])
def test_a_save_that_a_kill_cut_short_is_finished(names_too, dataset, tmp_path):
    """new.pt is whole, and nothing else of the save was done, or all but the last rename: no step is lost."""
    whole, tmp_path = tmp_path / "whole", tmp_path / "run"
    config = dict(dataset=dataset, keep_every=5, eval_interval=5)
    assert run(**config, out_dir=whole) == 0
    config["out_dir"] = tmp_path
    assert run(**config, max_iters=15, lr_decay_iters=20) == 0
    for name in ("prev.pt", "best.pt", "last.pt"):
        (tmp_path / name).unlink()
    (tmp_path / "step_10.pt").rename(tmp_path / "last.pt")
    (tmp_path / "step_15.pt").rename(tmp_path / "new.pt")
    if names_too:
        (tmp_path / "prev.pt").hardlink_to(tmp_path / "last.pt")
        (tmp_path / "best.pt").hardlink_to(tmp_path / "new.pt")
    assert rundir.load_latest(tmp_path)["step"] == 15
    assert run(**config, max_iters=15, lr_decay_iters=20, init_from="resume") == 0
    steps = {path.name: load(path)["step"] for path in tmp_path.glob("*.pt")}
    assert steps == {"last.pt": 15, "prev.pt": 10, "best.pt": 15, "step_0.pt": 0, "step_5.pt": 5, "step_15.pt": 15}
    assert run(**config, init_from="resume") == 0
    assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("code, ends", [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(code, ends, dataset, tmp_path, monkeypatch, capsys):
    """Some network disks do not know it: that is no error. What fails once is tried again, for good ends the run."""
    fsync, failed = rundir.os.fsync, []

    def fail(handle):
        if rundir.os.path.isdir(f"/proc/self/fd/{handle}") and (ends is None or len(failed) < limit):
            failed.append(handle)
            raise OSError(code, rundir.os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(rundir.os, "fsync", fail)
    for limit, expected in ((1, 0), (10**6, int(ends))):
        failed.clear()
        assert run(out_dir=tmp_path / str(limit), dataset=dataset, max_iters=2) == expected
        assert failed
    assert ("cannot write" in capsys.readouterr().err) == ends


@pytest.mark.parametrize("flags", [dict(init_from="auto"), dict(init_from="scratch"), dict(init_from="step_5.pt")])
def test_what_was_kept_is_not_removed_unasked(flags, dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset)
    assert run(**config, keep_every=5, max_iters=5) == 0
    for name in ("last.pt", "prev.pt", "best.pt"):
        (tmp_path / name).unlink()
    if flags["init_from"].endswith(".pt"):
        flags = dict(init_from=tmp_path / flags["init_from"])
    before = files(tmp_path)
    assert run(**config, **flags) == 1
    assert "holds checkpoints of an earlier run (step_0.pt, step_5.pt)" in capsys.readouterr().err
    assert files(tmp_path) == before


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_another_has_overtaken_is_refused(begun, dataset, tmp_path, monkeypatch, capsys):
    """Another run begins and ends while this one builds its model, before it has the lock."""
    config, place = dict(out_dir=tmp_path, dataset=dataset, init_from="auto"), train.place
    assert not begun or run(**config, max_iters=10) == 0

    def overtaken(*args):
        monkeypatch.setattr(train, "place", place)
        assert run(**config) == 0
        place(*args)

    monkeypatch.setattr(train, "place", overtaken)
    capsys.readouterr()
    assert run(**config, max_iters=12) == 1
    assert "another run has written to" in capsys.readouterr().err
    assert load(tmp_path / "last.pt")["step"] == 20
    assert run(**config, max_iters=22) == 0


def test_a_run_directory_in_use_is_refused(dataset, tmp_path):
    """By the same command and by another; when the first has ended, or was killed, it is free."""
    config = dict(out_dir=tmp_path / "run", dataset=dataset)
    first = start(**config, max_iters=100_000, eval_interval=100_000)
    wait_for_row(first, tmp_path / "run", 3)
    before = {name: digest for name, digest in files(tmp_path / "run").items() if name.endswith(".pt")}
    for changes in (dict(init_from="auto"), dict(overwrite=True)):
        _, err = finish(start(**config, **changes), 1)
        assert "is in use by another run (process " in err and str(first.pid) in err and err.count("\n") == 1
    assert {name: digest for name, digest in files(tmp_path / "run").items() if name.endswith(".pt")} == before
    first.kill()
    first.communicate()
    assert run(**config, overwrite=True) == 0
    assert run(**config, init_from="resume", max_iters=21) == 0


# -------------------------------------------------------------------------------------------- beside the training


def test_training_goes_on_during_a_write_and_the_file_holds_the_state_of_its_step(dataset, tmp_path, monkeypatch):
    """The first write waits until step 4 is logged; the next save waits for the first."""
    go_on, save, write = threading.Event(), torch.save, rundir.Metrics.write

    def slow_save(state, f):
        if state["step"] == 0:
            assert go_on.wait(60)
        save(state, f)

    def note(self, row):
        write(self, row)
        if row["step"] == 4:
            assert not (tmp_path / "slow" / "last.pt").exists()
            go_on.set()

    config = dict(dataset=dataset, max_iters=10, save_interval=5, keep_every=5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", slow_save)
        patch.setattr(rundir.Metrics, "write", note)
        assert run(out_dir=tmp_path / "slow", **config) == 0
    assert run(out_dir=tmp_path / "usual", **config) == 0
    assert_same_run(tmp_path / "slow", tmp_path / "usual")
    for n in (0, 5, 10):
        slow, usual = (load(tmp_path / name / f"step_{n}.pt") for name in ("slow", "usual"))
        assert slow["step"] == n and different(slow["model"], usual["model"]) == []
        assert not n or different(slow["optimizer"], usual["optimizer"]) == []


def test_a_snapshot_is_not_changed_by_what_follows():
    t = torch.arange(6.0).view(2, 3)
    copy = rundir.snapshot({"a": [t.T, (t, 3)], "b": None})
    t.zero_()
    assert copy["a"][0].tolist() == [[0, 3], [1, 4], [2, 5]] and copy["a"][1][0].sum() == 15
    assert copy["a"][1][1] == 3 and copy["b"] is None and type(copy["a"][1]) is tuple
    assert rundir.snapshot({"a": t, "b": 1}, keep=False) == {"a": None, "b": 1}


# ------------------------------------------------------------------------------------------------- loss spikes

SPIKE = dict(max_iters=40, eval_interval=20, save_interval=6, loss_spike=0.5)


@pytest.fixture
def spoilt(monkeypatch):
    """Runs whose weights are spoilt once, right after `spoilt(step)` steps of this process; the batches they read."""
    read, make, batch, steps = [], train.make_optimizer, loader.Dataset.batch, {}

    def spoil(model):
        steps["made"] = steps.get("made", 0) + 1
        if steps["made"] in steps.get("bad", ()):
            with torch.no_grad():
                model.wte.weight.add_(torch.randn(model.wte.weight.shape, generator=torch.Generator().manual_seed(1)))

    def make_and_watch(model, config):
        optimizer = make(model, config)
        optimizer.register_step_post_hook(lambda *_: spoil(model))
        return optimizer

    def note(self, step, *args):
        read.append(step)
        return batch(self, step, *args)

    def after(*bad):
        steps.clear()
        steps["bad"] = bad
        read.clear()
        return read

    monkeypatch.setattr(train, "make_optimizer", make_and_watch)
    monkeypatch.setattr(loader.Dataset, "batch", note)
    return after


def shifted(monkeypatch, after, by):
    """From step `after` on the batches of `by` steps later."""
    batch = loader.Dataset.batch
    monkeypatch.setattr(loader.Dataset, "batch", lambda self, s, *args: batch(self, s + by * (s >= after), *args))


def test_a_spike_rolls_back_and_passes_over_the_batches(spoilt, dataset, tmp_path, monkeypatch, capsys):
    read = spoilt(21)  # spoilt after step 21; step 22's loss shows it; the last checkpoint is of step 20
    config = dict(dataset=dataset, **SPIKE)
    assert run(out_dir=tmp_path / "run", **config) == 0
    out = capsys.readouterr().out
    assert "rolled back to step 20: the loss spiked to" in out and "at step 22" in out
    assert "the 2 batches between are passed over (1 of 3)" in out
    assert sorted(set(read)) == list(range(43)) and read.count(24) == 1  # one is read ahead
    rows = metrics(tmp_path / "run")
    (event,) = [row for row in rows if "rolled_back_from" in row]
    assert (event["step"], event["rolled_back_from"], event["rollbacks"]) == (20, 22, 1)
    assert event["spike_loss"] > event["usual_loss"] + 0.5
    assert [row["step"] for row in rows if row is not event] == list(range(41))
    assert max(row["train_loss"] for row in rows if "train_loss" in row and row["step"] > 5) < event["spike_loss"]
    last = load(tmp_path / "run" / "last.pt")
    assert (last["shift"], last["rollbacks"]) == (2, 1)

    spoilt()
    shifted(monkeypatch, 20, 2)
    assert run(out_dir=tmp_path / "by hand", **config) == 0
    by_hand = load(tmp_path / "by hand" / "last.pt")
    assert different(last["model"], by_hand["model"]) == [] and last["recent"] == by_hand["recent"]
    without = [row for row in logged(tmp_path / "run") if "rolled_back_from" not in row[1]]
    assert without == logged(tmp_path / "by hand")


@pytest.mark.parametrize("crash_at", [20, 21, 30])
def test_a_rolled_back_run_goes_on_exactly(crash_at, spoilt, dataset, tmp_path, monkeypatch):
    """Killed right after going back (the event is logged, nothing saved), one step later, or much later."""
    config = dict(dataset=dataset, **SPIKE)
    spoilt(21)
    assert run(out_dir=tmp_path / "whole", **config) == 0
    spoilt(21, *([23] if crash_at == 20 else []))  # nothing of going back was saved then: it happens again
    write, rows = rundir.Metrics.write, []

    def write_and_die(self, row):
        write(self, row)
        rows.append(row["step"])
        if 22 in rows and row["step"] == crash_at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rundir.Metrics, "write", write_and_die)
        assert run(out_dir=tmp_path / "run", **config) == 130
    assert run(out_dir=tmp_path / "run", **config, init_from="resume") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_too_many_spikes_end_the_run_with_the_last_good_checkpoint(spoilt, dataset, tmp_path, capsys):
    spoilt(21, 24)  # 22 steps, back to 20, two more
    config = dict(out_dir=tmp_path, dataset=dataset, **SPIKE)
    assert run(**config, max_rollbacks=1) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the loss spiked to ") and "after 1 roll-backs" in err and err.count("\n") == 1
    last = load(tmp_path / "last.pt")
    assert (last["step"], last["shift"], last["rollbacks"]) == (20, 2, 1)
    assert metrics(tmp_path)[-1]["failure"].startswith("the loss spiked")


def test_a_save_between_two_logged_steps_could_be_of_a_spike(dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path / "run", dataset=dataset, loss_spike=1.0, log_interval=5)
    assert run(**config, save_interval=7, keep_every=10) == 1
    err = capsys.readouterr().err
    assert err == "error: loss_spike needs save_interval to be a multiple of log_interval=5\n"
    assert run(**config, save_interval=5) == 0


def test_what_is_no_spike_changes_nothing(dataset, tmp_path, spoilt):
    spoilt()
    for name, spike in (("with", 0.5), ("without", 0.0)):
        assert run(out_dir=tmp_path / name, dataset=dataset, **SPIKE | dict(loss_spike=spike)) == 0
    assert_same_run(tmp_path / "with", tmp_path / "without")


def test_without_the_flag_a_spike_is_trained_through(spoilt, dataset, tmp_path):
    spoilt(21)
    assert run(out_dir=tmp_path, dataset=dataset, **SPIKE | dict(loss_spike=0.0)) == 0
    assert max(row["train_loss"] for row in metrics(tmp_path) if row["step"] == 22) > 3


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

    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(rundir, "open", open_broken, raising=False)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=3) == 0
    assert failed and [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]
