"""How numbers become verdicts, worked out by hand: intervals, p values, Holm's correction, each class with its borders;
and what the pages say for made-up losses: verdicts, what too high a rate costs, what is missing."""

import math

import pytest

from studies.claims.judge import classify, holm, interval, judge, p_value
from studies.claims.page import HIGHEST, draw_robustness, find_curves, render_page, robustness_rows, verdict_rows
from studies.sweep.runner import MissingRun
from support.claims import claim, flag, make_experiment

pytestmark = pytest.mark.usefixtures("one_thread")
inf, nan = math.inf, math.nan


def p_of(values, expect="below", published=-0.5, smallest=0.25) -> float | None:
    return p_value(values, claim("c", "fast - slow", expect, published), smallest)


def test_intervals_and_p_values_by_hand():
    # standard deviation 1, t = 4.303 for two degrees of freedom: 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4843, 4.4843), abs=1e-3)
    # mean 2, error 1/√3: t = 3.464 with two degrees of freedom; there P(T > t) = (1 - t/√(2 + t²)) / 2
    t = 2 * 3**0.5
    assert p_of([1.0, 2.0, 3.0]) == pytest.approx(1 - t / (2 + t * t) ** 0.5)
    assert p_of([-1.0, -2.0, -3.0], "above", 0.5) == pytest.approx(p_of([1.0, 2.0, 3.0]))
    # equality within ± 3: the nearer limit is 1 above the mean, t = √3; "not above" has that limit alone
    t = 3**0.5
    for expect in ("equal", "not above"):
        assert p_of([1.0, 2.0, 3.0], expect, 0.0, 3.0) == pytest.approx((1 - t / (2 + t * t) ** 0.5) / 2)
        assert p_of([1.0, 2.0, 3.0], expect, 0.0, 1.0) > 0.5  # the mean is outside
    assert p_of([-9.0, -8.0], "not above", None) < 0.05 < p_of([-9.0, -8.0], "equal", 0.0)
    assert p_of([1.0]) is p_of([1.0, nan]) is p_of([1.0, inf]) is p_of([-inf, inf]) is None


def test_all_of_one_side_diverged():
    assert p_of([inf] * 2) == pytest.approx(2 / 6)  # 6 ways to choose 2 of 4 runs, of which 2 are as extreme
    assert p_of([-inf] * 4) == pytest.approx(2 / 70) and p_of([inf] * 8) == pytest.approx(2 / 12870)


def test_holm_s_correction_of_a_known_case():
    # 0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, which may not be below the one before it
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 4)
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.6}, 2) == {"b": 1.0, "a": 1.0}
    assert holm({"a": 0.01, "b": 0.02}, 12) == pytest.approx({"a": 0.12, "b": 0.22})  # ten are still to come


# A claim of -0.5 whose smallest effect of interest is 0.25. Four values m ± d in turns have the mean m and an interval
# of ± 3.18245 · d · √(4/3) / 2 = 1.837 d.
def around(mean: float, half: float) -> list:
    """Four values whose interval is mean ± half."""
    d = half / (3.18245 * (4 / 3) ** 0.5 / 2)
    return [mean - d, mean + d, mean - d, mean + d]


def verdict(values, expect="below", published=-0.5, scale="mini") -> str:
    """The class of a claim, as if it were the only one."""
    return classify(values, claim("c", "fast - slow", expect, published), scale, p_of(values, expect, published))[0]


CASES = {  # (mean, half of the interval)
    "reproduced": [(-0.5, 0.1), (-0.99, 0.1), (-0.251, 0.1)],  # from half the paper's to twice
    "direction only": [(-1.01, 0.1), (-0.249, 0.1), (-1.2, 0.3)],  # that the last interval reaches −1 is no merit
    "no effect": [(-0.2, 0.04), (0.0, 0.2499), (0.2, 0.04)],  # within ± 0.25, though two exclude 0
    "undecided": [(0.0, 0.2501), (-0.2, 0.21), (-0.3, 0.31), (0.3, 0.31)],  # include 0
    "contradicted here": [(0.3, 0.29), (0.5, 0.1)],
}


