"""The statistics of claims: how many seeds, intervals, p values, verdicts. docs/claims.md explains
the classes.

Signs count if their p value is below LEVEL after Holm's correction over the numbers that decide, of
all claims that the study can judge; the interval says what lies within ± the smallest effect that
matters.
"""

import math
import statistics
from itertools import accumulate

import numpy as np

from studies.claims.study import Claim

CLASSES = (
    "reproduced",
    "holds",
    "direction only",
    "no effect",
    "contradicted here",
    "undecided",
    "cannot judge",
)
LEVEL, POWER = 0.05, 0.8
# seeds: of three or fewer an interval says nothing, and more than 16 are another experiment
FEWEST, MOST = 4, 16
SAME_SPREAD = 0.1  # arms whose variances differ with a p value below this are not pooled


def _stats():
    """scipy.stats, which takes a second to import: only verdicts need it."""
    from scipy import stats

    return stats


def interval(values: list, pooled: tuple | None = None) -> tuple:
    """(mean, low, high): the 95% interval of the mean by Student's t, of two finite values or more.
    pooled: (variance of one value, its degrees of freedom), in place of the values' own."""
    mean, n = statistics.mean(values), len(values)
    variance, freedom = pooled or (statistics.variance(values), n - 1)
    half = float(_stats().t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def pool_variance(losses: list) -> tuple | None:
    """(variance of one run's loss, degrees of freedom) from lists of losses of several arms with
    the same seeds: what arm and seed do not explain (randomised blocks). None for fewer than three
    arms, and where the arms' losses differ in their variance (Brown and Forsythe's test)."""
    k, n = len(losses), min(map(len, losses), default=0)
    if k < 3 or n < FEWEST or not np.isfinite(losses).all():
        return None
    if _stats().levene(*losses, center="median").pvalue < SAME_SPREAD:
        return None
    losses = np.array(losses)
    rest = losses - losses.mean(axis=1, keepdims=True) - losses.mean(axis=0) + losses.mean()
    freedom = (k - 1) * (n - 1)
    return float((rest**2).sum()) / freedom, freedom


def p_value(values: list, claim: Claim, pooled: tuple | None = None) -> float | None:
    """The p value of a primary number's values; None if it has none: fewer than FEWEST, or some
    diverged. If all runs of one side diverge and none of the other, it is that of so extreme a
    split of exchangeable runs."""
    n = len(values)
    if n >= FEWEST and all_diverged(values):
        return split_p(n)
    if n < FEWEST or not all(map(math.isfinite, values)):
        return None
    variance, freedom = pooled or (statistics.variance(values), n - 1)
    error, mean = math.sqrt(variance / n), statistics.mean(values)

    def above(limit: float) -> float:  # of a mean at `limit`, the chance of one as high as ours
        return (
            float(_stats().t.sf((mean - limit) / error, freedom)) if error else float(mean <= limit)
        )

    if claim.expect == "equal":
        return max(1 - above(claim.effect), above(-claim.effect))
    if claim.expect == "not above":
        return 1 - above(claim.effect)
    return min(1.0, 2 * min(above(0.0), 1 - above(0.0)))


def all_diverged(values: list) -> bool:
    """Whether all runs of one side diverged, and none of the other."""
    return all(map(math.isinf, values)) and len(set(values)) == 1


def split_p(n: int) -> float:
    return 2 / math.comb(2 * n, n)


def holm(p_values: dict, total: int) -> dict:
    """Holm's correction over `total` tests, of which these are the ones made so far: the adjusted p
    value of each, such that the chance of any false one below 0.05 is at most 5% over all of
    them."""
    names = sorted(p_values, key=p_values.get)
    raised = [min(1.0, (total - i) * p_values[name]) for i, name in enumerate(names)]
    return dict(zip(names, accumulate(raised, max), strict=True))


# -- how many seeds, before they run


def power(n: int, effect: float, level: float = LEVEL, equal: bool = False) -> float:
    """The chance that n values with standard deviation 1 show an effect: two-sided t test; equal:
    two one-sided tests that a mean of 0 lies within ± effect."""
    freedom, shift = n - 1, effect * math.sqrt(n)
    if equal:
        limit = shift - _stats().t.ppf(1 - level, freedom)
        return float(max(0.0, 2 * _stats().t.cdf(limit, freedom) - 1)) if limit > 0 else 0.0
    limit = _stats().t.ppf(1 - level / 2, freedom)
    return float(_stats().nct.sf(limit, freedom, shift) + _stats().nct.cdf(-limit, freedom, shift))


def count_seeds(
    effect: float, spread: float, level: float = LEVEL, equal: bool = False
) -> int | None:
    """The fewest seeds, from FEWEST, that show this effect with a chance of POWER, where a number
    has this standard deviation over seeds; None: more than a thousand."""
    if spread == 0:
        return FEWEST
    return next(
        (n for n in range(FEWEST, 1001) if power(n, effect / spread, level, equal) >= POWER), None
    )


def plan_seeds(claim: Claim, tuning: list, spread: float, tests: int) -> tuple:
    """(seeds, or 0 where the scale cannot judge, why) of a claim: from its number's values with the
    tuning seeds, and from the standard deviation over seeds; level LEVEL over the number of tests,
    as Holm's first step. The test shall see the published effect or, if none is published, the
    smallest that matters; or half of what the tuning seeds show, if that is more."""
    level = LEVEL / tests
    if not all(map(math.isfinite, tuning)):
        n = next(n for n in range(FEWEST, MOST + 1) if split_p(n) < level)
        return n, f"{n} seeds: runs diverge, and fewer could not tell that from chance"
    shown, smallest = abs(statistics.mean(tuning)) / 2, claim.effect
    found = {}
    if claim.expect in ("equal", "not above"):
        found[count_seeds(smallest, spread, level, equal=True)] = (
            f"that it lies within ± {smallest:.2g}"
        )
        effect = shown - smallest
    else:
        effect = max(shown, abs(claim.number.published or smallest))
    if effect > 0:
        found[count_seeds(effect, spread, level)] = f"an effect of {effect:.2g}"
    n = min((n for n in found if n), default=None)
    why = f"to see {found.get(n) or ' or '.join(found.values())} where the number's standard deviation is {spread:.2g}"
    if n is None or n > MOST:
        return 0, f"{why} takes {n or 'more than 1,000'} seeds, more than {MOST}"
    return n, f"{n} seeds, {why}"


# -- verdicts


def classify(values: list, claim: Claim, p: float | None, pooled: tuple | None = None) -> tuple:
    """(class, why) of a claim that the study can judge, with these values of its primary number by
    seed, and Holm's p value."""
    if p is None:
        diverged = sum(not math.isfinite(v) for v in values)
        few = f"{len(values)} seeds have no interval"
        return "undecided", f"{diverged} of {len(values)} seeds diverged" if diverged else few
    published, small = claim.number.published, claim.effect
    if all_diverged(values):
        mean = low = high = claim.toward * values[0]
        published = None
    else:
        # + is the claimed sign
        mean, low, high = interval([claim.toward * value for value in values], pooled)
    doubt = f"p = {p:.2g} after Holm's correction; ± {(high - low) / 2:.2g} around the mean, {small:.2g} would matter"
    if claim.expect == "not above":  # better is no objection
        low, high = min(low, 0), min(high, 0)
    inside = -small <= low and high <= small
    if claim.expect in ("equal", "not above"):
        if inside and p < LEVEL:
            return "reproduced" if claim.paper else "holds", ""
        return ("contradicted here", "") if high <= -small or low >= small else ("undecided", doubt)
    if inside:
        return "no effect", ""
    if p >= LEVEL:
        return "undecided", doubt
    if mean < 0:
        return "contradicted here", ""
    if published is None:
        return "holds", ""
    as_large = abs(published) / 2 <= mean <= 2 * abs(published)
    return ("reproduced", "") if as_large else ("direction only", "another size")
