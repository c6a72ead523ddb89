"""Runs compared: the table against curves with known answers, names, damaged folders, differences,
the figure; and report.md, which shows what is in the runs as text, whatever that is."""

import json
import re

import pytest

from nanodnt.run.metrics import smoothed, training_seconds
from studies.analysis import compare
from studies.analysis.compare import (
    compare_runs,
    final_loss_table,
    load_records,
    plain,
    table_cells,
    write_report,
)
from support.analysis import MODEL, TRAIN, make_run
from support.runs import RECORD

HOSTILE = '<img src=x onerror="alert(1)"> & | `code` **b** [a](b) $x$ \n# head'


def table(tmp_path, *runs, baseline=""):
    """The table of runs with these validation losses, named a, b, …, whose schedule ends with
    them."""
    paths = [
        make_run(tmp_path / "abcd"[i], losses, max_iters=max(losses))
        for i, losses in enumerate(runs)
    ]
    return final_loss_table(load_records(paths), baseline)


def test_steps_the_baseline_needs_by_hand(tmp_path):
    rows = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 50: 2.25, 75: 2.5})
    head, first, second = table_cells(rows)
    assert head == [
        "run",
        "steps",
        "tokens",
        "final loss",
        "best",
        "difference",
        "baseline needs",
        "speed-up",
    ]
    assert first == ["a", "200", "2,000", "2.0000", "2.0000", "–", "–", "–"]
    assert second == ["b", "75", "750", "2.5000", "2.2500", "+0.5000", "150 steps", "2.00×"]
    assert (
        compare.format_table([["run", "x"], ["a", "3.25"]])
        == "| run | x    |\n| --- | ---- |\n| a   | 3.25 |"
    )


def test_a_loss_the_baseline_never_reaches_is_not_extrapolated(tmp_path):
    _, row = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 200: 1.0})
    assert (row["difference"], row["baseline_needs"], row["speedup"]) == (-1.0, None, None)


def timed(folder, losses, seconds, **train):
    """A run of 10 tokens a step that trained so many seconds a step."""
    rows = [
        {"step": s, "tokens": 10 * s, "val_loss": x, "tokens_per_s": 10 / seconds}
        for s, x in losses.items()
    ]
    return make_run(folder, rows=rows, max_iters=200, **train)


def test_hours_of_training_to_the_baseline_s_loss_and_to_a_target(tmp_path):
    a = timed(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, 36, target_val_loss=2.5)
    # at 2 after 200 / 3 steps
    b = timed(tmp_path / "b", {0: 4.0, 100: 1.0, 200: 2.5}, 72, target_val_loss=2.5)
    c = timed(tmp_path / "c", {0: 4.0, 200: 2.5}, 36, target_val_loss=2.5)
    d = make_run(tmp_path / "d", target_val_loss=2.5)  # without tokens_per_s
    rows = final_loss_table(load_records([a, b, c, d]))
    assert [row["time_to_loss"] for row in rows] == [2.0, pytest.approx(4 / 3), None, None]
    assert [row["time_to_target"] for row in rows] == [1.5, 1.0, 2.0, None]
    other = final_loss_table(load_records([a, timed(tmp_path / "e", {0: 4.0, 200: 2.0}, 36)]))
    assert [row["time_to_target"] for row in other] == [None, None]


def test_bits_per_byte_stand_beside_losses(tmp_path):
    end = {"step": 200, "tokens": 10, "val_loss": 2.0}
    a, b = (
        make_run(tmp_path / "a", rows=[end | {"val_bpb": 1.25}]),
        make_run(tmp_path / "b", rows=[end]),
    )
    head, *lines = table_cells(final_loss_table(load_records([a, b])))
    assert [line[head.index("bits per byte")] for line in lines] == ["1.2500", "–"]


def test_the_first_crossing_counts_and_no_line_passes_a_loss_that_was_not_finite():
    def step_at(loss, losses):
        return compare.first_step_at(
            [{"step": step, "val_loss": value} for step, value in losses.items()], loss
        )

    up_and_down = {0: 4.0, 100: 2.0, 200: 3.0, 300: 1.0}
    assert [step_at(loss, up_and_down) for loss in (2.5, 2.0, 1.5, 5.0)] == [75, 100, 275, 0]
    assert step_at(3.0, {0: 4.0, 100: None, 200: 2.0}) == 200
    assert step_at(3.0, {0: None, 100: None}) is None