@pytest.mark.parametrize("word, mean, half", [(word, *case) for word, cases in CASES.items() for case in cases])
def test_a_claim_of_a_lower_loss(word, mean, half):
    assert verdict(around(mean, half)) == word
    assert verdict([-v for v in around(mean, half)], "above", 0.5) == word  # the mirror image
    assert verdict(around(mean, half), scale="small") == "undecided"  # which is not among those that can show it


def test_without_a_published_size_the_sign_is_all_there_is():
    means = {-0.5: "direction only", 0.5: "contradicted here", 0.0: "no effect"}
    assert {mean: verdict(around(mean, 0.1), published=None) for mean in means} == means


@pytest.mark.parametrize(
    "mean, half, equal, not_above",
    [
        (0.0, 0.2, "reproduced", "reproduced"),
        (0.1, 0.14, "reproduced", "reproduced"),
        (0.1, 0.16, "undecided", "undecided"),  # up to 0.26
        (0.0, 0.5, "undecided", "undecided"),
        (0.4, 0.14, "contradicted here", "contradicted here"),
        (0.4, 0.16, "undecided", "undecided"),  # down to 0.24
        (-0.4, 0.14, "contradicted here", "reproduced"),  # better is no objection
        (-0.4, 0.64, "undecided", "reproduced"),
        (-0.4, 0.66, "undecided", "undecided"),
    ],
)
def test_claims_of_equality_and_of_not_above(mean, half, equal, not_above):
    for expect, published, word in (("equal", 0.0, equal), ("not above", None, not_above)):
        assert verdict(around(mean, half), expect, published) == word


@pytest.mark.parametrize(
    "values, expect, word",
    [
        ([-inf] * 4, "below", "direction only"),  # the other side diverged with every seed
        ([inf] * 4, "below", "contradicted here"),
        ([inf] * 4, "above", "direction only"),
        ([inf] * 4, "equal", "contradicted here"),
        ([-inf] * 3, "below", "undecided"),  # 2 of 20 orders are as extreme: p = 0.1
        ([-inf, -0.3, -0.3, -0.3], "below", "undecided"),  # with some seeds only
        ([nan, -inf, -inf, -inf], "below", "undecided"),  # both sides with one seed
        ([inf], "below", "undecided"),
        ([nan], "below", "undecided"),
        ([-0.5], "below", "undecided"),  # one seed decides nothing
    ],
)
def test_diverged_is_a_word(values, expect, word):
    published = 0.0 if expect == "equal" else 0.5 if expect == "above" else -0.5
    assert verdict(values, expect, published) == word
    assert verdict(values, expect, published, "small") == "undecided"


def test_why_a_claim_is_undecided():
    made = claim("c", "fast - slow")
    assert classify([nan, -0.1], made, "mini", None) == ("undecided", "1 of 2 seeds diverged")
    assert classify([-0.1], made, "mini", None) == ("undecided", "one seed has no interval")
    assert classify([-0.1] * 4, made, "digits", 0.001) == ("undecided", "cannot show at this scale, needs mini")
    why = classify(around(-0.3, 0.1), made, "mini", 0.095)[1]
    assert why == "p = 0.095 after Holm's correction; ± 0.1 around the mean, 0.25 would matter"


def test_the_published_value_may_be_another_at_scale_paper():
    made = claim("c", "fast - slow")._replace(at_paper=-2.0, smallest=None, adequate=("mini", "paper"))
    values = around(-0.8, 0.1)
    assert [classify(values, made, scale, 0.001)[0] for scale in ("mini", "paper")] == ["reproduced", "no effect"]
    assert made.effect("mini") == (-0.5, 0.25) and made.effect("paper") == (-2.0, 1.0)


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
