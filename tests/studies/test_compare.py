"""Runs compared: the table against curves with known answers, names, damaged folders, differences, the figure; and
report.md, which shows what is in the runs as text, whatever that is."""

import json
import re

import pytest

from nanodnt.run.metrics import smoothed, training_seconds
from studies.analysis import compare
from studies.analysis.compare import compare_runs, final_loss_table, load_records, plain, table_cells, write_report
from support.analysis import MODEL, TRAIN, make_run
from support.runs import RECORD

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = '<img src=x onerror="alert(1)"> & | `code` **b** [a](b) $x$ \n# head'


def table(tmp_path, *runs):
    """The table of runs with these validation losses, named a, b, …, whose schedule ends with them."""
    paths = [make_run(tmp_path / "abcd"[i], losses, max_iters=max(losses)) for i, losses in enumerate(runs)]
    return final_loss_table(load_records(paths))


def test_steps_the_baseline_needs_by_hand(tmp_path):
    found = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 50: 2.25, 75: 2.5})
    row = found["rows"][1]
    assert (found["baseline"], found["baseline_steps"], found["baseline_loss"]) == ("a", 200, 2.0)
    assert (row["step"], row["tokens"], row["loss"], row["best"], row["difference"]) == (75, 750, 2.5, 2.25, 0.5)
    assert (row["baseline_needs"], row["speedup"], row["reaches_baseline"]) == (150, 2.0, None)
    head, first, line = table_cells(found)
    assert line == ["b", "75", "750", "2.5000", "2.2500", "+0.5000", "150 steps", "2.00×", "not in 75 steps", ""]
    assert first == ["a", "200", "2,000", "2.0000", "2.0000", "–", "–", "–", "–", "baseline"] and len(head) == 10
    assert compare.format_table([["run", "x"], ["a", "3.25"]]) == "| run | x    |\n| --- | ---- |\n| a   | 3.25 |"


def test_a_loss_the_baseline_never_reaches_is_not_extrapolated(tmp_path):
    found = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 200: 1.0})
    row = found["rows"][1]
    assert (row["baseline_needs"], row["speedup"]) == (None, None)
    assert row["reaches_baseline"] == pytest.approx(400 / 3)  # down from 4 to 1 in 200 steps: at 2 after two thirds
    assert "> 200 steps, needs a longer baseline" in table_cells(found)[2]
    assert "at 133" in table_cells(found)[2]


def timed(folder, losses, seconds, **train):
    """A run of 10 tokens a step that trained so many seconds a step."""
    rows = [{"step": s, "tokens": 10 * s, "val_loss": x, "tokens_per_s": 10 / seconds} for s, x in losses.items()]
    return make_run(folder, rows=rows, max_iters=200, **train)


def test_hours_of_training_to_the_baseline_s_loss_and_to_a_target(tmp_path):
    a = timed(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, 36, target_val_loss=2.5)
    b = timed(tmp_path / "b", {0: 4.0, 100: 1.0, 200: 2.5}, 72, target_val_loss=2.5)  # at 2 after 200 / 3 steps
    c = timed(tmp_path / "c", {0: 4.0, 200: 2.5}, 36, target_val_loss=2.5)
    d = make_run(tmp_path / "d", target_val_loss=2.5)  # without tokens_per_s
    found = final_loss_table(load_records([a, b, c, d]))
    hours = [[row[key] for row in found["rows"]] for key in ("time_to_loss", "time_to_target")]
    assert hours[0] == [2.0, pytest.approx(4 / 3), None, None] and hours[1] == [1.5, 1.0, 2.0, None]
    cells = [dict(zip(table_cells(found)[0], line, strict=True)) for line in table_cells(found)[1:]]
    assert [line["hours to baseline's loss"] for line in cells] == ["2", "1.33", "–", "–"]
    assert [line["hours to 2.5"] for line in cells] == ["1.5", "1", "2", "–"]
    alone = table_cells(final_loss_table(load_records([a])))[0]
    assert "hours to 2.5" in alone and "hours to baseline's loss" not in alone
    other = final_loss_table(load_records([a, timed(tmp_path / "e", {0: 4.0, 200: 2.0}, 36)]))
    assert other["target"] is None and [row["time_to_target"] for row in other["rows"]] == [None, None]


