"""What the pages on the claims say, for made-up losses: Holm's correction in the verdicts, what too high a rate costs,
and what is missing."""

import math

import pytest

from studies.claims.judge import judge
from studies.claims.page import HIGHEST, draw_robustness, find_curves, render_page, robustness_rows, verdict_rows
from studies.sweep.runner import MissingRun
from support.claims import flag, make_experiment

pytestmark = pytest.mark.usefixtures("one_thread")
NOISE = (0.0, 0.01, -0.01, 0.02, -0.02, 0.015, -0.015, 0.005, -0.005, 0.0)  # by seed


def invent_losses(tmp_path, monkeypatch, loss):
    """An experiment in which `loss(run)` has been measured: a number, None for diverged; MissingRun if it raises it."""
    made = make_experiment(tmp_path, judge_only=True)
    monkeypatch.setattr(
        made, "measure", lambda measure, run: loss(run) if measure == "loss" else NOISE[int(flag(run, "seed"))]
    )
    monkeypatch.setattr(made.record, "measures", lambda run: {"loss": loss(run)})
    return made


def has(run, file: str) -> bool:
    return any(arg.endswith(file) for arg in run.args)


def valley(run, best: float, floor: float) -> float:
    """A loss of `floor` at the best rate that rises by 0.1 · log2² beside it."""
    return floor + 0.1 * math.log2(float(flag(run, "learning_rate")) / best) ** 2


def test_verdicts_are_corrected_for_all_claims(tmp_path, monkeypatch):
    """S5 under Muon is lower by 0.05 with a spread whose p is about 0.01: alone a sign, among twelve claims none."""

    def loss(run):
        if not has(run, "muon.py"):
            raise MissingRun
        seed = int(flag(run, "seed"))
        better = 0.05 + 3 * NOISE[seed] if has(run, "s5.py") and seed else 0.0
        return valley(run, 8e-3, 3.0) - better

    made = invent_losses(tmp_path, monkeypatch, loss)
    found = judge(made)
    assert set(found) == {"dnt-muon"}
    row = found["dnt-muon"]
    raw = row["p"] / 12
    assert 0.004 < raw < 0.05 < row["p"] and row["class"] == "undecided"
    assert row["why"].startswith(f"p = {row['p']:.2g} after Holm's correction")


def test_what_too_high_a_rate_costs(tmp_path, monkeypatch):
    def loss(run):
        if flag(run, "seed") != "0" or not (has(run, "s1.py") or has(run, "s5.py")):
            raise MissingRun
        rate, best = float(flag(run, "learning_rate")), 4e-3
        if has(run, "s1.py") and rate > 20e-3:
            return None if rate > 40e-3 else 4.0
        return 3.0 + 0.1 * abs(math.log2(rate / best))

    made = invent_losses(tmp_path, monkeypatch, loss)
    curves = find_curves(made)
    assert robustness_rows(curves)[1:3] == [
        ["AdamW", "S1", "0.004", "3.000", "+0.200", "+1.000", "diverged"],
        ["AdamW", "S5", "0.004", "3.000", "+0.200", "+0.300", "+0.400"],
    ]
    *_, rises = curves["AdamW", "S1"]
    assert list(rises) == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0] and rises[16.0] is None
    drawn = []
    monkeypatch.setattr("studies.claims.page.save_figure", lambda figure, path: drawn.append(figure))
    draw_robustness({("AdamW", "S1"): curves["AdamW", "S1"], ("mSGDW", "S5"): curves["AdamW", "S5"]}, tmp_path)
    adam, sgd = drawn[0].axes
    legend = zip(adam.get_legend().get_texts(), adam.get_legend().get_lines(), strict=True)
    colors = {text.get_text(): line.get_color() for text, line in legend}
    (line,) = (line for line in sgd.lines if len(line.get_xdata()))
    assert line.get_color() == colors["S5"] != colors["S1"]  # a layout has one color
    (cross,) = (line for line in adam.lines if line.get_marker() == "x" and len(line.get_xdata()))
    assert list(cross.get_xdata()) == [16] and cross.get_color() == colors["S1"]
    assert HIGHEST < cross.get_ydata()[0] < adam.get_ylim()[1]  # in sight


def test_the_page_goes_on_where_something_is_missing(tmp_path, monkeypatch):
    """Only one claim has its runs, and one of its side numbers has not."""

    def loss(run):
        if not has(run, "none.py") and not has(run, "shared.py"):
            raise MissingRun
        if has(run, "none.py") and flag(run, "seed") == "0":
            raise MissingRun  # "none" is not tuned
        return valley(run, 4e-3, 3.0) + (0.03 + NOISE[int(flag(run, "seed"))] / 5 if has(run, "none.py") else 0.0)

    made = invent_losses(tmp_path, monkeypatch, loss)
    row = judge(made)["gains-removal"]
    assert row["class"] == "reproduced" and len(row["values"]) == 1
    monkeypatch.setattr("studies.claims.page.describe_runs", lambda experiment: "")
    text = render_page(made, {"gains-removal": row}, {})
    assert "**reproduced**" in text and "Not run yet: dnt-sgd" in text
    assert "\nNot run yet: each at its own rate.\n" in text
    # of the eight seeds' noise, a fifth of it: mean -0.0004, deviation 0.0027; t = 2.365 for seven degrees of freedom
    assert verdict_rows({"gains-removal": row}, made)[1][2:4] == ["+0.028", "+0.030 (+0.027 to +0.032)"]
