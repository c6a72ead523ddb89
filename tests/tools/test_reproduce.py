"""`reproduce.py` as a whole, on a made-up scale with tiny runs, which is stopped, killed and started again.

Expected numbers are computed here from what the runs logged."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import reproduce
from nanodnt.claims import quantities
from nanodnt.claims.claims import ARMS
from nanodnt.claims.runner import Runner
from support.claims import STEPS, call, flag, in_process, invented, make_runner, write_base
from support.runs import ROOT, assert_same_run, column, finish, load, metrics, wait_for_row

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """The config file of the made-up family."""
    return write_base(tmp_path_factory.mktemp("base") / "base.py", dataset)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """All claims but the one that fails, with two seeds: four runs, trained in this process."""
    folder = tmp_path_factory.mktemp("whole")
    with in_process():
        assert call(base, folder, "--only=learns,one,search", "--seeds=2") == 0
    return folder


def final(folder: Path, lr: str) -> list:
    """The last validation losses of the runs at this learning rate, by seed."""
    return [column(one_run(folder, lr, seed), "val_loss")[STEPS] for seed in (1, 2)]


def one_run(folder: Path, lr: str, seed: int) -> Path:
    (path,) = (folder / "out" / "tiny").glob(f"f-base-lr{lr}-seed{seed}-*")
    return path


def test_the_results_are_what_the_runs_say(whole):
    assert len(list((whole / "out" / "tiny").iterdir())) == 4  # "found" shares those of the two others
    fast, slow = final(whole, "0.01"), final(whole, "0.0001")
    found = json.loads((whole / "results" / "claims" / "tiny.json").read_text())
    assert set(found) == {"learns", "one", "search"}
    (row,) = found["learns"]["rows"]
    differences = [fast[0] - slow[0], fast[1] - slow[1]]
    assert row["values"] == pytest.approx(differences, abs=1e-12)
    assert row["parts"] == {"fast": fast, "slow": slow}
    mean, half = sum(differences) / 2, 12.706 * abs(differences[0] - differences[1]) / 2  # t of one degree of freedom
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half), abs=1e-9)
    word = "confirmed" if mean + half < 0 else "inconclusive"
    assert row["verdict"] == found["learns"]["verdict"] == word
    assert mean < -0.1  # or the test has shown nothing
    assert found["one"]["rows"][0]["values"] == pytest.approx([fast[0] - 3.9, fast[1] - 3.9], abs=1e-12)
    assert found["search"]["rows"][0]["values"] == [0.0, 0.0]
    assert found["search"]["verdict"] == "confirmed"
    arm = found["search"]["arms"]["found"]
    assert (arm["lr"], arm["tried"]) == (0.01, {"0.0001": slow[0], "0.01": fast[0]})
    assert (found["learns"]["seeds"], found["learns"]["torch"]) == (2, torch.__version__)
    steps = {f"step_{n}.pt" for n in range(0, STEPS + 1, STEPS // 10)}
    assert {p.name for p in one_run(whole, "0.01", 2).glob("step_*")} == steps
    assert not list(one_run(whole, "0.0001", 2).glob("step_*"))


def test_the_page_and_the_figures(whole):
    fast, slow = final(whole, "0.01"), final(whole, "0.0001")
    found = json.loads((whole / "results" / "claims" / "tiny.json").read_text())
    text = (whole / "results" / "claims.md").read_text()
    for claim, says in (("learns", "Fast is better"), ("one", "Fast learns"), ("search", "The search finds it")):
        png = whole / "results" / "claims" / f"tiny-{claim}.png"
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert f"![{claim}](claims/tiny-{claim}.png)" in text and says in text
        assert f"### {claim}: {found[claim]['verdict']}" in text
        assert f"(#tiny-{claim})" in text and f'<a id="tiny-{claim}"></a>' in text
    assert "`fails`" in text and "not run" in text and "A note." in text
    assert ", ".join(f"{a - b:.4f}" for a, b in zip(fast, slow, strict=True)) in text
    assert f"{slow[0]:.4f}, {slow[1]:.4f}" in text
    assert f"0.01, searched, the edge of the grid (0.0001: {slow[0]:.4f}, 0.01: {fast[0]:.4f})" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (4, 5, 6), line  # a "|" in a text would break the table


def test_started_again_it_trains_nothing(whole, base, monkeypatch):
    page = (whole / "results" / "claims.md").read_text()
    kept = {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(Runner, "train", lambda self, run, lock: pytest.fail(f"trains {run.path}"))
    for function in ("loss", "rise"):
        monkeypatch.setitem(quantities.MEASURES, function, lambda path: pytest.fail(f"measures {path}"))
    assert call(base, whole, "--only=learns,one,search", "--seeds=2") == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    assert (whole / "results" / "claims.md").read_text() == page


@pytest.mark.parametrize("where", [in_process, pytest.param(nullcontext, marks=pytest.mark.deep)])
def test_a_run_that_diverges_counts_as_knowing_nothing(base, tmp_path, where):
    with invented(base), where():
        made = make_runner(tmp_path, jobs=1)
        run = made.training_run(ARMS["broken"], 1e15, 1)
        assert made.measure("loss", run) == pytest.approx(math.log(50))
    assert "failure" in metrics(run.path)[-1] and metrics(run.path)[-1]["step"] < STEPS
    done = json.loads((run.path / "done.json").read_text())
    assert (done["outcome"], done["args"]) == ("diverged", list(run.args))


def test_a_run_that_fails_is_one_line(base, tmp_path, capsys):
    assert call(base, tmp_path, "--only=fails") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: fails: a run ended with exit code 1 (error: micro_batch_size=3 does not divide")
    (folder,) = (tmp_path / "out" / "tiny").iterdir()
    assert line.endswith(f"see {folder / 'train.log'}")
    assert not (folder / "done.json").exists()


def test_mistakes_are_one_line_before_anything_is_run(base, tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text(base.read_text().replace("walk", "gone"))
    for flags, words, code in (
        (["--only=learns,nothing"], "only=nothing is neither a claim nor a paper: allowed are A, B, fails, learns", 1),
        (["--seeds=0"], "seeds=0 must be between 1 and 10", 1),
        (["--seeds=11"], "seeds=11 must be between 1 and 10", 1),
        (["--jobs=-1"], "jobs=-1 must not be negative", 1),
        (["--scale=large"], "--scale cannot be 'large'", 2),
        ([], "gone", 1),  # the dataset
    ):
        assert call(other, tmp_path, *flags) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert [path.name for path in tmp_path.iterdir()] == ["other.py"]


def test_a_run_made_with_other_settings_is_not_taken_for_this_one(whole, base, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    before = base.read_text()
    try:
        base.write_text(before.replace("n_embd = 32", "n_embd = 64") + "grad_clip = 0.5\n")  # the same name and flags
        assert call(base, tmp_path, "--only=one") == 1
    finally:
        base.write_text(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: one: {out / 'tiny'}") and "was trained with other settings (" in line
    assert "n_embd 32 → 64" in line and "grad_clip 1.0 → 0.5" in line and line.endswith("remove it")


def test_a_dry_run_prints_commands_and_writes_nothing(whole, base, tmp_path, capsys):
    assert call(base, tmp_path, "--only=A,search", "--seeds=2", "--dry_run=True") == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    with invented(base):
        made = make_runner(tmp_path)
        wanted = {made.training_run(ARMS["fast"], lr, seed) for lr in (1e-4, 1e-2) for seed in (1, 2)}
    commands = {tuple(line[line.index("train.py") + 1 : -2]) for line in lines}
    assert commands >= {run.args for run in wanted if flag(run, "learning_rate") == "0.01"}
    assert {line[-1] for line in lines} == {f"--out_dir={run.path}" for run in wanted}
    assert all(line[-2] == "--init_from=auto" for line in lines)
    assert not list(tmp_path.iterdir())
    assert call(base, whole, "--only=learns,one,search", "--seeds=2", "--dry_run=True") == 0  # all is there
    assert capsys.readouterr().out == ""


def test_judging_alone_trains_nothing(whole, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "train", lambda self, run, lock: pytest.fail(f"trains {run.path}"))
    assert call(base, tmp_path, "--judge_only=True") == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    again = ["--judge_only=True", "--seeds=2", f"--results={tmp_path / 'again'}"]
    argv = ["reproduce.py", f"--out={whole / 'out'}", *again]
    with invented(base):
        monkeypatch.setattr(sys, "argv", argv)
        assert reproduce.main() == 0
    assert "fails" not in capsys.readouterr().out
    one, other = (json.loads((f / "claims" / "tiny.json").read_text()) for f in (whole / "results", tmp_path / "again"))
    assert set(one) == set(other) == {"learns", "one", "search"}
    assert [one[claim]["rows"] for claim in one] == [other[claim]["rows"] for claim in one]


# ---------------------------------------------------------------------------------------------------- kills and stops

DRIVER = """
import sys
from support.claims import invent
import reproduce