def test_bits_per_byte_stand_beside_losses(tmp_path):
    end = {"step": 1, "tokens": 10, "val_loss": 2.0}
    a, b = make_run(tmp_path / "a", rows=[end | {"val_bpb": 1.25}]), make_run(tmp_path / "b", rows=[end])
    head, *lines = table_cells(final_loss_table(load_records([a, b])))
    assert [line[head.index("bits per byte")] for line in lines] == ["1.2500", "–"]
    assert "bits per byte" not in table_cells(final_loss_table(load_records([b])))[0]


def test_the_first_crossing_counts_and_no_line_passes_a_loss_that_was_not_finite():
    def step_at(loss, losses):
        return compare.first_step_at([{"step": step, "val_loss": value} for step, value in losses.items()], loss)

    up_and_down = {0: 4.0, 100: 2.0, 200: 3.0, 300: 1.0}
    assert [step_at(loss, up_and_down) for loss in (2.5, 2.0, 1.5, 5.0)] == [75, 100, 275, 0]
    assert step_at(3.0, {0: 4.0, 100: None, 200: 2.0}) == 200
    assert step_at(3.0, {0: None, 100: None}) is None


def test_a_diverged_run_ends_with_no_loss_rather_than_its_last_finite_one(tmp_path):
    found = table(tmp_path, {0: 4.0, 200: 2.0}, {0: 4.0, 50: 3.0, 100: None})
    row = found["rows"][1]
    assert (row["step"], row["loss"], row["best"], row["state"]) == (100, None, 3.0, "loss not finite")
    assert {row[k] for k in ("difference", "baseline_needs", "speedup", "reaches_baseline")} == {None}
    against = final_loss_table(load_records([tmp_path / "a", tmp_path / "b"]), "b")
    row = against["rows"][0]
    assert (against["baseline_loss"], against["baseline_steps"], row["difference"]) == (None, 50, None)
    assert (row["baseline_needs"], row["reaches_baseline"]) == (None, None)
    assert "> 50 steps, needs a longer baseline" in table_cells(against)[1]


def test_the_baseline_by_name_or_path(tmp_path):
    paths = [make_run(tmp_path / name) for name in "ab"]
    runs = load_records(paths)
    for name in ("b", str(paths[1]), f"{paths[1]}/"):
        assert final_loss_table(runs, name)["baseline"] == "b"
    with pytest.raises(ValueError, match="baseline='c' is none of the runs: choose one of a, b"):
        final_loss_table(runs, "c")


@pytest.mark.parametrize(
    "rows, state",
    [
        ([{"step": 200, "tokens": 1, "val_loss": 2.0}], ""),
        ([{"step": 120, "tokens": 1, "val_loss": 2.0}], "at step 120 of 200"),
        ([{"step": 120, "tokens": 1, "val_loss": 2.0, "failure": "too bad"}], "failed at step 120"),
        ([{"step": 200, "tokens": 1, "train_loss": 2.0}], "never evaluated"),
        (
            [{"step": 9, "tokens": 1, "rollbacks": 2}, {"step": 200, "tokens": 1, "val_loss": None}],
            "loss not finite, 2 roll-backs",
        ),
    ],
)
def test_the_state_of_a_run(tmp_path, rows, state):
    (run,) = load_records([make_run(tmp_path / "a", rows=rows)])
    assert run.state() == state
    (row,) = final_loss_table([run])["rows"]
    assert (row["step"], row["state"]) == (rows[-1]["step"], state)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dataset": "verse"}, "not comparable.*dataset is words, but verse .b.$"),
        ({"eval_tokens": 7}, "not comparable.*eval_tokens is 100, but 7 .b.$"),
        ({"model": {"block_size": 5}}, "not comparable.*block_size is 10, but 5 .b.$"),
        ({"model": {"vocab_size": 9}}, "not comparable.*vocab_size is 50, but 9 .b.$"),
        ({"batch_size": 2}, "a step is not the same number of tokens.*batch_size is 1, but 2 .b.$"),
        ({"max_iters": 400}, "the baseline's schedule .400 steps. is no longer than another run's"),
        ({"losses": {0: 4.0, 90: 3.0}}, "different numbers of tokens"),
        ({"model": {"norm": "dyt"}, "seed": 2}, None),
    ],
)
def test_warnings_of_what_makes_the_table_mean_less(tmp_path, change, words):
    long = make_run(tmp_path / "a", max_iters=400)  # a baseline with a longer schedule, as speed-ups need
    warnings = final_loss_table(load_records([long, make_run(tmp_path / "b", **change)]))["warnings"]
    assert len(warnings) == bool(words)
    assert not words or re.search(words, warnings[0])


