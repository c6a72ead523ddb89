"""Runs beside each other: the table against curves with known answers, names, differences, figure and page."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report

PNG = b"\x89PNG\r\n\x1a\n"
MODEL = {"n_embd": 768, "block_size": 10, "vocab_size": 50, "norm": "rmsnorm"}
TRAIN = {"dataset": "words", "batch_size": 1, "eval_tokens": 100, "max_iters": 200, "out_dir": "somewhere"}
RECORD = {"versions": {"torch": "2.13.0"}, "git_commit": "c0ffee", "git_changed_files": []}


def make(folder, losses=None, rows=None, model=None, command=("train.py",), record=None, **train):
    """A run directory with these validation losses {step: loss}, at 10 tokens a step, or with these rows."""
    folder.mkdir(parents=True)
    losses = {0: 4.0, 100: 3.0, 200: 2.0} if losses is None else losses
    rows = rows or [{"step": step, "tokens": 10 * step, "val_loss": loss} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (
        {"model": MODEL | (model or {}), "train": TRAIN | train, "command": list(command)} | RECORD | (record or {})
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def table(tmp_path, *runs, baseline=""):
    """The table of runs with these validation losses, named a, b, …, whose schedule ends with them."""
    paths = [make(tmp_path / "abcd"[i], losses, max_iters=max(losses)) for i, losses in enumerate(runs)]
    return report.terminal_table(report.load_runs(paths), baseline)


# --------------------------------------------------------------------------------------------- where the runs end


def test_steps_the_baseline_needs_by_hand(tmp_path):
    found = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 50: 2.25, 75: 2.5})
    row = found["rows"][1]
    assert (found["baseline"], found["baseline_steps"], found["baseline_loss"]) == ("a", 200, 2.0)
    assert (row["step"], row["tokens"], row["loss"], row["best"], row["difference"]) == (75, 750, 2.5, 2.25, 0.5)
    assert (row["baseline_needs"], row["speedup"], row["reaches_baseline"]) == (150, 2.0, None)
    first, line = report.terminal_text(found).splitlines()[1:3]
    assert line.split() == "b 75 750 2.5000 2.2500 +0.5000 150 steps 2.00× not in 75 steps".split()
    assert first.split() == "a 200 2,000 2.0000 2.0000 – – – – baseline".split()


def test_a_loss_the_baseline_never_reaches_is_not_extrapolated(tmp_path):
    found = table(tmp_path, {0: 4.0, 100: 3.0, 200: 2.0}, {0: 4.0, 200: 1.0})
    row = found["rows"][1]
    assert (row["baseline_needs"], row["speedup"]) == (None, None)
    assert row["reaches_baseline"] == pytest.approx(400 / 3)  # down from 4 to 1 in 200 steps: at 2 after two thirds
    assert "> 200 steps, needs a longer baseline" in report.terminal_text(found)
    assert "at 133" in report.terminal_text(found)


def test_the_first_crossing_counts_and_no_line_passes_a_loss_that_was_not_finite(tmp_path):
    up_and_down = [(0, 0, 4.0), (100, 0, 2.0), (200, 0, 3.0), (300, 0, 1.0)]
    assert report.reached(up_and_down, 2.5) == 75
    assert report.reached(up_and_down, 2.0) == 100
    assert report.reached(up_and_down, 1.5) == 275
    assert report.reached(up_and_down, 5.0) == 0
    assert report.reached([(0, 0, 4.0), (100, 0, None), (200, 0, 2.0)], 3.0) == 200
    assert report.reached([(0, 0, None), (100, 0, None)], 3.0) is None


def test_a_diverged_run_ends_with_no_loss_rather_than_its_last_finite_one(tmp_path):
    found = table(tmp_path, {0: 4.0, 200: 2.0}, {0: 4.0, 50: 3.0, 100: None})
    row = found["rows"][1]
    assert (row["step"], row["loss"], row["best"], row["state"]) == (100, None, 3.0, "loss not finite")
    assert {row[k] for k in ("difference", "baseline_needs", "speedup", "reaches_baseline")} == {None}
    against = report.terminal_table(report.load_runs([tmp_path / "a", tmp_path / "b"]), "b")
    row = against["rows"][0]
    assert (against["baseline_loss"], against["baseline_steps"], row["difference"]) == (None, 50, None)
    assert (row["baseline_needs"], row["reaches_baseline"]) == (None, None)
    assert "> 50 steps, needs a longer baseline" in report.terminal_text(against)


def test_the_baseline_by_name_or_path(tmp_path):
    paths = [make(tmp_path / name) for name in "ab"]
    runs = report.load_runs(paths)
    for name in ("b", str(paths[1]), f"{paths[1]}/"):
        assert report.terminal_table(runs, name)["baseline"] == "b"
    with pytest.raises(ValueError, match="baseline='c' is none of the runs: choose one of a, b"):
        report.terminal_table(runs, "c")


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
    (run,) = report.load_runs([make(tmp_path / "a", rows=rows)])
    assert run.state() == state
    (row,) = report.terminal_table([run])["rows"]
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
    long = make(tmp_path / "a", max_iters=400)  # a baseline with a longer schedule, as the paper has it
    warnings = report.terminal_table(report.load_runs([long, make(tmp_path / "b", **change)]))["warnings"]
    assert len(warnings) == bool(words)
    assert not words or re.search(words, warnings[0])


# ------------------------------------------------------------------------------------------------- names and folders


def test_names_have_as_many_parents_as_they_need(tmp_path):
    paths = [make(tmp_path / part) for part in ("x/1/run", "x/2/run", "y/2/run", "other")]
    assert [run.name for run in report.load_runs(paths)] == ["1/run", "x/2/run", "y/2/run", "other"]
    assert [run.name for run in report.load_runs(paths[:2])] == ["1/run", "2/run"]
    assert report.load_runs([make(tmp_path / "line\nbreak")])[0].name == "line?break"
    with pytest.raises(ValueError, match="other is given twice: name each run once"):
        report.load_runs([paths[3], f"{paths[3]}/../other"])


def broken(tmp_path, name):
    """A run directory that is damaged as `name` says."""
    folder = make(tmp_path / "run")
    file, text = {
        "no rows": ("metrics.jsonl", ""),
        "foreign rows": ("metrics.jsonl", "hello\n{}\n"),
        "cut short": ("config.json", '{"model": {'),
        "a list": ("config.json", "[1]"),
        "no model": ("config.json", json.dumps({"train": TRAIN, "command": []} | RECORD)),
        "wrong kind": ("config.json", json.dumps({"model": MODEL, "train": TRAIN, "command": "x"} | RECORD)),
        "no steps": ("config.json", json.dumps({"model": MODEL, "train": {"max_iters": "x"}, "command": []} | RECORD)),
        "too deep": ("config.json", "[" * 100_000),
    }[name]
    (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize(
    "name, words",
    [
        ("no rows", "run is not the directory of a run: it has no metrics.jsonl, or one without rows"),
        ("foreign rows", "metrics.jsonl:1 is not a metrics row"),
        ("cut short", "config.json is missing or damaged .JSONDecodeError"),
        ("a list", "config.json is missing or damaged .TypeError"),
        ("no model", "config.json is missing or damaged .KeyError: 'model'"),
        ("wrong kind", "config.json is missing or damaged .ValueError: command of a wrong kind"),
        ("no steps", "config.json is missing or damaged .ValueError: max_iters of a wrong kind"),
        ("too deep", "config.json is missing or damaged"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(tmp_path, name, words):
    with pytest.raises(ValueError, match=words) as error:
        report.load_runs([broken(tmp_path, name)])
    assert "\n" not in str(error.value)


def test_a_folder_that_is_none_and_one_without_config(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not the directory of a run"):
        report.load_runs([tmp_path / "nowhere"])
    (make(tmp_path / "run") / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing or damaged .FileNotFoundError"):
        report.load_runs([tmp_path / "run"])


def test_differences_have_the_default_and_leave_out_paths(tmp_path):
    a = make(tmp_path / "a", seed=1, optimizer="adamw", out_dir="here")
    changed = {"git_changed_files": [" M model.py"], "versions": {"torch": "2.11.0"}}
    b = make(tmp_path / "b", model={"norm": "dyt"}, optimizer="muon", out_dir="there", record=changed)
    found = report.differences(report.load_runs([a, b]))
    assert [tuple(line.values()) for line in found] == [
        ("model", "norm", "rmsnorm", ["rmsnorm", "dyt"]),
        ("train", "seed", "1337", ["1", "–"]),
        ("train", "optimizer", "adamw", ["adamw", "muon"]),
        ("versions", "torch", "–", ["2.13.0", "2.11.0"]),
        ("versions", "commit", "–", ["c0ffee", "c0ffee, changed files: 1"]),
    ]


# ---------------------------------------------------------------------------------------------------------- losses


def test_hours_of_training_leave_out_what_is_not_training():
    rows = [
        {"step": 0, "tokens": 0, "val_loss": 4.0},
        {"step": 1, "tokens": 3600, "tokens_per_s": 1.0},  # an hour
        {"step": 2, "tokens": 5400, "val_loss": 3.0},  # between two measurements
        {"step": 3, "tokens": 7200, "tokens_per_s": 2.0},  # half an hour for 3600 tokens
        {"step": 4, "tokens": 9000, "tokens_per_s": None},
    ]
    assert report.training_hours(rows) == [0, 1, 1.25, 1.5, 1.5]
    assert report.training_hours(rows[:1]) is None


def test_smoothing_is_centred_and_shorter_at_the_ends():
    assert report.smoothed([3.0, 0.0, 6.0, 0.0, 0.0], 0.6) == [1.5, 3, 2, 2, 0]
    assert report.smoothed([3.0, 1.0, 6.0], 0.0) == [3, 1, 6]
    assert report.smoothed([], 0.5) == []


def test_what_the_figure_draws(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.plt, "close", figures.append)
    # the first steps do not count for the limits: 9 at step 4 is before a twentieth of 100 steps
    first = [{"step": 0, "tokens": 0, "val_loss": 9.5}, {"step": 4, "tokens": 40, "train_loss": 9.0}]
    second = [{"step": 5, "tokens": 50, "train_loss": 3.0}, {"step": 100, "tokens": 1000, "train_loss": 2.0}]
    end = {"tokens_per_s": 1.0, "val_loss": 2.5}
    a = make(tmp_path / "a", rows=[*first, second[0], second[1] | end], max_iters=100)
    b = make(tmp_path / "$x_{$", rows=[*first, second[0], {"step": 50, "tokens": 500, "train_loss": None}])
    report.draw_losses(report.load_runs([a, b]), tmp_path / "loss.png", 0.0)
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
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["a", "$x_{$"]
    assert "without evaluation" in hours.get_xlabel() and tokens.get_xlabel() == "tokens"


def test_compare_writes_what_it_returns(tmp_path):
    runs = report.load_runs([make(tmp_path / "a"), make(tmp_path / "b", {0: 4.0, 200: None})])
    found = report.compare(runs, tmp_path / "new" / "out", baseline="b", smooth=0.1)
    text = (tmp_path / "new/out/compare.json").read_text()
    assert json.loads(text) == found and "NaN" not in text
    assert found["table"]["baseline"] == "b" and found["smooth"] == 0.1
    assert (tmp_path / "new/out" / found["figure"]).read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="smooth=1 must be at least 0 and below 1"):
        report.compare(runs, tmp_path, smooth=1)


# ---------------------------------------------------------------------------------------------------------- the page

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page read strictly: every element closed in order; `seen`: (tag, attributes) in order; `text`: all text."""

    def __init__(self, source: str):
        super().__init__()
        self.open, self.seen, self.texts = [], [], []
        self.feed(source)
        self.close()
        assert self.open == [], "not closed"
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag
        self.texts.append(" ")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def attributes(self, tag):
        return [attrs for name, attrs in self.seen if name == tag]