def test_a_diverged_run_ends_with_no_loss_rather_than_its_last_finite_one(tmp_path):
    rows = table(tmp_path, {0: 4.0, 200: 2.0}, {0: 4.0, 50: 3.0, 100: None}, baseline="b")
    assert (rows[1]["step"], rows[1]["loss"], rows[1]["best"]) == (100, None, 3.0)
    assert {
        rows[0][key] for key in ("difference", "baseline_needs", "speedup", "time_to_loss")
    } == {None}


def test_the_baseline_by_name(tmp_path):
    runs = load_records(
        [make_run(tmp_path / name, {0: 4.0, 200: loss}) for name, loss in (("a", 2.0), ("b", 3.0))]
    )
    assert [row["difference"] for row in final_loss_table(runs)] == [None, 1.0]
    assert [row["difference"] for row in final_loss_table(runs, "b")] == [-1.0, None]
    with pytest.raises(ValueError, match="baseline='c' is none of the runs: choose one of a, b"):
        final_loss_table(runs, "c")


@pytest.mark.parametrize(
    "end, state",
    [
        ({"step": 200, "val_loss": 2.0}, None),
        ({"step": 120, "val_loss": 2.0}, "unfinished at step 120 of 200"),
        ({"step": 120, "val_loss": 2.0, "failure": "too bad"}, "failed at step 120"),
    ],
)
def test_the_state_of_a_run(tmp_path, end, state):
    (run,) = load_records([make_run(tmp_path / "a", rows=[end | {"tokens": 1}])])
    assert run.state() == state
    stopped = make_run(
        tmp_path / "b", rows=[end | {"tokens": 1}], record={"end": {"how": "stopped"}}
    )
    assert load_records([stopped])[0].state() == (state and state.replace("unfinished", "stopped"))


@pytest.mark.parametrize(
    "change, field",
    [
        ({"dataset": "verse"}, "dataset"),
        ({"eval_tokens": 7}, "eval_tokens"),
        ({"eval_rows": "first"}, "eval_rows"),
        ({"model": {"block_size": 5}}, "block_size"),
        ({"model": {"vocab_size": 9}}, "vocab_size"),
        ({"model": {"norm": "dyt"}, "seed": 2, "batch_size": 2}, None),
    ],
)
def test_warnings_of_losses_that_are_not_comparable(tmp_path, change, field):
    warnings = compare.find_warnings(
        load_records([make_run(tmp_path / "a"), make_run(tmp_path / "b", **change)])
    )
    assert warnings == (
        [f"losses are not comparable, since these differ: {field}"] if field else []
    )


def test_runs_of_before_there_was_eval_rows_had_spread_rows(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b", eval_rows="spread")]
    file = paths[0] / "config.json"
    config = json.loads(file.read_text())
    config["train"].pop("eval_rows", None)
    file.write_text(json.dumps(config))
    assert compare.find_warnings(load_records(paths)) == []


def test_names_have_parents_where_they_need_them(tmp_path):
    paths = [make_run(tmp_path / part) for part in ("x/1/run", "x/2/run", "other")]
    assert [run.name for run in load_records(paths)] == ["x/1/run", "x/2/run", "other"]
    assert [run.name for run in load_records(paths[1:])] == ["run", "other"]
    assert load_records([make_run(tmp_path / "line\nbreak")])[0].name == "line?break"
    with pytest.raises(ValueError, match="given twice: name each once"):
        load_records([paths[2], f"{paths[2]}/../other"])


RIGHT = {"model": MODEL, "train": TRAIN} | RECORD
BROKEN = {  # text of config.json, None: it is missing
    None: "FileNotFoundError",
    '{"model": {': "JSONDecodeError",
    "[1]": "TypeError",
    json.dumps(RIGHT | {"train": {"max_iters": "x"}}): "ValueError",
    json.dumps({"train": TRAIN}): "KeyError: 'model'",
    "[" * 100_000: "RecursionError",
}


@pytest.mark.parametrize("text", BROKEN, ids=BROKEN.values())
def test_a_damaged_config_is_one_clear_line(tmp_path, text):
    folder = make_run(tmp_path / "run")
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"^[^\n]+config.json is missing or damaged \({BROKEN[text]}[^\n]*$"
    ):
        load_records([folder])