def test_names_have_parents_where_they_need_them(tmp_path):
    paths = [make_run(tmp_path / part) for part in ("x/1/run", "x/2/run", "y/2/run", "other")]
    assert [run.name for run in load_records(paths)] == ["x/1/run", "x/2/run", "y/2/run", "other"]
    assert [run.name for run in load_records(paths[:2])] == ["1/run", "2/run"]
    assert [run.name for run in load_records(paths[2:])] == ["run", "other"]
    assert load_records([make_run(tmp_path / "line\nbreak")])[0].name == "line?break"
    with pytest.raises(ValueError, match="other is given twice: name each run once"):
        load_records([paths[3], f"{paths[3]}/../other"])


RIGHT = {"model": MODEL, "train": TRAIN} | RECORD
BROKEN = {  # text of config.json, None: it is missing
    None: "FileNotFoundError",
    '{"model": {': "JSONDecodeError",
    "[1]": "TypeError",
    json.dumps(RIGHT | {"command": "x"}): "ValueError: command of a wrong kind",
    json.dumps(RIGHT | {"train": {"max_iters": "x"}}): "ValueError: max_iters of a wrong kind",
    json.dumps({"train": TRAIN}): "KeyError: 'model'",
    "[" * 100_000: "RecursionError",
}


@pytest.mark.parametrize("text", BROKEN, ids=BROKEN.values())
def test_a_damaged_config_is_one_clear_line(tmp_path, text):
    folder = make_run(tmp_path / "run")
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^[^\n]+config.json is missing or damaged \({BROKEN[text]}[^\n]*$"):
        load_records([folder])


def test_folders_that_are_no_runs(tmp_path):
    (make_run(tmp_path / "run") / "metrics.jsonl").write_text("")
    for name in ("run", "nowhere"):
        with pytest.raises(ValueError, match=f"{name} is not the directory of a run: it has no metrics.jsonl, or"):
            load_records([tmp_path / name])


def test_differences_have_the_default_and_leave_out_paths(tmp_path):
    a = make_run(tmp_path / "a", seed=1, optimizer="adamw", out_dir="here")
    changed = {"git_changed_files": [" M model.py"], "versions": {"torch": "2.11.0"}}
    b = make_run(tmp_path / "b", model={"norm": "dyt"}, optimizer="muon", out_dir="there", record=changed)
    found = compare.find_differences(load_records([a, b]))
    assert [tuple(line.values()) for line in found] == [
        ("model", "norm", "rmsnorm", ["rmsnorm", "dyt"]),
        ("train", "seed", "1337", ["1", "–"]),
        ("train", "optimizer", "adamw", ["adamw", "muon"]),
        ("versions", "torch", "–", ["2.13.0", "2.11.0"]),
        ("versions", "commit", "–", ["c0ffee", "c0ffee, changed files: 1"]),
    ]


def test_hours_of_training_leave_out_what_is_not_training():
    rows = [
        {"step": 0, "tokens": 0, "val_loss": 4.0},
        {"step": 1, "tokens": 3600, "tokens_per_s": 1.0},  # an hour
        {"step": 2, "tokens": 5400, "val_loss": 3.0},  # between two measurements
        {"step": 3, "tokens": 7200, "tokens_per_s": 2.0},  # half an hour for 3600 tokens
        {"step": 4, "tokens": 9000, "tokens_per_s": None},
    ]
    assert training_seconds(rows) == [3600 * hours for hours in (0, 1, 1.25, 1.5, 1.5)]
    assert training_seconds(rows[:1]) is None


def test_smoothing_is_centred_and_shorter_at_the_ends():
    assert smoothed([3.0, 0.0, 6.0, 0.0, 0.0], 0.6) == [1.5, 3, 2, 2, 0]
    assert smoothed([3.0, 1.0, 6.0], 0.0) == [3, 1, 6]
    assert smoothed([], 0.5) == []


def test_what_the_figure_draws(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(compare.plt, "close", figures.append)
    # the first steps do not count for the limits: 9 at step 4 is before a twentieth of 100 steps
    first = [{"step": 0, "tokens": 0, "val_loss": 9.5}, {"step": 4, "tokens": 40, "train_loss": 9.0}]
    second = [{"step": 5, "tokens": 50, "train_loss": 3.0}, {"step": 100, "tokens": 1000, "train_loss": 2.0}]
    end = {"tokens_per_s": 1.0, "val_loss": 2.5}
    a = make_run(tmp_path / "a", rows=[*first, second[0], second[1] | end], max_iters=100)
    b = make_run(tmp_path / "$x_{$", rows=[*first, second[0], {"step": 50, "tokens": 500, "train_loss": None}])
    compare.draw_losses(load_records([a, b]), tmp_path / "loss.png", smooth=0.0)
    (figure,) = figures
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    steps, tokens, hours = figure.axes
    assert steps.get_ylim() == pytest.approx((2.0 - 0.051, 3.0 + 0.051))
    curves = [[line.get_xydata().tolist() for line in axis.lines] for axis in figure.axes]
    raw, smooth, val = curves[0][:3]
    assert raw == smooth == [[4, 9], [5, 3], [100, 2]] and val == [[0, 9.5], [100, 2.5]]
    assert curves[0][3] == [[4, 9], [5, 3]]  # a loss that is not finite is left out
    assert [len(lines) for lines in curves] == [6, 6, 3]  # run b has no tokens per second
    assert curves[1][2] == [[0, 9.5], [1000, 2.5]]
    assert curves[2][2] == [[0, 9.5], [pytest.approx(1000 / 3600), 2.5]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "$x_{$"]
    assert "without evaluation" in hours.get_xlabel() and tokens.get_xlabel() == "tokens"


def test_compare_writes_what_it_returns(tmp_path):
    runs = load_records([make_run(tmp_path / "a"), make_run(tmp_path / "b", {0: 4.0, 200: None})])
    found = compare_runs(runs, tmp_path, baseline="b", smooth=0.1)
    text = (tmp_path / "compare.json").read_text()
    assert json.loads(text) == found and "NaN" not in text
    assert found["table"]["baseline"] == "b" and found["smooth"] == 0.1
    assert (tmp_path / found["figure"]).read_bytes().startswith(PNG)


def page_of(tmp_path, *paths, figures=("loss", "gradients")):
    runs = load_records(paths)
    path = write_report(runs, compare_runs(runs, tmp_path), tmp_path, figures)
    assert path == tmp_path / "report.md"
    return path.read_text(encoding="utf-8")


def test_the_page_shows_what_is_in_the_runs_as_text(tmp_path):
    """Names, commands, settings and records that would be markup, or end their line."""
    ends = [{"step": 100, "tokens": 9, "val_loss": 2.5, "failure": HOSTILE}]
    how = dict(rows=ends, dataset=HOSTILE, command=["train.py", HOSTILE, 7])
    how |= dict(record={"git_commit": HOSTILE, "started": HOSTILE})
    a = make_run(tmp_path / "a", command=["train.py", "--x=two words"])
    page = page_of(tmp_path, a, make_run(tmp_path / HOSTILE.replace("/", ""), **how))
    assert not {line for line in page.splitlines() if line.startswith("# ")} - {"# 2 runs compared"}
    text = [line for line in page.splitlines() if not line.startswith("    ")]  # indented by four: code
    for mark in ("<", "`", "**b", "[a", "$x"):
        assert all(line[: line.find(mark)].endswith("\\") for line in text if mark in line.replace("![", "")), mark
    assert "\\<img src=x" in page and page.count(plain(HOSTILE)) >= 4
    tables = [line for line in text if line.startswith("|")]
    assert len(tables) == 8  # where they end: 4 lines; the data
    assert {line.replace("\\|", "").count("|") for line in tables} == {6, 11}
    assert "    train.py '--x=two words'\n" in page and "commit c0ffee" in page
    assert "failed at step 100" in page and re.search(r"\| 150 steps +\| 1.50× +\|", page)
    assert "**Warning:** losses are not comparable" in page
    assert "After DNT, Fig. 1.\n\n![Gradient entries" in page and "](gradients.png)" in page and "](loss.png)" in page


def test_one_run_alone_and_runs_alike(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "mine"), figures=["loss"])
    assert page.startswith("# Run mine\n") and "| 2.0000 " in page
    assert "baseline" not in page and "What differs" not in page
    assert "Nothing in their configuration" in page_of(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