HOSTILE = '<img src=x onerror="alert(1)">&amp;'


def page_of(tmp_path, paths, figures=("loss.png", "gradients.png", "<b>.png")):
    runs = report.load_runs(paths)
    report.compare(runs, tmp_path / "out")
    for name in figures[1:]:
        (tmp_path / "out" / name).write_bytes((tmp_path / "out/loss.png").read_bytes())
    path = report.write_report(runs, tmp_path / "out", [tmp_path / "out" / name for name in figures])
    assert path == tmp_path / "out" / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def hostile(tmp_path):
    """The page of two runs whose names, commands, settings and records try to be HTML."""
    evil = "</code></pre><script>alert(1)</script>"
    ends = [{"step": 100, "tokens": 9, "val_loss": 2.5, "failure": evil}]
    record = {"git_commit": evil, "started": evil}
    b = make(tmp_path / HOSTILE, rows=ends, dataset=evil, command=["train.py", evil, 7], record=record)
    return page_of(tmp_path, [make(tmp_path / "a", command=["train.py", "--x=two words"]), b])


def test_the_page_is_whole_and_loads_nothing(hostile, tmp_path):
    source = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert source.startswith("<!doctype html>") and "http://" not in source and "https://" not in source
    tags = {tag for tag, _ in hostile.seen}
    assert {"title", "h1", "h2", "table", "th", "figure", "figcaption"} <= tags
    assert not tags & {"script", "link", "iframe", "object", "base", "form"}
    assert "url(" not in source and "@import" not in source
    images = hostile.attributes("img")
    assert len(images) == 3
    for image in images:
        kind, content = image["src"].split(",")
        assert kind == "data:image/png;base64" and image["alt"]
        assert base64.b64decode(content, validate=True) == (tmp_path / "out/loss.png").read_bytes()
    assert {th["scope"] for th in hostile.attributes("th")} == {"row", "col"}
    policy = {m["http-equiv"]: m["content"] for m in hostile.attributes("meta") if "http-equiv" in m}
    assert policy["Content-Security-Policy"].startswith("default-src 'none'; img-src data:;")