invent(sys.argv.pop(1))
sys.exit(reproduce.main())
"""


def begin(base, folder: Path) -> subprocess.Popen:
    """reproduce.py on the first seed of "fast", in a process group of its own; its output goes to folder/output."""
    flags = ["--only=one", "--seeds=1", "--jobs=1", f"--out={folder / 'out'}", f"--results={folder / 'results'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", DRIVER, str(base), *flags]
    with open(folder / "output", "wb") as output:
        how = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        return subprocess.Popen(command, cwd=folder, env=env, **how)


def resumed_steps(run: Path) -> list:
    """The steps of the checkpoints that train.py went on from."""
    return [int(step) for step in re.findall(r"weights: .*, step (\d+)", (run / "train.log").read_text())]


def assert_finished_as(undisturbed: Path, folder: Path, steps: int) -> None:
    """reproduce.py in `folder` made the same run, judged by it, and left nothing half-written."""
    run = folder / "out" / "tiny" / undisturbed.name
    assert json.loads((run / "done.json").read_text())["outcome"] == "finished"
    assert_same_run(run, undisturbed)
    (row, _) = json.loads((folder / "results" / "claims" / "tiny.json").read_text())["one"]["rows"]
    assert row["parts"]["fast"] == [column(undisturbed, "val_loss")[steps]]
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.deep
def test_stopped_it_goes_on_and_ends_the_same(whole, base, tmp_path):
    undisturbed = one_run(whole, "0.01", 1)
    run = tmp_path / "out" / "tiny" / undisturbed.name

    process = begin(base, tmp_path)
    wait_for_row(process, run, STEPS // 4)
    process.terminate()
    finish(process, 130)
    assert (tmp_path / "output").read_text() == "stopped; the same command goes on from here\n"
    assert not (run / "done.json").exists()
    saved = load(run / "last.pt")["step"]
    assert STEPS // 4 <= saved < STEPS

    assert call(base, tmp_path, "--only=one", "--seeds=1") == 0
    assert resumed_steps(run) == [saved]
    assert_finished_as(undisturbed, tmp_path, STEPS)


@pytest.mark.deep
def test_killed_and_stopped_it_goes_on_and_ends_the_same(dataset, tmp_path):
    base = write_base(tmp_path / "base.py", dataset, max_iters=160)
    with in_process():
        assert call(base, tmp_path / "undisturbed", "--only=one", "--seeds=1") == 0
    undisturbed = one_run(tmp_path / "undisturbed", "0.01", 1)
    folder = tmp_path / "disturbed"
    run, output = folder / "out" / "tiny" / undisturbed.name, folder / "output"
    folder.mkdir()

    process = begin(base, folder)  # both killed
    wait_for_row(process, run, 58)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert not (run / "done.json").exists()

    process = begin(base, folder)  # stopped
    wait_for_row(process, run, 80)
    process.terminate()
    finish(process, 130)
    assert output.read_text() == "stopped; the same command goes on from here\n"
    assert not (run / "done.json").exists()
    saved = load(run / "last.pt")["step"]
    assert 80 <= saved < 160

    process = begin(base, folder)  # killed alone: train.py lives on, here paused until the next reproduce.py waits
    wait_for_row(process, run, 110)
    child = int(re.match(r"process (\d+)", (run / ".lock").read_text())[1])
    os.kill(child, signal.SIGSTOP)
    process.kill()
    finish(process, -signal.SIGKILL)
    process = begin(base, folder)
    deadline = time.monotonic() + 60
    while "waiting" not in output.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child, signal.SIGCONT)
    finish(process, 0)
    assert f"waiting: {run} is being trained by another process" in output.read_text()

    resumed = resumed_steps(run)
    assert resumed[0] in (40, 48) and resumed[1:] == [saved, 160]  # 40 or 48: the last two saves before row 58
    assert_finished_as(undisturbed, folder, 160)
