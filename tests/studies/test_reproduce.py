"""`reproduce.py` as a whole, on a made-up scale with tiny runs, which is stopped, killed and started again.

Expected numbers are computed here from what the runs logged."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import reproduce
from studies.claims.arms import ARMS, SCALES
from studies.claims.experiment import claims_at
from studies.claims.judge import judge
from studies.sweep import runner
from studies.sweep.runner import Runner
from support import runs as tiny
from support.claims import STEPS, alone, call, in_process, invented, make_experiment, write_base
from support.processes import Forked, finish, wait_for_row
from support.runs import assert_same_run, column, load, metrics
from support.vision import make_digits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """All claims but the one that fails, with two seeds, trained in this process."""
    folder = tmp_path_factory.mktemp("whole")
    with in_process():
        assert call(base, folder, "--only=A,tunes,C", "--seeds=2") == 0
    return folder


def record(folder: Path) -> dict:
    return json.loads((folder / "results" / "claims" / "mini.json").read_text())


def one_run(folder: Path, lr: str, seed: int) -> Path:
    (path,) = (folder / "out" / "mini").glob(f"base-learning_rate{lr}-seed{seed}-*")
    return path


def final(folder: Path, lr: str) -> list:
    """The last validation losses of the runs at this learning rate, by seed."""
    return [column(one_run(folder, lr, seed), "val_loss")[STEPS] for seed in (1, 2)]


def judged(base, folder: Path) -> dict:
    """The verdicts on the made-up claims, from the record in `folder`."""
    with invented(base):
        return judge(make_experiment(folder, seeds=2, judge_only=True))


def test_the_record_and_the_verdicts_are_what_the_runs_say(whole, base):
    fast, slow, found = final(whole, "0.01"), final(whole, "0.0001"), judged(base, whole)
    assert set(found) == {"learns", "tunes", "breaks"}
    assert found["learns"]["primary"] == pytest.approx([fast[0] - slow[0], fast[1] - slow[1]], abs=1e-12)
    assert list(found["learns"]["values"].values())[1] == slow
    assert found["breaks"]["primary"] == [math.inf, math.inf]
    assert (found["breaks"]["class"], found["breaks"]["why"]) == ("undecided", "2 of 2 seeds diverged")
    assert found["breaks"]["p"] >= 2 / 6  # two runs of each side, and Holm's correction
    kept = record(whole)
    for name, run in kept.items():
        path = whole / "out" / "mini" / name
        last, diverged = metrics(path)[-1], run["outcome"] == "diverged"
        assert run["measures"]["loss"] == (None if diverged else last.get("val_loss"))
        assert not diverged or ("failure" in last and last["step"] < STEPS)
        assert run["machine"]["torch"] == torch.__version__ and run["seconds"] >= 0
        assert f"--seed={name.split('seed')[1][0]}" in run["args"]
    steps = {f"step_{n}.pt" for n in range(0, STEPS + 1, STEPS // 10)}
    assert {p.name for p in one_run(whole, "0.01", 2).glob("step_*")} == steps
    assert not list(one_run(whole, "0.0001", 2).glob("step_*"))


def test_the_best_rate_and_setting_are_of_the_tuning_seed(whole, base):
    with invented(base):
        tuned = make_experiment(whole, seeds=2, judge_only=True).tune("tuned")
    losses = {lr: column(one_run(whole, f"{lr:g}", 0), "val_loss")[STEPS] for lr in tuned.tried}
    assert tuned.tried == losses and tuned.lr == min(losses, key=losses.get)
    assert min(losses) < tuned.lr < max(losses)
    chosen = [run for run in record(whole).values() if "--beta2=0.5" in run["args"]]
    assert [run["measures"]["loss"] for run in chosen if "--seed=0" in run["args"]] == [tuned.variants["--beta2=0.5"]]
    better = tuned.variants["--beta2=0.5"] < tuned.variants[""]
    assert (tuned.files == "--beta2=0.5") == better and len(chosen) == (3 if better else 1)


def test_the_page_and_the_figures(whole, base):
    fast, slow, found = final(whole, "0.01"), final(whole, "0.0001"), judged(base, whole)
    text = (whole / "results" / "claims.md").read_text()
    assert (whole / "results" / "claims" / "mini.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for (name, row), paper in zip(found.items(), "ABC", strict=True):
        assert f"<summary><b>{paper}: {name} is so</b>" in text
        assert f"**{row['class']}**" in text and f'<a id="{name}"></a>' in text
    assert "Not run yet: fails." in text and "A note." in text and "diverged with 2 of 2 seeds" in text
    assert "slow / alone" in text
    assert ", ".join(f"{a - b:+.3f}" for a, b in zip(fast, slow, strict=True)).replace("-", "−") in text
    assert f"| {slow[0]:.3f}, {slow[1]:.3f} |" in text and "| 0.0001, given |" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block  # a "|" in a text would break it


def test_started_again_it_trains_nothing(whole, base, monkeypatch):
    page = (whole / "results" / "claims.md").read_text()
    kept = {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    monkeypatch.setattr(Runner, "finish", lambda self, run: pytest.fail(f"trains {run.path}"))
    assert call(base, whole, "--only=A,tunes,C", "--seeds=2") == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (whole / "out").rglob("*") if path.is_file()}
    assert (whole / "results" / "claims.md").read_text() == page


def test_judging_alone_needs_the_record_and_nothing_else(whole, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "finish", lambda self, run: pytest.fail(f"trains {run.path}"))
    (tmp_path / "results" / "claims").mkdir(parents=True)
    shutil.copy(whole / "results" / "claims" / "mini.json", tmp_path / "results" / "claims")
    assert call(base, tmp_path, "--judge_only=True", "--seeds=2") == 0
    assert (tmp_path / "results" / "claims.md").read_text() == (whole / "results" / "claims.md").read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.deep
def test_a_run_that_diverges_in_a_process_of_its_own(base, tmp_path):
    with invented(base):
        made = make_experiment(tmp_path, jobs=1)
        assert made.measure("loss", made.reported("broken", 1)) is None


def test_a_run_that_fails_is_one_line(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("print('begun')\nraise SystemExit('error: made up')\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    assert call(base, tmp_path, "--only=fails", "--seeds=1") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: wrong: a run ended with exit code 1 (error: made up): ")
    (folder,) = (tmp_path / "out" / "mini").iterdir()
    assert line.endswith(f"see {folder / 'train.log'}")
    assert not (folder / "done.json").exists()


def test_mistakes_are_one_line_before_anything_is_run(base, tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text(base.read_text().replace("walk", "gone"))
    for flags, words, code in (
        ("--only=learns,nothing", "only=nothing is neither a claim nor a paper of scale mini: allowed are A, B, C", 1),
        ("--seeds=0", "seeds=0 must be between 1 and 8", 1),
        ("--seeds=9", "seeds=9 must be between 1 and 8", 1),
        ("--jobs=-1", "jobs=-1 must not be negative", 1),
        ("--scale=large", "--scale cannot be 'large'", 2),
        ("--only=A", "gone", 1),  # the dataset
    ):
        assert call(other, tmp_path, flags) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line
    assert [path.name for path in tmp_path.iterdir()] == ["other.py"]


def test_what_is_recorded_with_other_settings_is_not_taken_for_this_run(whole, base, capsys):
    """Nor is what is trained and not recorded: test_sweep.py."""
    before = base.read_text()
    try:
        base.write_text(before.replace("n_embd = 32", "n_embd = 64"))  # the same name and flags
        assert call(base, whole, "--judge_only=True", "--seeds=2") == 1
    finally:
        base.write_text(before)
    assert "was recorded with other settings than its config files have now: undo" in capsys.readouterr().err


def test_a_dry_run_prints_commands_and_writes_nothing(whole, base, tmp_path, capsys):
    assert call(base, tmp_path, "--only=A,tunes", "--seeds=2", "--dry_run=True") == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    with invented(base):
        made = make_experiment(tmp_path)
        wanted = [made.run_of(name, ARMS[name].lr, seed) for name in ("fast", "slow") for seed in (1, 2)]
        wanted += [made.run_of("tuned", lr, 0) for lr in (1e-2, 2e-2, 4e-2)]
    assert {tuple(line[2:-2]) for line in lines} == {run.args for run in wanted}
    assert {line[-1] for line in lines} == {f"--out_dir={run.path}" for run in wanted}
    assert all(line[:2] == ["python", "train.py"] and line[-2] == "--init_from=auto" for line in lines)
    assert not list(tmp_path.iterdir())
    assert call(base, whole, "--only=A,tunes,C", "--seeds=2", "--dry_run=True") == 0  # all is there
    assert capsys.readouterr().out == ""


@pytest.mark.deep
@pytest.mark.parametrize("scale", ["small", "digits"])
def test_every_claim_of_a_scale(scale, dataset, tmp_path, monkeypatch):
    """In runs of ten steps without tuning: every claim's runs and measures, top-1 as it was logged, no verdicts."""
    steps = "--max_iters=10 --warmup_iters=1 --eval_interval=10"
    short = f"--dataset={dataset} --n_layer=4 --n_embd=32 --n_head=2 --n_ff=64 --block_size=32 --batch_size=4"
    short += " --eval_tokens=512 --dtype=float32"
    if scale == "digits":
        short = f"--dataset={make_digits(tmp_path / 'digits')} --n_layer=2 --n_embd=32 --n_head=2"
    bases = {family: f"{files} {short} {steps}" for family, files in SCALES[scale].bases.items()}
    monkeypatch.setitem(SCALES, scale, SCALES[scale]._replace(bases=bases, rates={}))
    for name in ("ViT LayerNorm, long", "ViT DyT, long"):
        monkeypatch.setitem(ARMS, name, ARMS[name]._replace(files=f"{ARMS[name].files} {steps}"))
    flags = [f"--scale={scale}", "--seeds=1", f"--out={tmp_path / 'out'}", f"--results={tmp_path}"]
    with in_process():
        assert tiny.call(reproduce.main, *flags) == 0
    text = (tmp_path / f"claims_{scale}.md").read_text()
    assert text.count("**undecided") == len(claims_at(scale)) and "Not run yet" not in text
    assert not [word for word in ("reproduced", "contradicted") if f"**{word}" in text]
    runs = json.loads((tmp_path / "claims" / f"{scale}.json").read_text())
    top1 = {name: run["measures"]["top-1"] for name, run in runs.items() if "top-1" in run["measures"]}
    of_images = {"s1", "s5", "vit_dyt", "vit_layernorm"} if scale == "digits" else set()
    assert {name.split("-")[0] for name in top1} == of_images
    for name, value in top1.items():
        diverged, last = runs[name]["outcome"] == "diverged", metrics(tmp_path / "out" / "digits" / name)[-1]
        assert value == (None if diverged else 100 * last["val_top1"])
    assert scale == "small" or any(top1.values())


