"""How numbers become verdicts, worked out by hand: tuned rates, seeds, intervals, p values, Holm's
correction, each class with its borders; and what the page says for made-up losses."""

import math
import random
from types import SimpleNamespace

import pytest
from scipy import stats

from studies.calibration import NUMBERS
from studies.claims import page
from studies.claims.experiment import CLIFF, TUNING_SEEDS, MissingRun, choose_rate, first_seeds
from studies.claims.judge import (
    LEVEL,
    classify,
    count_seeds,
    count_seeds_to_decide,
    holm,
    interval,
    p_value,
    paired_variance,
    plan_seeds,
    pool_variance,
    power,
)
from studies.claims.page import format_values, render_page, summarize, write_page
from studies.claims.study import split_value, squared_weights
from support.claims import claim, flag, make_experiment

inf, nan = math.inf, math.nan


def p_of(values, expect="below", published=-0.5, smallest=0.25) -> float | None:
    return p_value(values, claim("c", "fast - slow", expect, published, smallest=smallest))


def test_intervals_and_p_values_by_hand():
    # standard deviation 1, t = 4.303 for two degrees of freedom: 4.303 / √3 = 2.4843
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.4843, 4.4843), abs=1e-3)
    # pooled: variance 4, t = 2.228 for ten degrees of freedom: 2.228 · 2 / √3 = 2.5726
    assert interval([1.0, 2.0, 3.0], (4.0, 10)) == pytest.approx((2.0, -0.5726, 4.5726), abs=1e-3)
    values = [1.0, 2.0, 3.0, 4.0]
    assert p_of(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert p_of([-v for v in values], "above", 0.5) == pytest.approx(p_of(values))
    near = stats.ttest_1samp(values, 3.5, alternative="less").pvalue
    assert (
        p_of(values, "equal", 0.0, 3.5)
        == pytest.approx(near)
        == p_of(values, "not above", None, 3.5)
    )
    assert p_of(values, "equal", 0.0, 2.0) > 0.5  # the mean is outside
    assert p_of([0.0] * 4) == 1 and p_of([0.5] * 4) == 0
    assert (
        p_of([-9.0, -8.0, -9.0, -8.0], "not above", None)
        < 0.05
        < p_of([-9.0, -8.0, -9.0, -8.0], "equal", 0.0)
    )
    assert (
        p_of([1.0] * 3)
        is p_of([1.0, 1.0, 1.0, nan])
        is p_of([1.0, 1.0, 1.0, inf])
        is p_of([-inf, inf] * 2)
        is None
    )


def test_all_of_one_side_diverged():
    assert p_of([inf] * 3) is None  # 2 of 20 ways to choose 3 of 6 runs
    assert p_of([-inf] * 4) == pytest.approx(2 / 70) and p_of([inf] * 8) == pytest.approx(2 / 12870)


def test_holm_s_correction_of_a_known_case():
    # 0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, which may not be below the one before it
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 4)
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.6}, 2) == {"b": 1.0, "a": 1.0}
    # ten are still to come
    assert holm({"a": 0.01, "b": 0.02}, 12) == pytest.approx({"a": 0.12, "b": 0.22})


# -- how many seeds


def test_seeds_of_a_known_power_calculation():
    """Paired t test, two-sided 5%, 80%: the tables of Cohen, and of G*Power, have 34, 15, 10, 6 for
    these effects."""
    assert [count_seeds(effect, 1.0) for effect in (0.5, 0.8, 1.0, 1.5)] == [34, 15, 10, 6]
    assert (
        count_seeds(0.05, 0.1) == 34 and count_seeds(5.0, 1.0) == 4 and count_seeds(1.0, 0.0) == 4
    )
    assert power(34, 0.5) >= 0.8 > power(33, 0.5) and power(10, 0.0) == pytest.approx(LEVEL)
    assert count_seeds(1e-3, 1.0) is None
    assert power(8, 5.0) == pytest.approx(1)  # where scipy's nct.cdf is nan
    # a single claim: the interval has the stricter level
    assert power(9, 1.2, equal=True) == power(9, 1.2, LEVEL / 2, equal=True)


