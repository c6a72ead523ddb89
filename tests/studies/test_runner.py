"""The runs behind sweeps and claims: folders, the tuning of learning rates, the record, and
measures."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from nanodnt.run.console import CLEAR
from nanodnt.tasks import fill_from_dataset, resolve_none
from studies.claims import quantities
from studies.claims.experiment import (
    TUNING_SEEDS,
    Experiment,
    MissingRun,
    Record,
    ReproduceConfig,
    choose_results,
)
from studies.claims.page import format_rate
from studies.claims.study import Claim, Number
from studies.sweep.progress import Progress
from studies.sweep.runner import Runner, is_finished, read_outcome, resolve_configs
from support.claims import flag, make_experiment
from support.terminals import terminal, text_of


def searching(tmp_path, monkeypatch, loss, study="papers", also="seed") -> Experiment:
    """An experiment whose runs with the tuning seeds have the loss `loss(learning rate, value of
    the flag "also")`, at once."""
    made = make_experiment(tmp_path, f"studies/{study}.py")

    def measured(measure, runs):
        assert measure == "loss" and all(int(flag(run, "seed")) in TUNING_SEEDS for run in runs)
        return [loss(float(flag(run, "learning_rate")), flag(run, also)) for run in runs]

    monkeypatch.setattr(made, "measure", measured)
    return made


def valley(best: float):
    return lambda lr, _=None: math.log2(lr / best) ** 2 / 10


# The middle of AdamW's grid is 4e-3.
@pytest.mark.parametrize(
    "loss, best, tried",
    [
        (valley(1.6e-2), 16, {2, 4, 8, 16, 32}),  # grows until the best lies inside
        (valley(1.0), 128, {2, 4, 8, 16, 32, 64, 128, 256}),  # but not for ever
        (lambda *_: None, 0.0625, {4 * 2.0**k for k in range(-6, 2)}),  # all diverged: the lowest
    ],
)
def test_the_grid_grows_until_the_best_rate_lies_inside(loss, best, tried, tmp_path, monkeypatch):
    made = searching(tmp_path, monkeypatch, loss)
    found = made.tune("S1 AdamW")
    assert (
        found.lr == pytest.approx(best * 1e-3) and found.files == made.study.arms["S1 AdamW"].files
    )
    assert list(found.tried) == pytest.approx(sorted(lr * 1e-3 for lr in tried))
    assert all(found.tried[lr] == [loss(lr)] * 2 for lr in found.tried)


def test_rates_that_are_given_or_of_another_arm(tmp_path, monkeypatch):
    made = searching(tmp_path, monkeypatch, valley(8e-3))
    assert made.tune("S4, whole")[::2] == (0.3, {})
    assert made.tune("all blocks")[::2] == (pytest.approx(8e-3), {})  # that of one rate
    assert made.tune("S5 AdamW, 8 × S1's rate").lr == pytest.approx(64e-3)
    assert made.tune("all blocks").files == made.study.arms["all blocks"].files
    paper = searching(tmp_path, monkeypatch, valley(8e-3), "xl")
    assert paper.tune("S5 AdamW").lr is paper.tune("all blocks").lr is None
    assert format_rate("all blocks", paper) == "the config's"
    found = paper.tune("S5 AdamW, 8 × S1's rate")
    assert (
        found.lr == pytest.approx(8 * 1.5e-4)
        and found.files == paper.tune("S5 AdamW").files == "config/dnt_xl.py"
    )
    assert flag(paper.run_of("S1 AdamW", None, 1), "learning_rate") is None  # the config's own
    assert flag(paper.run_of("S1 mSGDW", 8.0, 1), "min_lr") is None  # the config's own floor too


def test_each_of_several_settings_is_tuned_and_the_best_is_taken(tmp_path, monkeypatch):
    best = {None: (2e-3, 2.0), "1": (4e-3, 2.1), "1.2": (1e-3, 1.9), "2": (2e-3, None)}

    def loss(lr, alpha):
        rate, lowest = best[alpha]
        return lowest and lowest + valley(rate)(lr)

    made = searching(tmp_path, monkeypatch, loss, "digits", "dyt_alpha_attn")
    found = made.tune("DyT")
    files = made.study.arms["DyT"].files
    assert (
        found.files == f"{files} --dyt_alpha_attn=1.2 --dyt_alpha_other=1.2"
        and found.lr == pytest.approx(1e-3)
    )
    assert [loss for _, loss in found.variants.values()] == pytest.approx([2.0, 2.1, 1.9, math.inf])
    assert "diverged at" in format_rate("DyT", made)
    (run,) = made.reported("DyT", [3])
    assert flag(run, "dyt_alpha_other") == "1.2"


def test_the_folder_is_of_the_command_but_not_of_what_is_kept(tmp_path):
    made = make_experiment(tmp_path)
    run = made.run_of("one rate", 1e-3, 2)  # which keeps checkpoints
    made.study.arms["one rate"] = made.study.arms["one rate"]._replace(keep=False)
    plain = made.run_of("one rate", 1e-3, 2)
    assert run.path == plain.path and run.path.parent == tmp_path / "out" / "papers"
    assert run.args == (*plain.args, "--keep_every=30")  # ten of 300 steps
    assert (flag(run, "learning_rate"), flag(run, "min_lr"), flag(run, "seed")) == (
        "0.001",
        "5e-05",
        "2",
    )
    others = [
        made.run_of("all blocks", 1e-3, 2),
        made.run_of("one rate", 2e-3, 2),
        made.run_of("one rate", 1e-3, 3),
    ]
    assert len({run.path, *(other.path for other in others)}) == 4
    assert flag(made.run_of("Pre-LN", 1e-3, 1), "beta2") == "0.999"  # the base's
    # the last one wins
    assert flag(made.run_of("Pre-LN", 1e-3, 1, "--beta2=0.9 --learning_rate=7"), "beta2") == "0.9"
    assert flag(made.run_of("Pre-LN", 1e-3, 1, "--learning_rate=7"), "learning_rate") == "0.001"
    assert flag(made.run_of("Pre-LN", 1e-3, 1, "--min_lr=7"), "min_lr") == "7"  # set by hand


def test_a_users_results_are_not_among_the_tracked_ones(tmp_path, monkeypatch):
    """But a record that is there already stays, unless it is that of a claims file of ours."""
    monkeypatch.setattr("studies.claims.experiment.ROOT", tmp_path)
    tracked, own = tmp_path / "docs" / "results", tmp_path / "out"
    for path in ("docs/results/old/record.json", "docs/results/papers/record.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "papers.py").touch()
    for claims, results, folder in (
        ("studies/papers.py", "", tracked),
        ("mine.py", "", own),
        ("papers.py", "", own),
        ("old.py", "", tracked),
        ("old.py", "there", tmp_path / "there"),
    ):
        config = ReproduceConfig(claims=claims, out="out", results=results)
        assert choose_results(config) == folder, claims


def test_how_far_it_is(monkeypatch):
    """Of four runs one was there before; two are trained in 10 s each."""
    progress = Progress()
    now = [progress.began]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress.needed = set("abcd")
    progress.waiting = {"claim"}
    progress.ended.add("a")
    progress.training = {"b": "the run b", "c": "the run c"}
    assert str(progress) == "1 of at least 4 runs | the run b | the run c"
    now[0] += 10
    progress.training.pop("b")
    assert progress.end("b") == "2 of at least 4" and progress.left() == "; at least 0:00:20 left"
    progress.waiting.clear()
    now[0] += 10
    assert str(progress) == "2 of 4 runs; about 0:00:40 left | the run c"
    assert [progress.end(run) for run in "cd"] == ["3 of 4", "4 of 4"] and progress.left() == ""


def test_a_terminal_shows_how_far_it_is(monkeypatch, capsys):
    """And an error stands on a line of its own, on stderr."""
    monkeypatch.setattr("nanodnt.run.console.TICK_S", 0.001)
    runner = Runner(1)
    runner.progress.needed = {"a", "b"}

    def fail() -> None:
        for _ in range(10_000):
            if "0 of 2 runs" in text_of(written):
                break
            time.sleep(0.001)
        raise ValueError("no such data")

    with terminal() as written:
        assert runner.call_all(fail, {"a": ()}) == ([], 1)
    text = text_of(written)
    assert "0 of 2 runs" in text and text.endswith(CLEAR)
    assert capsys.readouterr().err == "error: a: no such data\n"


def test_a_large_study_takes_all_gpus_for_a_run(tmp_path):
    made = make_experiment(tmp_path, "studies/large.py")
    made.runner.processes = 4
    launch = made.runner.launch(made.run_of("one rate", None, 1))
    assert (
        launch[1] == "torch.distributed.run"
        and "--nproc_per_node=4" in launch
        and made.runner.jobs == 1
    )


def test_what_none_means_is_no_other_setting():
    """Older versions wrote dyt_bias=False, and embed_scale=True in the overlays of DyT."""
    text, images = dict(patch_size=0), dict(patch_size=16)
    for old, new in (
        (dict(text, norm="rmsnorm", dyt_bias=False, embed_scale=False), dict(dyt_bias=None)),
        (
            dict(text, norm="dyt", dyt_bias=False, embed_scale=True),
            dict(dyt_bias=None, embed_scale=None),
        ),
    ):
        assert resolve_none(old) == old == resolve_none(old | new)
    old = dict(images, norm="dyt", dyt_bias=False, embed_scale=False)
    assert resolve_none(old) != resolve_none(old | dict(dyt_bias=None))


def test_what_the_dataset_says_of_images_is_no_other_setting(tmp_path):
    """config.json of a run has its images' size, channels and classes, which the command may leave
    to the dataset."""
    run = make_experiment(tmp_path, "studies/digits.py").run_of("DyT", 1e-3, 1)
    model, train = resolve_configs(run.args)
    fill_from_dataset(
        model, {"kind": "images", "image_size": 8, "channels": 1, "classes": range(10)}, "digits"
    )
    left(run.path, {"val_loss": 3.0}, {"failure": "10 steps in a row"})
    (run.path / "config.json").write_text(
        json.dumps(dict(model=asdict(model), train=asdict(train)))
    )
    for flags in ((), ("--image_size=8", "--n_class=10")):
        assert is_finished(run._replace(args=(*run.args, *flags)))
    for word in ("image_size=16", "n_layer=3"):
        with pytest.raises(
            ValueError, match=rf"trained with other settings \({word.partition('=')[0]} "
        ):
            is_finished(run._replace(args=(*run.args, f"--{word}")))


def left(folder: Path, *rows: dict) -> Path:
    """A run directory with these rows."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": 10 * i, "tokens": 0} | row) for i, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_outcomes(tmp_path):
    first, diverged = {"val_loss": 3.9}, ("diverged", None)
    for name, last, outcome in (
        ("better", {"val_loss": 3.0}, ("finished", 3.0)),
        ("worse than at first", {"val_loss": 3.91}, diverged),
        ("failed at an evaluation", {"val_loss": 2.0, "failure": "10 steps in a row"}, diverged),
        ("not finite", {"val_loss": None}, diverged),
    ):
        assert read_outcome(left(tmp_path / name, first, {"train_loss": 1.0}, last)) == outcome, (
            name
        )


