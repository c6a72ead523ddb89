"""`reproduce.py` as a whole, on a made-up claims file with tiny runs, which is stopped, killed and
started again.

Expected numbers are computed here from what the runs logged."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
from pathlib import Path

import pytest
import torch

from nanodnt.run.environment import choose_device, choose_dtype
from studies.claims.experiment import TUNING_SEEDS, first_seeds
from studies.claims.page import format_values
from studies.sweep import runner
from studies.sweep.runner import Runner
from support.claims import (
    STEPS,
    alone,
    argv,
    call,
    in_process,
    make_experiment,
    write_base,
    write_claims,
)
from support.processes import Forked, finish, wait_for_row
from support.runs import assert_same_run, column, load, metrics

WELL = "--only=A,tunes,C,waits"  # all claims but the one that fails


@pytest.fixture(scope="module")
def claims(base):
    return write_claims(base)


@pytest.fixture(scope="module")
def whole(claims, tmp_path_factory):
    """All claims but the one that fails, trained in this process."""
    folder = tmp_path_factory.mktemp("whole")
    with in_process():
        assert call(claims, folder, WELL) == 0
    return folder


def record(folder: Path) -> dict:
    return json.loads((folder / "results" / "made_up" / "record.json").read_text())


def one_run(folder: Path, lr: str, seed: int) -> Path:
    (path,) = (folder / "out" / "made_up").glob(f"base-learning_rate{lr}-seed{seed}-*")
    return path


def final(folder: Path, lr: str, seeds) -> list:
    """The last validation losses of the runs at this learning rate, by seed."""
    return [column(one_run(folder, lr, seed), "val_loss")[STEPS] for seed in seeds]


@pytest.mark.deep
def test_the_record_and_the_verdicts_are_what_the_runs_say(whole, claims):
    found = make_experiment(whole, claims, judge_only=True).judge()
    assert set(found) == {"learns", "tunes", "breaks", "waits"}
    values = found["learns"]["values"]
    (number, by_seed), (_, alone) = values.items()
    seeds = first_seeds(len(by_seed))
    fast, slow = final(whole, "0.01", seeds), final(whole, "0.0001", seeds)
    assert by_seed == pytest.approx([a - b for a, b in zip(fast, slow, strict=True)], abs=1e-12)
    assert alone == slow[: len(alone)] and len(alone) >= 4 and number.says == "fast minus slow"
    assert set(found["breaks"]["values"][found["breaks"]["claim"].number]) == {math.inf}
    assert (found["waits"]["class"], found["waits"]["why"]) == ("cannot be judged", "it is short")
    kept = record(whole)
    for name, run in kept.items():
        path = whole / "out" / "made_up" / name
        last, diverged = metrics(path)[-1], run["outcome"] == "diverged"
        assert run["measures"]["loss"] == (None if diverged else last.get("val_loss"))
        assert not diverged or ("failure" in last and last["step"] < STEPS)
        assert run["machine"]["torch"] == torch.__version__ and run["seconds"] >= 0
        made_from = json.loads((path / "config.json").read_text())
        device, _ = choose_device(made_from["train"]["device"])
        dtype, _ = choose_dtype(made_from["train"]["dtype"], device)
        assert f"torch.{run['machine']['dtype']}" == str(dtype)
        code = [entry[3:] for entry in made_from["git_changed_files"] or [] if entry[-3:] == ".py"]
        meta = json.loads((Path(made_from["train"]["dataset"]) / "meta.json").read_text())
        checksums = {split: meta["splits"][split]["sha256"] for split in ("train", "val")}
        assert (run["changed"], run["data"]) == (code, {"source": "a test"} | checksums)
        assert f"--seed={re.search('seed([0-9]+)', name)[1]}" in run["args"]
    steps = {f"step_{n}.pt" for n in range(0, STEPS + 1, STEPS // 10)}
    assert {p.name for p in one_run(whole, "0.01", 2).glob("step_*")} == steps


@pytest.mark.deep
def test_seeds_are_counted_from_the_tuning_seeds_alone(whole, claims):
    """From what they lost, by the formulas of docs/claims.md: the standard deviation of the
    difference over two seeds; in a study that is not paired, as if its two arms were
    independent."""
    made = make_experiment(whole, claims, judge_only=True)
    pairs = [final(whole, lr, TUNING_SEEDS) for lr in ("0.01", "0.0001")]
    apart = math.sqrt(sum((a - b) ** 2 / 2 for a, b in pairs))
    spread = statistics.stdev(fast - slow for fast, slow in zip(*pairs, strict=True))
    n, why = made.plan("learns")
    assert f"standard deviation is {spread:.2g}" in why and 4 <= n <= 16
    assert made.seeds_of("slow") == first_seeds(n)
    assert made.plan("waits") == (0, "it is short")
    used = {
        int(arg[7:])
        for run in record(whole).values()
        for arg in run["args"]
        if arg.startswith("--seed=")
    }
    assert used <= {*TUNING_SEEDS, *first_seeds(16)}
    made.study = made.study._replace(paired=False)
    number = made.study.claims[0].number
    assert made.spread_of(number) == pytest.approx(apart)
    assert made.study.claims[0].seeds == 0
    set_by_hand = make_experiment(whole, claims, judge_only=True, seeds=40, only="learns")
    assert set_by_hand.seeds_of("slow") == first_seeds(40) and set_by_hand.plan("learns")[0] == 40


@pytest.mark.deep
def test_the_page_and_the_figure(whole, claims):
    found = make_experiment(whole, claims, judge_only=True).judge()
    text = (whole / "results" / "made_up.md").read_text()
    assert (
        (whole / "results" / "made_up" / "rates.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    )
    assert "(made_up/rates.png)" in text
    for name, row in found.items():
        paper, statement = row["claim"].paper or "ours", row["claim"].statement
        assert f"<summary><b>{paper}: {statement}</b>: {row['class']}" in text
        assert f'<a id="{name}"></a>' in text and f"Planned: {row['plan']}." in text
    assert "Not run yet: fails." in text and "A note." in text
    waits = "| [it takes long](#waits) | {} | – | **cannot be judged** (it is short) |"
    alone = format_values(found["waits"]["values"][found["waits"]["claim"].number])
    assert waits.format(alone) in text.split("## What this scale cannot judge")[1]
    assert "slow / alone" in text and "| 0.0001, given |" in text
    decided = text.split("## What is decided")[1].split("\n## ")[0]
    assert "waits" not in decided and "diverged with" in decided
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        # a "|" in a text would break it
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


@pytest.mark.deep
def test_all_arms_have_the_same_trials(base, tmp_path):
    study = tmp_path / "equal.py"
    study.write_text(f"""
