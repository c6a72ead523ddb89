"""How numbers become verdicts, worked out by hand: intervals, p values, Holm's correction, and each class with its
borders."""

import math

import pytest

from studies.claims.judge import classify, p_value
from studies.claims.statistics import T95, holm, interval, p_differs, p_diverged, p_equal, upper_tail
from support.claims import claim

inf, nan = math.inf, math.nan


def test_intervals_by_hand():
    # standard deviation 1, t = 4.303 for two degrees of freedom: 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4843, 4.4843), abs=1e-4)
    # two values: deviation √2, t = 12.706 for one: 12.706 · √2 / √2
    assert interval([1.0, 3.0]) == pytest.approx((2.0, -10.706, 14.706), abs=1e-3)
    # ten: 0 and 2 in turns, deviation √(10/9), t = 2.262 for nine: 2.262 / 3
    assert interval([0.0, 2.0] * 5) == pytest.approx((1.0, 0.246, 1.754), abs=1e-3)


# From printed tables of Student's t: degrees of freedom, t, one-sided p
@pytest.mark.parametrize(
    "degrees, t, p",
    [(1, 6.314, 0.05), (2, 2.920, 0.05), (3, 2.353, 0.05), (3, 5.841, 0.005), (4, 2.132, 0.05), (4, 4.604, 0.005)]
    + [(5, 3.365, 0.01), (8, 1.860, 0.05), (9, 4.297, 0.001), (3, -2.353, 0.95), (4, 0.0, 0.5)]
    + [(degrees, t, 0.025) for degrees, t in T95.items()],
)
def test_the_tail_of_student_s_t(degrees, t, p):
    assert upper_tail(t, degrees) == pytest.approx(p, rel=2e-3)


def test_p_values_by_hand():
    # mean 2, error 1/√3: t = 3.464 with two degrees of freedom; there P(T > t) = (1 - t/√(2 + t²)) / 2
    t = 2 * 3**0.5
    assert p_differs([1.0, 2.0, 3.0]) == pytest.approx(1 - t / (2 + t * t) ** 0.5)
    assert p_differs([-1.0, -2.0, -3.0]) == pytest.approx(p_differs([1.0, 2.0, 3.0]))
    assert p_differs([-1.0, 1.0]) == 1.0
    # equality within ± 3: the nearer limit is 1 above the mean, t = √3
    t = 3**0.5
    assert p_equal([1.0, 2.0, 3.0], 3.0) == pytest.approx((1 - t / (2 + t * t) ** 0.5) / 2)
    assert p_equal([1.0, 2.0, 3.0], 1.0) > 0.5  # the mean is outside
    assert p_differs([0.5, 0.5]) == p_equal([0.5, 0.5], 0.6) == 0.0  # no spread
    assert p_equal([0.5, 0.5], 0.5) == p_differs([0.0, 0.0]) == 1.0


def test_all_of_one_side_diverged():
    assert p_diverged(2) == pytest.approx(2 / 6)  # 6 ways to choose 2 of 4 runs, of which 2 are as extreme
    assert p_diverged(4) == pytest.approx(2 / 70) and p_diverged(8) == pytest.approx(2 / 12870)


def test_holm_s_correction_of_a_known_case():
    # 0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, which may not be below the one before it
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 4)
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.6}, 2) == {"b": 1.0, "a": 1.0}
    assert holm({"a": 0.01, "b": 0.02}, 12) == pytest.approx({"a": 0.12, "b": 0.22})  # ten are still to come
    assert holm({}, 3) == {}


# A claim of -0.5 whose smallest effect of interest is 0.25. Four values m ± d in turns have the mean m and an interval
# of ± 3.182 · d · √(4/3) / 2 = 1.837 d.
def around(mean: float, half: float) -> list:
    """Four values whose interval is mean ± half."""
    d = half / (3.182 * (4 / 3) ** 0.5 / 2)
    return [mean - d, mean + d, mean - d, mean + d]


def verdict(values, expect="below", published=-0.5, scale="mini", others=0) -> str:
    """The class of a claim among `others` claims without any effect."""
    made = claim("c", "fast - slow", expect, published)
    p = p_value(values, made, 0.25)
    return classify(values, made, scale, p if p is None else min(1.0, p * (1 + others)))[0]


@pytest.mark.parametrize(
    "mean, half, word",
    [
        (-0.5, 0.1, "reproduced"),
        (-0.99, 0.1, "reproduced"),  # up to twice the paper's
        (-1.01, 0.1, "direction only"),
        (-1.2, 0.3, "direction only"),  # that the interval reaches −1 is no merit
        (-0.251, 0.1, "reproduced"),  # from half the paper's
        (-0.249, 0.1, "direction only"),
        (-0.2, 0.04, "no effect"),  # it lies within ± 0.25, though it excludes 0
        (0.0, 0.2, "no effect"),
        (0.0, 0.2499, "no effect"),
        (0.0, 0.2501, "undecided"),
        (-0.2, 0.21, "undecided"),
        (-0.3, 0.31, "undecided"),  # includes 0
        (0.3, 0.31, "undecided"),
        (0.3, 0.29, "contradicted here"),
        (0.5, 0.1, "contradicted here"),
        (0.2, 0.04, "no effect"),  # the wrong sign, but of no interest
    ],
)
def test_a_claim_of_a_lower_loss(mean, half, word):
    assert verdict(around(mean, half)) == word
    assert verdict([-v for v in around(mean, half)], "above", 0.5) == word  # the mirror image
    assert verdict(around(mean, half), scale="small") == "undecided"  # which is not among those that can show it