def test_top1_is_the_last_one_in_percent(tmp_path):
    rows = (
        {"val_loss": 2.3, "val_top1": 0.125},
        {"val_loss": 0.2, "val_top1": 0.9375},
        {"train_loss": 0.6},
    )
    assert quantities.MEASURES["top-1"](left(tmp_path / "images", *rows)) == 93.75


ABOUT = dict(outcome="finished", seconds=60, machine={"torch": "2"})


def test_the_record_keeps_what_is_measured(tmp_path):
    made = make_experiment(tmp_path)
    run, other = made.run_of("S1 AdamW", 1e-3, 1), made.run_of("S5 AdamW", 1e-3, 1)
    made.record.add(run, "loss", 3.0, **ABOUT)
    make_experiment(tmp_path).record.add(run, "rise", 0.5, **ABOUT)  # started again
    again = make_experiment(tmp_path).record
    again.add(other, "loss", None, **ABOUT | {"outcome": "diverged"})
    again = Record(made.record.path)
    assert again.measures(run) == {"loss": 3.0, "rise": 0.5} and again.measures(other) == {
        "loss": None
    }
    assert again.measures(made.run_of("S5 AdamW", 1e-3, 2)) == {}
    assert again.runs[run.path.name]["args"] == list(run.args)
    made.record.path.write_text("{")
    with pytest.raises(ValueError, match="record.json is damaged: restore it from git"):
        Record(made.record.path)