def test_a_plan_sees_the_published_effect_or_half_of_what_tuning_shows():
    made = claim("c", "fast - slow", published=-0.5, smallest=None)
    assert plan_seeds(made, [0.0, 0.0], 0.5, 1)[0] == 10  # an effect of one standard deviation
    assert plan_seeds(made, [-1.4, -1.6], 0.5, 1)[0] == 6  # half of -1.5
    # ten tests: level 0.5%
    assert plan_seeds(made, [0.0, 0.0], 0.4, 10)[0] == count_seeds(0.5, 0.4, 0.005) == 13
    why = "to see an effect of 0.5 where the number's standard deviation is 1 takes 34 seeds, "
    why += "more than 16"
    assert plan_seeds(made, [0.0, 0.0], 1.0, 1) == (0, why)
    ours = claim("c", "fast - slow", published=None, smallest=0.5)
    assert plan_seeds(ours, [0.1, -0.1], 0.5, 1)[0] == 10
    same = claim("c", "fast - slow", "equal", 0.0, smallest=0.5)
    assert plan_seeds(same, [0.0, 0.0], 0.5, 1)[0] == count_seeds(0.5, 0.5, equal=True) > 10
    # it is to be seen outside
    assert plan_seeds(same, [2.9, 3.1], 0.5, 1)[0] == count_seeds(1.0, 0.5)
    assert (
        plan_seeds(made, [-inf, -inf], 0.0, 1)[0] == 4
        and plan_seeds(made, [-inf, nan], 0.0, 12)[0] == 6
    )


@pytest.mark.parametrize(
    "expect, mean",
    [
        ("below", 0.0),  # smaller than matters, for which both ends of the interval count
        ("below", -0.2),  # closer to what would matter than to 0
        ("equal", 0.0),
        ("equal", 0.4),
        ("not above", -0.05),  # better is no objection
        ("not above", 0.4),
    ],
)
def test_seeds_that_would_decide_do(expect, mean):
    """Of 1,000 made-up experiments some four of five are decided. Three values have the standard
    deviation 0.2; 0.25 would matter."""
    made = claim("c", "fast - slow", expect)
    n = count_seeds_to_decide([mean - 0.2, mean, mean + 0.2], made, 4)
    if (expect, mean) == ("equal", 0.0):
        assert n == count_seeds(0.25, 0.2, LEVEL / 4, equal=True)
    draw = random.Random(1)
    decided = 0
    for _ in range(1000):
        values = [draw.gauss(mean, 0.2) for _ in range(n)]
        p = min(1.0, 4 * p_value(values, made))
        decided += classify(values, made, p)[0] != "undecided"
    assert 770 < decided < 930


# -- pooled variance and pairs


def test_the_variance_of_a_difference_by_hand():
    """What a seed adds to both arms cancels, at each rate by itself; a given rate goes with each of
    the tuned arm's."""
    tuned = [(3.0, 3.5), (2.0, 2.5), (4.0, 4.5)]
    same = [(1.0, 1.5), (2.0, 2.5), (3.0, 3.5)]
    assert paired_variance([1, -1], [tuned, same]) == 0
    other = [(1.0, 1.5), (2.0, 2.7), (None, 3.5)]  # gaps 0 and 0.2
    assert paired_variance([1, -1], [tuned, other]) == pytest.approx(0.2**2 / 2 / 2)
    given = [(1.0, 1.0)]  # a gap of 0.5 at three rates
    assert paired_variance([1, -1], [tuned, given]) == pytest.approx(0.5**2 / 2)
    assert paired_variance([2], [[(1.0, 1.5)]]) == pytest.approx(0.5)
    assert paired_variance([1], [[(1.0, None)]]) == 0


def test_a_pooled_variance_by_hand():
    """Three arms, four seeds, each a sum of its arm's, its seed's and a rest that sums to 0 both
    ways: what is left."""
    rest = [[0, -2, 2, 0], [-1, 1, -1, 1], [1, 1, -1, -1]]
    losses = [[10 * i + 0.1 * j + r for j, r in enumerate(row)] for i, row in enumerate(rest)]
    variance, freedom = pool_variance(losses)
    assert freedom == 6 and variance == pytest.approx(16 / 6)
    assert pool_variance(losses[:2]) is pool_variance([row[:3] for row in losses]) is None
    assert pool_variance([*losses[:2], [1.0, 2.0, 3.0, inf]]) is None
    # of another variance
    assert pool_variance([*losses[:2], [-100.0, 100.0, -100.0, 100.0]]) is None