def begin(base, folder: Path) -> Forked:
    """reproduce.py on the first seed of "fast"; it prints to folder.out."""
    flags = ["--only=learns", "--seeds=1", "--jobs=1", f"--out={folder / 'out'}", f"--results={folder / 'results'}"]
    return Forked(folder, alone, "reproduce", base, *flags)


@pytest.mark.deep
def test_killed_and_stopped_it_goes_on_and_ends_the_same(dataset, tmp_path):
    """That both are killed at once: test_sweep.py."""
    base = write_base(tmp_path / "base.py", dataset, max_iters=120)
    with in_process():
        assert call(base, tmp_path / "undisturbed", "--only=learns", "--seeds=1") == 0
    undisturbed = one_run(tmp_path / "undisturbed", "0.01", 1)
    folder, output = tmp_path / "disturbed", tmp_path / "disturbed.out"
    run = folder / "out" / "mini" / undisturbed.name

    process = begin(base, folder)  # stopped
    wait_for_row(process, run, 40)
    process.terminate()
    assert finish(process, 130) == ("stopped; the same command goes on from here\n", "")
    assert not (run / "done.json").exists()
    saved = load(run / "last.pt")["step"]
    assert 40 <= saved < 120

    process = begin(base, folder)  # killed alone: train.py lives on, here paused until the next reproduce.py waits
    wait_for_row(process, run, saved + 10)
    child = int(re.match(r"process (\d+)", (run / ".lock").read_text())[1])
    os.kill(child, signal.SIGSTOP)
    process.kill()
    finish(process, -signal.SIGKILL)
    process = begin(base, folder)
    deadline = time.monotonic() + 60
    while "waiting" not in output.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(child, signal.SIGCONT)
    assert f"waiting: {run} is being trained by another process" in finish(process, 0)[0]

    resumed = [int(step) for step in re.findall(r"weights: .*, step (\d+)", (run / "train.log").read_text())]
    assert resumed == [saved]  # the run that lived on is found finished, and not started again
    assert json.loads((run / "done.json").read_text())["outcome"] == "finished"
    assert_same_run(run, undisturbed)
    assert record(folder)[run.name]["measures"] == {"loss": column(undisturbed, "val_loss")[120]}
    assert not list(folder.rglob("*.tmp"))