def test_a_run_is_found_in_other_records(tmp_path):
    made = make_experiment(tmp_path)
    run, own = made.run_of("S1 AdamW", 1e-3, 1), made.run_of("S5 AdamW", 1e-3, 1)
    made.record.add(run, "loss", 3.0, **ABOUT)
    path = tmp_path / "more" / "record.json"
    record = Record(path, [made.record.path])
    record.add(own, "loss", 2.0, **ABOUT)
    assert record.measures(run) == {"loss": 3.0} and set(record.runs) == {own.path.name}
    other = run._replace(args=(*run.args, "--beta2=0.5"))
    with pytest.raises(ValueError) as error:
        record.measures(other)
    assert str(error.value).startswith(f"{made.record.path}: {run.path.name} was recorded with ")
    record.add(run, "rise", 0.5, **ABOUT)  # for a further measure it is trained anew
    record = Record(path, [made.record.path])
    assert record.measures(run) == {"rise": 0.5}  # an entry has the measures of one machine
    assert made.record.measures(run) == {"loss": 3.0}  # the other record is not written to
    with pytest.raises(ValueError, match=r"there is no record .*gone.json, which the claims file"):
        Record(path, [tmp_path / "gone.json"])


def test_threads_share_a_record(tmp_path):
    made = make_experiment(tmp_path)
    runs = [made.run_of("S1 AdamW", 1e-3 * i, 1) for i in range(1, 13)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda run: made.record.add(run, "loss", 3.0, **ABOUT), runs))
    assert set(Record(made.record.path).runs) == {run.path.name for run in runs}