def test_without_a_published_size_the_sign_is_all_there_is():
    assert verdict(around(-0.5, 0.1), published=None) == "direction only"
    assert verdict(around(0.5, 0.1), published=None) == "contradicted here"
    assert verdict(around(0.0, 0.1), published=None) == "no effect"


@pytest.mark.parametrize(
    "mean, half, word",
    [
        (0.0, 0.2, "reproduced"),
        (0.1, 0.14, "reproduced"),
        (0.1, 0.16, "undecided"),  # up to 0.26
        (0.2, 0.1, "undecided"),
        (0.0, 0.5, "undecided"),
        (0.4, 0.14, "contradicted here"),
        (-0.4, 0.14, "contradicted here"),
        (0.4, 0.16, "undecided"),  # down to 0.24
    ],
)
def test_a_claim_of_equality(mean, half, word):
    assert verdict(around(mean, half), "equal", 0.0) == word
    assert verdict(around(mean, half), "equal", 0.0, "small") == "undecided"


@pytest.mark.parametrize(
    "mean, half, word",
    [
        (0.0, 0.2, "reproduced"),
        (0.1, 0.14, "reproduced"),
        (0.1, 0.16, "undecided"),  # up to 0.26
        (-0.9, 0.1, "reproduced"),  # far better is no objection
        (-0.4, 0.64, "reproduced"),
        (-0.4, 0.66, "undecided"),
        (0.4, 0.14, "contradicted here"),
        (0.4, 0.16, "undecided"),  # down to 0.24
    ],
)
def test_a_claim_of_not_above(mean, half, word):
    assert verdict(around(mean, half), "not above", None) == word
    assert verdict(around(mean, half), "not above", None, scale="small") == "undecided"


def test_the_p_value_of_not_above():
    values = around(0.0, 0.2)  # its interval ends at 0.2 where one side has 2.5%
    made = claim("c", "fast - slow", "not above", None)
    assert p_value(values, made, 0.2) == pytest.approx(0.025, rel=2e-3)
    assert p_value([v - 5 for v in values], made, 0.2) < 1e-4
    assert verdict(values, "not above", None, others=40) == "undecided"


def test_equality_too_is_corrected_for_other_claims():
    assert [verdict(around(0.0, 0.2), "equal", 0.0, others=n) for n in (0, 11)] == ["reproduced", "undecided"]


def test_other_claims_make_a_sign_harder_to_believe():
    values = around(-0.5, 0.45)  # p just below 0.05
    assert [verdict(values, others=n) for n in (0, 1)] == ["reproduced", "undecided"]


@pytest.mark.parametrize(
    "values, expect, word",
    [
        ([-inf] * 4, "below", "direction only"),  # the other side diverged with every seed
        ([inf] * 4, "below", "contradicted here"),
        ([inf] * 4, "above", "direction only"),
        ([inf] * 4, "equal", "contradicted here"),
        ([-inf] * 3, "below", "undecided"),  # 2 of 20 orders are as extreme: p = 0.1
        ([-inf, -0.3, -0.3, -0.3], "below", "undecided"),  # with some seeds only
        ([inf, 0.001, 0.001, 0.001], "below", "undecided"),
        ([nan, -inf, -inf, -inf], "below", "undecided"),  # both sides with one seed
        ([nan] * 4, "equal", "undecided"),
        ([inf], "below", "undecided"),
        ([-inf], "above", "undecided"),
        ([nan], "below", "undecided"),
    ],
)
def test_diverged_is_a_word(values, expect, word):
    assert verdict(values, expect, 0.0 if expect == "equal" else -0.5) == word
    assert verdict(values, expect, 0.0 if expect == "equal" else -0.5, "small") == "undecided"


def test_why_a_claim_is_undecided():
    made = claim("c", "fast - slow")
    assert classify([nan, -0.1], made, "mini", None) == ("undecided", "1 of 2 seeds diverged")
    assert classify([-0.1], made, "mini", None) == ("undecided", "one seed has no interval")
    assert classify([-0.1] * 4, made, "tiny", 0.001) == ("undecided", "cannot show at this scale, needs mini")
    why = classify(around(-0.3, 0.1), made, "mini", 0.095)[1]
    assert why == "p = 0.095 after Holm's correction; ± 0.1 around the mean, 0.25 would matter"


def test_one_seed_decides_nothing():
    assert verdict([-0.5]) == "undecided"


def test_the_published_value_may_be_another_at_scale_paper():
    made = claim("c", "fast - slow")._replace(at_paper=-2.0, adequate=("mini", "paper"))
    values = around(-0.8, 0.1)
    assert [classify(values, made, scale, 0.001)[0] for scale in ("mini", "paper")] == ["reproduced", "no effect"]
    assert made.effect("mini") == (-0.5, 0.25) and made.effect("paper") == (-2.0, 1.0)