def test_the_page_shows_what_is_in_the_runs_as_text(hostile):
    known = {"charset", "name", "content", "http-equiv", "lang", "class", "role", "tabindex", "aria-label", "scope"}
    assert {key for _, attrs in hostile.seen for key in attrs} == known | {"src", "alt"}
    assert hostile.text.count(HOSTILE) >= 3  # in the table, the differences, the list of commands
    assert "<script>alert(1)</script>" in hostile.text
    assert "train.py '--x=two words'" in hostile.text and "commit c0ffee" in hostile.text
    assert "failed at step 100" in hostile.text and " 150 steps 1.50× " in hostile.text
    assert "losses are not comparable" in hostile.text and "After DNT, Fig. 1." in hostile.text


def test_one_run_alone_has_a_page_without_comparison(tmp_path):
    page = page_of(tmp_path, [make(tmp_path / "mine")], ("loss.png",))
    assert "Run mine" in page.text and "2.0000" in page.text
    assert "baseline" not in page.text and "What differs" not in page.text


def test_runs_alike_and_figures_that_are_none(tmp_path):
    paths = [make(tmp_path / "a"), make(tmp_path / "b")]
    assert "Nothing in their configuration" in page_of(tmp_path, paths).text
    runs, bad = report.load_runs(paths), tmp_path / "bad.png"
    with pytest.raises(ValueError, match="cannot read the figure .*bad.png .No such file"):
        report.write_report(runs, tmp_path, [bad])
    bad.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="bad.png is not a PNG image: draw it again"):
        report.write_report(runs, tmp_path, [bad])
    assert not (Path(tmp_path) / "report.html").exists()