# -- tuned rates


CURVES = {  # {the loss at middle · 2^k: k of the tuned rate}
    "a valley": (lambda k: k * k / 50, 0),
    "a cliff beside the best": (lambda k: -k / 10 if k <= 1 else 5.0, 0),
    "it diverges beside the best": (lambda k: -k / 10 if k <= 1 else inf, 0),
    "flat, then a cliff": (lambda k: 0.0 if k < 1 else 1.0, -1),
    "steep on both sides": (lambda k: 0.4 * abs(k) if k <= 0 else 5.0, -1),
    "falls to the right": (lambda k: (k - 4) ** 2 / 50, 4),
    "diverges from the middle on": (lambda k: inf if k >= 0 else (k + 3) ** 2 / 50, -3),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_tuned_rate_is_never_on_a_cliff(name):
    loss, expected = CURVES[name]
    losses, best = {k: loss(k) for k in (-1, 0, 1)}, None
    while best is None:
        best, more = choose_rate(losses)
        if best is None:
            losses[more] = loss(more)
        assert len(losses) < 20
    assert losses[best + 1] - losses[best] <= CLIFF and min(losses) < best < max(losses)
    assert best == expected


# -- verdicts. A claim of -0.5 whose smallest effect is 0.25. Four values m ± d in turns have the
# mean m and an interval of ± 3.18245 · d · √(4/3) / 2 = 1.837 d.
def around(mean: float, half: float) -> list:
    """Four values whose interval is mean ± half."""
    d = half / (3.18245 * (4 / 3) ** 0.5 / 2)
    return [mean - d, mean + d, mean - d, mean + d]


def verdict(values, expect="below", published=-0.5, **how) -> str:
    """The class of a claim, as if it were the only one."""
    made = claim("c", "fast - slow", expect, published, **how)
    return classify(values, made, p_value(values, made))[0]


CASES = {  # (mean, half of the interval)
    "reproduced": [(-0.99, 0.1), (-0.251, 0.1)],  # from half the paper's to twice
    "same direction": [(-1.01, 0.1), (-0.249, 0.1)],
    "smaller than matters": [(-0.2, 0.04), (0.0, 0.2499)],  # within ± 0.25, though one excludes 0
    "undecided": [(0.0, 0.2501), (0.3, 0.31)],  # include 0
    "opposite": [(0.3, 0.29)],
}


@pytest.mark.parametrize(
    "word, mean, half", [(word, *case) for word, cases in CASES.items() for case in cases]
)
def test_a_claim_of_a_lower_loss(word, mean, half):
    assert verdict(around(mean, half)) == word
    assert verdict([-v for v in around(mean, half)], "above", 0.5) == word  # the mirror image
    # without a published size the sign is all there is
    signed = word in ("reproduced", "same direction")
    unpublished = "same direction" if signed else word
    assert verdict(around(mean, half), published=None) == unpublished
    ours = "holds" if signed else word  # a claim of no paper reproduces nothing
    assert verdict(around(mean, half), paper="") == ours
    early = word if signed else "too early to say"
    assert verdict(around(mean, half), late="after 50,000 steps") == early
    assert verdict(around(mean, half), withheld="no control") == "cannot be judged"


@pytest.mark.parametrize(
    "values, word",
    [
        ([math.inf] * 6, "opposite"),  # all runs of the claimed side diverged
        ([0.1, 0.1, 0.1, math.inf], "undecided"),  # one did
        ([0.1, 0.1, 0.1], "undecided"),  # three seeds have no interval
    ],
)
def test_only_a_measured_difference_is_too_early(values, word):
    assert verdict(values, late="after 50,000 steps") == word


@pytest.mark.parametrize(
    "mean, half, equal, not_above",
    [
        (0.1, 0.14, "reproduced", "reproduced"),
        (0.1, 0.16, "undecided", "undecided"),  # up to 0.26
        (0.4, 0.14, "opposite", "opposite"),
        (0.4, 0.16, "undecided", "undecided"),  # down to 0.24
        (-0.4, 0.14, "opposite", "reproduced"),  # better is no objection
        (-0.4, 0.64, "undecided", "reproduced"),
        (-0.4, 0.66, "undecided", "undecided"),
    ],
)
def test_claims_of_equality_and_of_not_above(mean, half, equal, not_above):
    for expect, published, word in (("equal", 0.0, equal), ("not above", None, not_above)):
        assert verdict(around(mean, half), expect, published) == word
        ours = "holds" if word == "reproduced" else word  # a claim of no paper reproduces nothing
        assert verdict(around(mean, half), expect, published, paper="") == ours


@pytest.mark.parametrize(
    "values, expect, word",
    [
        ([-inf] * 4, "below", "same direction"),  # the other side diverged with every seed
        ([inf] * 4, "below", "opposite"),
        ([inf] * 4, "equal", "opposite"),
        ([-inf, -0.3, -0.3, -0.3], "below", "undecided"),  # with some seeds only
        ([nan, -inf, -inf, -inf], "below", "undecided"),  # both sides with one seed
        ([-0.5] * 3, "below", "undecided"),  # three seeds decide nothing
    ],
)
def test_diverged_is_a_word(values, expect, word):
    assert (
        verdict(values, expect, 0.0 if expect == "equal" else 0.5 if expect == "above" else -0.5)
        == word
    )


def test_why_a_claim_is_undecided():
    made = claim("c", "fast - slow")
    assert classify([nan, -0.1, 0.0, 0.0], made, None) == ("undecided", "1 of 4 seeds diverged")
    assert classify([-0.1, -0.1], made, None)[1] == "2 seeds have no interval: 4 have"
    assert classify(around(-0.3, 0.1), made, 0.095)[1].startswith(
        "p = 0.095 after Holm's correction; ± 0.1 around"
    )


def test_two_seeds_are_a_range():
    assert (
        format_values([-0.28, -0.30]) == "−0.300 to −0.280"
        and format_values([0.1]) == "+0.100 to +0.100"
    )
    assert format_values([]) == "–" and format_values([inf, 1.0]) == "diverged with 1 of 2 seeds"
    assert format_values(around(-0.3, 0.1)) == "−0.300 (−0.400 to −0.200)"


def test_the_last_lines_say_what_would_decide_a_claim():
    made = claim("c", "fast - slow")
    wide = [0.0, -0.8] * 2
    n = count_seeds_to_decide(wide, made, 5)
    runner = SimpleNamespace(failures=["a: b"])
    study = SimpleNamespace(digits=4)
    experiment = SimpleNamespace(chosen=[made], tests=5, runner=runner, study=study)
    for word, values, advice in (
        ("undecided", wide, f"{n} seeds would do"),
        ("undecided", [-0.1, inf, -0.1, -0.1], ""),
        ("undecided", [-0.1, -0.2], ""),
        ("cannot be judged", [], ""),
        ("holds", wide, ""),
    ):
        row = dict(values={made.number: values}, pooled=None, p=None, why="why")
        text = "\n".join(summarize(experiment, {"c": row | {"class": word, "claim": made}}))
        assert text.startswith(f"failed: a: b\n\nc: {word.upper()}: c is so\n")
        assert (" would do" in text) == bool(advice) and advice in text
        assert ("−0.4000 (" in text) == (values == wide)


# -- the page, of made-up losses


NOISE = {
    seed: (0.0, 0.01, -0.01, 0.02, -0.02, 0.015, -0.015, 0.005)[i % 8]
    for i, seed in enumerate(first_seeds(16))
}
NOISE |= dict.fromkeys(TUNING_SEEDS, 0.0) | {TUNING_SEEDS[0]: 0.01}


def invent_losses(tmp_path, monkeypatch, loss, claims="studies/papers.py"):
    """The experiment of a claims file in which `loss(run)` has been measured: a number, None for
    diverged; or MissingRun."""
    made = make_experiment(tmp_path, claims, judge_only=True)
    monkeypatch.setattr(made, "measure", lambda measure, runs: list(map(loss, runs)))
    monkeypatch.setattr("studies.claims.page.describe_runs", lambda experiment: "")
    return made


def has(run, file: str) -> bool:
    return any(arg.endswith(file) for arg in run.args)


def valley(run, best: float, floor: float) -> float:
    """A loss of `floor` at the best rate that rises by 0.1 · log2² beside it."""
    return floor + 0.1 * math.log2(float(flag(run, "learning_rate")) / best) ** 2


def gains(run) -> float:
    """Only one claim has its runs, and one of its side numbers has not."""
    if not has(run, "none.py") and not has(run, "shared.py"):
        raise MissingRun
    seed = int(flag(run, "seed"))
    if has(run, "none.py") and float(flag(run, "learning_rate")) != 4e-3:
        raise MissingRun  # "none" is not tuned
    return valley(run, 4e-3, 3.0) + (0.03 + NOISE[seed] / 5 if has(run, "none.py") else 0.0)


def test_the_page_goes_on_where_something_is_missing(tmp_path, monkeypatch):
    made = invent_losses(tmp_path, monkeypatch, gains)
    found = made.judge()
    row = found["gains-removal"]
    assert row["class"] == "reproduced" and len(row["values"]) == 2
    assert {name for name, row in found.items() if not row["claim"].cannot} == {"gains-removal"}
    text = render_page(made, found, {})
    for words in (
        "**reproduced**",
        "Not run yet: dnt-common",
        "\nNot run: each at its own rate.\n",
    ):
        assert words in text
    # verdicts are corrected for all that can be judged
    tests = sum(not claim.cannot for claim in made.study.claims)
    assert row["p"] == pytest.approx(
        tests * p_value(row["values"][row["claim"].number], row["claim"])
    )


def test_the_numbers_of_all_claims_side_by_side(tmp_path, monkeypatch):
    """A row for each number, a column for each claim; a side number has the seeds that it names."""

    def loss(run) -> float:
        return 3.0 if has(run, "s1.py") else 2.5 if flag(run, "dtype") else 3.01

    made = invent_losses(tmp_path, monkeypatch, loss, "studies/calibration.py")
    found = made.judge()
    assert [row["class"] for row in found.values()][:2] == ["reproduced", "opposite"]
    text = render_page(made, found, {})
    head, _, *rows = text.split("## The numbers of all claims\n\n")[1].split("\n\n")[0].splitlines()
    ids = list(found)
    assert head == f"| number | paper's | {' | '.join(ids)} |"
    table = {cells[1]: cells[2:-1] for cells in ([c.strip() for c in r.split("|")] for r in rows)}
    assert sorted(table) == sorted(NUMBERS)
    level = "+0.010 (+0.010 to +0.010), n = {}"
    first = table["AdamW, both at S1's rate: S5 minus S1"]
    assert first[:3] == ["−0.004", level.format(11), "−0.500 (−0.500 to −0.500), n = 4"]
    assert table["Muon minus AdamW, own rates: S1"] == [
        *("–", "+0.000 (+0.000 to +0.000), n = 4", "–", "–", "–", "–"),
        "+0.000 (+0.000 to +0.000), n = 8",
    ]


def test_differences_are_drawn_over_steps(tmp_path, monkeypatch):
    def loss(run) -> float:
        return 3.04 if has(run, "lns.py") or has(run, "warmup_end.py") else 3.0

    made = invent_losses(tmp_path, monkeypatch, loss, "studies/crossing.py")
    drawn = []
    draw = page.draw_curves
    monkeypatch.setattr(page, "draw_curves", lambda *args: (drawn.append(args[1]), draw(*args)))
    write_page(made, made.judge())
    lns, blockwise = drawn
    level = pytest.approx([0.04] * 3)
    assert lns["LNS - scaled init"] == {300: level, 600: level, 1200: level, 2400: level}
    assert {steps for curve in lns.values() for steps in curve} == {300, 600, 1200, 2400, 4800}
    steps = [list(curve) for curve in blockwise.values()]
    assert steps == [[300, 600, 1200, 2400, 4800], [300], [1200]]
    assert (made.folder / "differences.png").read_bytes().startswith(b"\x89PNG")
    text = (made.results / "crossing.md").read_text()
    assert "(crossing/differences.png)" in text
    assert "3 seeds have no interval" in text and "**opposite**" in text


def test_what_a_number_is_a_sum_of():
    assert split_value("a - b + c") == [(1, "a"), (-1, "b"), (1, "c")]
    assert [
        squared_weights(value) for value in ("a", "a - b", "a - b + c - d", "a - b + c - b")
    ] == [1, 2, 4, 6]