def test_values_by_seed(tmp_path, monkeypatch):
    made, losses = make_experiment(tmp_path), {"S1": [3.0, 3.1, None], "S5": [2.5, None, None]}
    high = {"S1": None, "S5": 2.75}
    seeds = {"S1 AdamW": [1, 2, 3], "S5 AdamW": [1, 2, 3]}
    monkeypatch.setattr(made, "reported", lambda name, seeds: [(name, seed) for seed in seeds])
    monkeypatch.setattr(made, "seeds_of", lambda name, claims=None: seeds.get(name, [1, 2]))

    def measured(measure, runs):
        return [
            high[name[:2]] if "×" in name else losses[name[:2]][seed - 1] for name, seed in runs
        ]

    def values(text, **how):
        return made.values(Number("", text, **how))

    monkeypatch.setattr(made, "measure", measured)
    found = values("S5 AdamW - S1 AdamW")
    assert found[:2] == [-0.5, math.inf] and math.isnan(found[2])  # DNT diverged; both did
    assert values("S1 AdamW - S5 AdamW")[:2] == [0.5, -math.inf]
    assert len(values("S1 Muon - S1 AdamW")) == 2  # those that both have
    # what is no loss says nothing of a run that diverged
    found = values("S5 AdamW", measure="rise")
    assert found[0] == 2.5 and all(map(math.isnan, found[1:]))
    high_rate = "S5 AdamW, 8 × S1's rate - S5 AdamW - S1 AdamW, 8 × S1's rate + S1 AdamW"
    assert all(map(math.isnan, values(high_rate)[1:]))  # S5 diverged at its own best rate
    losses.update({"S1": [3.0, 3.0, 3.0], "S5": [2.5, 2.5, 2.5]})
    assert values(high_rate) == [-math.inf] * 2  # S1 diverged, but only at eight times its rate


def record_of(recorded):
    """Experiment.values, of which only these seeds are recorded: the seeds themselves."""

    def values(number, seeds=None):
        if not set(seeds or recorded) <= set(recorded):
            raise MissingRun
        return seeds

    return values


def test_a_measure_has_the_seeds_of_its_own_claim(tmp_path, monkeypatch):
    """Other claims train more seeds of an arm, of which only the loss is known."""
    made = make_experiment(tmp_path)
    planned, own = Number("", "S5 AdamW"), Number("", "S1 AdamW", measure="rise")
    claim = Claim("one", "", planned, smallest=1.0, sides=(own, Number("", "S1 AdamW")))
    monkeypatch.setattr(
        made, "seeds_of", lambda name, claims=None: [1, 2] if claims == [claim] else [1, 2, 3, 4]
    )
    monkeypatch.setattr(made, "values", lambda number, seeds=None: seeds)
    assert list(made.find_values(claim, 3).values()) == [[1, 2, 3], [1, 2], None]
    # the plan gives it up: all that is recorded is shown
    monkeypatch.setattr(made, "values", record_of([1, 2, 4]))
    assert made.find_values(claim, 0)[planned] == [1, 2, 4]
    monkeypatch.setattr(made, "values", record_of(TUNING_SEEDS))
    assert made.find_values(claim, 0)[planned] == TUNING_SEEDS


def test_how_far_the_loss_rises(tmp_path):
    rows = [{"val_loss": v} for v in (4.0, 3.0, 3.25)]
    assert quantities.MEASURES["rise"](left(tmp_path / "up", *rows)) == pytest.approx(0.25)
    assert quantities.MEASURES["rise"](left(tmp_path / "down", *rows[:2])) == 0


def test_growth_is_counted_from_the_start(monkeypatch):
    # log10, before the first block and after each
    variances = {False: [0.0, 0.1, 1.1], True: [0.0, 0.2, 0.5]}
    monkeypatch.setattr(quantities, "log_variances", lambda path, start=False: variances[start])
    assert quantities.MEASURES["log10 variance growth since the start"](Path()) == pytest.approx(
        1.0 - 0.3
    )
    assert quantities.MEASURES["log10 last variance since the start"](Path()) == pytest.approx(
        1.1 - 0.5
    )


def test_halves_of_the_blocks(monkeypatch):
    """Of six blocks 4 to 6, and 2 and 3: beside the first all else is small. Of four turns the last
    two."""
    found = {"removal": {"drop": [9.0, 2.0, 4.0, 1.0, 1.0, 4.0]}}
    # row i: to each stage
    found["angular"] = {"distance": [[0.0] * (i + 1) + [float(i)] for i in range(4)] + [[]]}
    monkeypatch.setattr(quantities, "measured", lambda path, figure: found[figure])
    assert quantities.MEASURES["removal deep"](Path()) == 2.0
    assert quantities.MEASURES["removal ratio after the first"](Path()) == pytest.approx(2 / 3)
    assert quantities.MEASURES["angular deep"](Path()) == 2.5