def test_folders_that_are_no_runs(tmp_path):
    (make_run(tmp_path / "run") / "metrics.jsonl").write_text("")
    for name in ("run", "nowhere"):
        with pytest.raises(
            ValueError, match=f"{name} is not the directory of a run: it has no metrics.jsonl, or"
        ):
            load_records([tmp_path / name])


def test_differences_have_the_default_and_leave_out_paths(tmp_path):
    a = make_run(tmp_path / "a", seed=1, optimizer="adamw", out_dir="here")
    changed = {"git_commit": "feed", "versions": {"torch": "2.11.0"}}
    b = make_run(
        tmp_path / "b", model={"norm": "dyt"}, optimizer="muon", out_dir="there", record=changed
    )
    assert compare.find_differences(load_records([a, b])) == [
        ["norm", "model", "rmsnorm", "rmsnorm", "dyt"],
        ["seed", "train", "1337", "1", "–"],
        ["optimizer", "train", "adamw", "adamw", "muon"],
        ["torch", "versions", "–", "2.13.0", "2.11.0"],
        ["commit", "versions", "–", "c0ffee", "feed"],
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
    end = {"tokens_per_s": 1.0, "val_loss": 2.5}
    rows = [
        {"step": step, "tokens": 10 * step, "train_loss": loss}
        for step, loss in ((4, 9.0), (5, 3.0), (100, 2.0))
    ]
    a = make_run(tmp_path / "a", rows=[*rows[:2], rows[2] | end], max_iters=100)
    b = make_run(
        tmp_path / "$x_{$", rows=[*rows[:2], {"step": 50, "tokens": 500, "train_loss": None}]
    )
    compare.draw_losses(load_records([a, b]), tmp_path / "loss.png")
    (figure,) = figures
    # the first steps do not count for the limits: 9 at step 4 is before a twentieth of 100 steps
    assert figure.axes[0].get_ylim() == pytest.approx((2.0 - 0.051, 3.0 + 0.051))
    # raw, smoothed, validation
    curves = [[line.get_xydata().tolist() for line in ax.lines] for ax in figure.axes]
    assert curves[0][1:3] == [[[4, 9], [5, 3], [100, 2]], [[100, 2.5]]]
    assert curves[0][4] == [[4, 9], [5, 3]]  # a loss that is not finite is left out
    assert (curves[1][2], curves[2][2]) == ([[1000, 2.5]], [[pytest.approx(1000 / 3600), 2.5]])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", r"\$x_{\$"]


def page_of(tmp_path, *paths, formats=("png",)):
    runs = load_records(paths)
    comparison = compare_runs(runs, tmp_path, "", formats)
    path = write_report(runs, comparison, tmp_path, ("loss", "gradients"), formats)
    assert path == tmp_path / "report.md" and (tmp_path / f"loss.{formats[0]}").exists()
    return path.read_text(encoding="utf-8")


def test_the_page_shows_what_is_in_the_runs_as_text(tmp_path):
    """Names, commands, settings and records that would be markup, or end their line."""
    ends = [{"step": 100, "tokens": 9, "val_loss": 2.5, "failure": HOSTILE}]
    how = dict(
        rows=ends, dataset=HOSTILE, command=["train.py", HOSTILE, 7], record={"git_commit": HOSTILE}
    )
    a = make_run(tmp_path / "a", command=["train.py", "--x=two words"])
    page = page_of(tmp_path, a, make_run(tmp_path / HOSTILE.replace("/", ""), **how))
    assert not {line for line in page.splitlines() if line.startswith("# ")} - {"# 2 runs compared"}
    # indented by four: code
    text = [line for line in page.splitlines() if not line.startswith("    ")]
    for mark in ("<", "`", "**b", "[a", "$x"):
        assert all(
            line[: line.find(mark)].endswith("\\")
            for line in text
            if mark in line.replace("![", "")
        ), mark
    assert page.count(plain(HOSTILE)) >= 4
    assert {line.replace("\\|", "").count("|") for line in text if line.startswith("|")} == {6, 10}
    assert "    train.py '--x=two words'\n" in page and "commit c0ffee" in page
    assert "failed at step 100" in page and re.search(r"\| 150 steps +\| 1.50× +\|", page)
    assert "**Warning:** losses are not comparable" in page
    assert "](gradients.png)" in page and "](loss.png)" in page
    alone = page_of(tmp_path, a, formats=("pdf",))
    assert "\n[Training and" in alone and "](loss.pdf)" in alone and "png" not in alone