from studies.claims.study import Arm, Claim, Number, Study, Trials
study = Study(
    "a test",
    bases={{"f": "{base}"}},
    arms={{"plain under f": Arm("f"), "other under f": Arm("f", "--beta2=0.5")}},
    claims=[
        Claim("is-other", "other is better", Number("difference", "other under f - plain under f"),
              smallest=0.1, seeds=2)
    ],
    trials={{"f": Trials((1e-4, 1e-2), "--max_iters=10 --eval_interval=10")}},
    target=9.0,
)
""")
    with in_process():
        assert call(study, tmp_path) == 0
    made = make_experiment(tmp_path, study, judge_only=True)
    losses = {}  # {(arm, steps, learning rate): [losses]}, from the runs themselves
    for run in (tmp_path / "out" / "equal").iterdir():
        train = json.loads((run / "config.json").read_text())["train"]
        key = (train["beta2"], train["max_iters"], train["learning_rate"])
        losses.setdefault(key, []).append(metrics(run)[-1]["val_loss"])
    for name, beta2 in (("plain under f", 0.95), ("other under f", 0.5)):
        trials = {lr: losses[beta2, 10, lr] for lr in (1e-4, 1e-2)}
        assert made.tune(name).tried == trials  # one run each
        chosen = min(trials, key=trials.get)
        assert made.tune(name).lr == chosen and len(losses[beta2, STEPS, chosen]) == 2
    assert len(losses) == 6
    page = (tmp_path / "results" / "equal.md").read_text()
    assert "(equal/losses.png)" in page and "rates.png" not in page
    assert chosen == 1e-2
    mean = statistics.mean(losses[0.5, STEPS, chosen])
    margin = f"(target − mean)·√n = {(9 - mean) * math.sqrt(2):+.3f}"
    assert f"| other | {mean:.3f} at 0.01, the highest tried; {margin} |" in page


@pytest.mark.deep
def test_judging_alone_needs_the_record_and_nothing_else(
    whole, claims, tmp_path, monkeypatch, capsys
):
    """It ends with the verdicts, the page and the figure."""
    monkeypatch.setattr(Runner, "finish", lambda self, run: pytest.fail(f"trains {run.path}"))
    (tmp_path / "results" / "made_up").mkdir(parents=True)
    shutil.copy(whole / "results" / "made_up" / "record.json", tmp_path / "results" / "made_up")
    assert call(claims, tmp_path, "--judge_only") == 0
    assert (tmp_path / "results" / "made_up.md").read_text() == (
        whole / "results" / "made_up.md"
    ).read_text()
    assert not (tmp_path / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    results = tmp_path / "results"
    assert lines[-2:] == [str(results / "made_up.md"), str(results / "made_up" / "rates.png")]
    for name, row in make_experiment(whole, claims, judge_only=True).judge().items():
        said = lines.index(f"{name}: {row['class'].upper()}: {row['claim'].statement}")
        if row["p"] is not None:
            values = row["values"][row["claim"].number]
            ours = f"{format_values(values)}, n = {len(values)}, p = {row['p']:.2g}"
            assert lines[said + 1].strip() == f"{row['claim'].number.says}: {ours}"
    assert "fails: no verdict, since not all of its runs are there" in lines


def test_a_run_that_fails_is_one_line(claims, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("print('begun')\nraise SystemExit('error: made up')\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    assert call(claims, tmp_path, "--only=fails") == 1
    out, err = capsys.readouterr()
    assert out.startswith("runs: at least 2, ")
    (line,) = err.splitlines()
    assert line.startswith("error: fails: a run ended with exit code 1 (error: made up): ")
    assert Path(line.split("see ")[1]).read_text("utf-8").startswith("begun\nerror: made up\n")


def test_a_missing_package_is_found_before_the_runs(claims, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert call(claims, tmp_path, "--dry_run") == 1
    assert "the package scipy is missing: make install-extra" in capsys.readouterr().err


def test_mistakes_are_one_line_before_anything_is_run(claims, base, tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text(base.read_text().replace("walk", "gone"))
    text, study = claims.read_text(), tmp_path / "mine.py"
    mistakes = [  # (what of the file is changed, flags, words of the message)
        (
            ("", ""),
            "--only=learns,nothing",
            "only=nothing is neither a claim nor a paper of the study: it has A, B",
        ),
        (("", ""), "--jobs=-1", "jobs=-1 must not be negative"),
        (("", ""), "--seeds=-1", "seeds=-1 must not be negative"),
        (("study =", "other ="), "", "mine.py has no `study = Study(…)`: docs/claims.md shows one"),
        (
            ('lr=1e-4),\n        "tuned"', 'lr=oops),\n        "tuned"'),
            "",
            "mine.py:9: NameError",
        ),
        (('"a test"', '"a test" 1'), "", "mine.py:5: SyntaxError"),  # no Python
        (("keep=True", "kept=True"), "", "mine.py:8: TypeError: Arm.__new__() got an unexpected"),
        (('Arm("f", lr=1e-4)', '"f"'), "", "mine.py: a field of the study has another type: 'str'"),
        (("micro_batch_size=3", "micro=3"), "", "mine.py:11: arm 'wrong': unknown flag --micro"),
        (
            ("lr=1e-2, keep=True", "lr=1e-4"),
            "--only=learns",
            "mine.py:9: 'fast' and 'slow', which claim learns compares, have the same settings",
        ),
        (
            ("fast - slow", "fast - sow"),
            "",
            "mine.py:15: an arm of claim learns: 'sow' is not one of broken, fast, ",
        ),
        (('Arm("f", lr=1e-4)', 'Arm("g", lr=1e-4)'), "", "base of arm 'slow': 'g' is not one of f"),
        (
            ('"slow"),)', '"slow", None, "lss"),)'),
            "",
            "a measure of claim learns: 'lss' is not one of ",
        ),
        (
            ('"equal", 0.25', '"same", 0.25'),
            "",
            "expect of claim tunes: 'same' is not one of above, below, equal",
        ),
        (
            ('cannot="it', 'plain={"no effect": "none"}, cannot="it'),
            "",
            "a class in plain of claim waits: 'no effect' is not one of cannot be judged, holds, ",
        ),
        (
            ('"equal", 0.25', '"equal", 0.0'),
            "",
            "claim tunes: smallest, the smallest effect that matters, must be",
        ),
        (('"fails"', '"learns"'), "", "mine.py:15: two claims have one id, 'learns'"),
        (
            ('cannot="it', 'protocol=(Setting("n_layer", 3, "p"),), cannot="it'),
            "",
            "n_layer is 2, and 3 in",
        ),
        (
            ("claims=[", 'trials={"f": Trials(())}, claims=['),
            "",
            "at least one: rates of the base times tries are {0: 'tuned'}",
        ),
        (
            (
                'arms={\n        "fast": Arm("f", lr=1e-2',
                'trials={"f": Trials((1e-2,))}, arms={\n        "fast": Arm("f"',
            ),
            "",
            "mine.py:8: arms must have as many trials each, at least one: rates of the base times "
            "tries are {1: 'fast', 2: 'tuned'}",
        ),
        (
            ("claims=[", 'trials={"f": Trials((1e-2,))}, claims=['),
            "",
            "mine.py:15: claim learns: trials has one tuning seed, which shows no spread: give the",
        ),
        (("claims=[", "target=3.28, claims=["), "", "target needs trials"),
        (("claims=[", 'records=("gone.json",), claims=['), "", "gone.json, which the claims file"),
        ((str(base), str(other)), "--only=A", "gone"),  # the dataset
    ]
    for (old, new), flags, words in mistakes:
        assert old in text
        study.write_text(
            text.replace(old, new, 1).replace("Number, Study", "Number, Setting, Study, Trials")
        )
        assert call(study, tmp_path, *filter(None, [flags])) == 1, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and words in line, line
    assert {path.name for path in tmp_path.iterdir()} <= {"other.py", "mine.py", "__pycache__"}
    assert call(tmp_path / "no.py", tmp_path) == 1
    assert f"error: there is no claims file {tmp_path / 'no.py'}\n" in capsys.readouterr().err
    assert call(Path("config/studies/papers.py"), tmp_path) == 1
    assert "it is now " in (line := capsys.readouterr().err) and "/studies/papers.py\n" in line


@pytest.mark.deep
def test_what_is_recorded_with_other_settings_is_not_taken_for_this_run(
    whole, claims, base, capsys
):
    """Nor is what is trained and not recorded: test_sweep.py."""
    before = base.read_text()
    try:
        base.write_text(before.replace("n_embd = 32", "n_embd = 64"))  # the same name and flags
        assert call(claims, whole, "--judge_only") == 1
    finally:
        base.write_text(before)
    assert (
        "was recorded with other settings than its config files have now: undo"
        in capsys.readouterr().err
    )


@pytest.mark.deep
def test_a_dry_run_says_how_many_runs_and_writes_nothing(whole, claims, tmp_path, capsys):
    assert call(claims, tmp_path, "--only=A,tunes", "--dry_run", "--jobs=2") == 0
    first, second, *lines = capsys.readouterr().out.splitlines()
    made = make_experiment(tmp_path, claims)
    wanted = [
        made.run_of(name, made.study.arms[name].lr, s)
        for name in ("fast", "slow")
        for s in TUNING_SEEDS
    ]
    for files in made.study.arms["tuned"].tries:
        rates = [(lr, s) for lr in (1e-2, 2e-2, 4e-2) for s in TUNING_SEEDS]
        wanted += [made.run_of("tuned", lr, s, files) for lr, s in rates]
    wanted = {run.path: run for run in wanted}.values()  # the first rate is that of "fast"
    steps = len(wanted) * STEPS
    assert first == f"{len(wanted)} runs are known now: {steps} steps, {steps * 8 * 32:,} tokens"
    assert second == "more for 2 claims: rates, and 4 to 16 seeds of their arms"
    commands = [shlex.split(line) for line in lines]
    assert {tuple(line[2:-2]) for line in commands} == {run.args for run in wanted}
    assert {line[-1] for line in commands} == {f"--out_dir={run.path}" for run in wanted}
    assert all(
        line[:2] == ["python", "train.py"] and line[-2] == "--init_from=auto" for line in commands
    )
    assert not list(tmp_path.iterdir())
    assert call(claims, whole, WELL, "--dry_run", "--jobs=2") == 0  # all is there
    assert capsys.readouterr().out == "0 runs are known now: 0 steps, 0 tokens\n"


def begin(claims, folder: Path) -> Forked:
    """reproduce.py on one arm; it prints to folder.out."""
    return Forked(folder, alone, "reproduce", *argv(claims, folder, "--only=one", "--jobs=1"))


@pytest.mark.deep
def test_killed_and_stopped_it_goes_on_and_ends_the_same(dataset, tmp_path):
    base = write_base(tmp_path / "base.py", dataset, max_iters=120)
    claims = write_claims(base)
    one = 'Claim("one", "one", Number("fast", "fast"), smallest=1, cannot="one run", seeds=1),'
    claims.write_text(claims.read_text().replace("claims=[", f"claims=[{one}"))
    with in_process():
        assert call(claims, tmp_path / "undisturbed", "--only=one") == 0
    undisturbed = one_run(tmp_path / "undisturbed", "0.01", 1)
    folder = tmp_path / "disturbed"
    run = folder / "out" / "made_up" / undisturbed.name

    process = begin(claims, folder)  # killed, and its train.py too
    wait_for_row(process, run, 38)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)

    process = begin(claims, folder)  # stopped
    wait_for_row(process, run, 50)
    process.terminate()
    assert finish(process, 143)[0].endswith("stopped; the same command goes on from here\n")
    saved = load(run / "last.pt")["step"]
    assert 50 <= saved < 120

    # killed alone: train.py lives on, and the next reproduce.py leaves it alone
    process = begin(claims, folder)
    wait_for_row(process, run, saved + 10)
    child = int(re.match(r"process (\d+)", (run / ".lock").read_text())[1])
    os.kill(child, signal.SIGSTOP)
    process.kill()
    finish(process, -signal.SIGKILL)
    assert f"in use by another run (process {child} " in finish(begin(claims, folder), 1)[1]
    os.kill(child, signal.SIGKILL)

    out = finish(begin(claims, folder), 0)[0]
    words = "run 1 of 1: fast, learning rate 0.01, seed 1: loss "
    assert out.startswith("runs: 1, 1 at a time, in ") and f"\n{words}" in out
    assert_same_run(run, undisturbed)
    assert record(folder)[run.name]["measures"] == {"loss": column(undisturbed, "val_loss")[120]}
    assert not list(folder.rglob("*.tmp"))
