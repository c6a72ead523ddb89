"""The statistics of claims: number of seeds, intervals, p values, verdicts. docs/claims.md explains
the classes of verdicts.

A sign counts if its p value is below LEVEL after Holm's correction over the primary numbers of all
claims that the study can judge. Whether an effect is smaller than the smallest that matters is
decided by the interval.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import numpy as np

from studies.claims.study import Claim

# classes in place of which a claim with `late` is called too early to say
EARLY = ("smaller than matters", "opposite", "undecided")
LEVEL = 0.05
POWER = 0.8
# Of three seeds or fewer an interval says nothing, and more than 16 are another experiment.
FEWEST = 4
MOST = 16
SAME_SPREAD = 0.1  # arms whose variances differ with a p value below this are not pooled


Losses = list[float | None]  # one for each seed, None where the run diverged


class Variance(NamedTuple):
    variance: float  # variance of one value
    freedom: int  # degrees of freedom


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


class Plan(NamedTuple):
    seeds: int  # number of seeds; 0: the scale cannot judge the claim
    why: str


class Verdict(NamedTuple):
    word: str  # one of CLASSES of studies/claims/study.py
    why: str = ""


def _stats() -> ModuleType:
    """scipy.stats, which takes a second to import: only verdicts need it."""
    from scipy import stats

    return stats


def variance_of(values: list[float]) -> Variance:
    return Variance(statistics.variance(values), len(values) - 1)


def interval(values: list[float], pooled: Variance | None = None) -> Interval:
    """The 95% interval of the mean of two or more finite values, by Student's t; `pooled` is used
    in place of the values' own variance."""
    mean = statistics.mean(values)
    variance, freedom = pooled or variance_of(values)
    t = float(_stats().t.ppf(1 - LEVEL / 2, freedom))
    half = t * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def pool_variance(losses: list[list[float]]) -> Variance | None:
    """The variance of one run's loss that neither arm nor seed explains (randomised blocks), from
    the losses of several arms with the same seeds. None for fewer than three arms, and where the
    arms' losses differ in their variance (Brown and Forsythe's test)."""
    n_arms = len(losses)
    n_seeds = min(map(len, losses), default=0)
    if n_arms < 3 or n_seeds < FEWEST or not np.isfinite(losses).all():
        return None
    if _stats().levene(*losses, center="median").pvalue < SAME_SPREAD:
        return None
    losses = np.array(losses)
    arm_means = losses.mean(axis=1, keepdims=True)
    residuals = losses - arm_means - losses.mean(axis=0) + losses.mean()
    freedom = (n_arms - 1) * (n_seeds - 1)
    return Variance(float((residuals**2).sum()) / freedom, freedom)


def p_value(values: list[float], claim: Claim, pooled: Variance | None = None) -> float | None:
    """The p value of a primary number's values; None if there are fewer than FEWEST, or some
    diverged. If all runs of one side diverged and none of the other, the p value of so extreme a
    split of exchangeable runs."""
    n = len(values)
    if n >= FEWEST and all_diverged(values):
        return split_p(n)
    if n < FEWEST or not all(map(math.isfinite, values)):
        return None
    variance, freedom = pooled or variance_of(values)
    mean = statistics.mean(values)
    error = math.sqrt(variance / n)

    def above(limit: float) -> float:
        """The chance of a mean as high as ours where the true mean is `limit`."""
        if error == 0:
            return float(np.heaviside(limit - mean, 0.5))
        return float(_stats().t.sf((mean - limit) / error, freedom))

    if claim.expect == "equal":
        return max(1 - above(claim.effect), above(-claim.effect))
    if claim.expect == "not above":
        return 1 - above(claim.effect)
    return min(1.0, 2 * min(above(0.0), 1 - above(0.0)))


def all_diverged(values: list[float]) -> bool:
    """Whether all runs of one side diverged, and none of the other."""
    return all(map(math.isinf, values)) and len(set(values)) == 1


def split_p(n: int) -> float:
    """The chance that of 2n exchangeable runs all n of one side diverge and none of the other."""
    return 2 / math.comb(2 * n, n)


def holm(p_values: dict[str, float], total: int) -> dict[str, float]:
    """Holm's correction over `total` tests, of which `p_values` has those made so far: the adjusted
    p values, such that the chance of any false one below 0.05 is at most 5% over all tests."""
    names = sorted(p_values, key=p_values.get)
    raised = [min(1.0, (total - i) * p_values[name]) for i, name in enumerate(names)]
    return dict(zip(names, accumulate(raised, max), strict=True))


# -- how many seeds, before they run


def shown(n: int, distance: float, level: float) -> float:
    """The chance that n values with standard deviation 1 lie above a limit by a one-sided t test,
    where their true mean is `distance` above it."""
    stats = _stats()
    freedom = n - 1
    return float(stats.nct.sf(stats.t.ppf(1 - level, freedom), freedom, distance * math.sqrt(n)))


def power(n: int, effect: float, level: float = LEVEL, equal: bool = False) -> float:
    """The chance that n values with standard deviation 1 show an effect, in a two-sided t test;
    `equal`: that a mean of 0 lies within ± effect, in two one-sided tests and by its interval."""
    if equal:
        return max(0.0, 2 * shown(n, effect, min(level, LEVEL / 2)) - 1)
    return shown(n, effect, level / 2) + shown(n, -effect, level / 2)


def find_fewest(chance: Callable[[int], float]) -> int | None:
    """The lowest number of seeds, from FEWEST, whose `chance` is POWER; None: more than a
    thousand."""
    return next((n for n in range(FEWEST, 1001) if chance(n) >= POWER), None)


def count_seeds(
    effect: float, spread: float, level: float = LEVEL, equal: bool = False
) -> int | None:
    """The fewest seeds that show this effect with a chance of POWER, where the number has the
    standard deviation `spread` over seeds; None: more than a thousand."""
    if spread == 0:
        return FEWEST
    return find_fewest(lambda n: power(n, effect / spread, level, equal))


def paired_variance(weights: Sequence[float], losses: list[list[Losses]]) -> float:
    """The variance over seeds of a sum of arms with these weights, from the losses with two seeds,
    for each arm at its tuned rate and at those beside it. An arm with one rate goes with each of
    the others'. What a seed adds to all arms cancels."""
    n_rates = min((len(pairs) for pairs in losses if len(pairs) > 1), default=1)
    gap = np.zeros(n_rates)
    for weight, pairs in zip(weights, losses, strict=True):
        first, second = np.array(pairs[:n_rates], dtype=float).T  # None becomes nan
        gap += weight * (first - second)
    gap = gap[np.isfinite(gap)]
    return float((gap**2).sum()) / 2 / max(1, len(gap))


def count_seeds_to_decide(values: list[float], claim: Claim, tests: int) -> int | None:
    """The fewest seeds that decide an undecided claim with a chance of POWER, if the true mean and
    spread are those of `values`, which are finite and differ; None: more than a thousand."""
    spread = statistics.stdev(values)
    mean = statistics.mean(values) / spread
    if claim.expect != "not above":
        mean = abs(mean)
    effect = claim.effect / spread
    of_interval = LEVEL / 2  # on each of its sides
    is_sign = claim.expect in ("below", "above")
    level = of_interval if is_sign else min(LEVEL / tests, of_interval)

    def chance(n: int) -> float:
        within = shown(n, effect - mean, level)
        if claim.expect != "not above":
            within += shown(n, effect + mean, level) - 1
        if is_sign:
            return max(within, power(n, mean, LEVEL / tests))
        return max(within, shown(n, mean - effect, of_interval))

    return find_fewest(chance)


def plan_seeds(claim: Claim, tuning: list[float], spread: float, tests: int) -> Plan:
    """The number of seeds of a claim, from its number's values with the tuning seeds and from the
    standard deviation over seeds; the level is LEVEL over the number of tests, as in Holm's first
    step. The test shall see the published effect or, if none is published, the smallest that
    matters; or half of the effect that the tuning seeds show, if that is larger."""
    level = LEVEL / tests
    if not all(map(math.isfinite, tuning)):
        n = next(n for n in range(FEWEST, MOST + 1) if split_p(n) < level)
        return Plan(n, f"{n} seeds: runs diverge, and fewer could not tell that from chance")
    shown = abs(statistics.mean(tuning)) / 2
    smallest = claim.effect
    aims = {}  # {number of seeds, None if too many: the effect that they show}
    if claim.expect in ("equal", "not above"):
        n = count_seeds(smallest, spread, level, equal=True)
        aims[n] = f"that it lies within ± {smallest:.2g}"
        effect = shown - smallest
    else:
        effect = max(shown, abs(claim.number.published or smallest))
    if effect > 0:
        aims[count_seeds(effect, spread, level)] = f"an effect of {effect:.2g}"
    n = min((n for n in aims if n), default=None)
    aim = aims.get(n) or " or ".join(aims.values())
    why = f"to see {aim} where the number's standard deviation is {spread:.2g}"
    if n is None or n > MOST:
        return Plan(0, f"{why} takes {n or 'more than 1,000'} seeds, more than {MOST}")
    return Plan(n, f"{n} seeds, {why}")


# -- verdicts


def classify(
    values: list[float], claim: Claim, p: float | None, pooled: Variance | None = None
) -> Verdict:
    """The verdict on a claim that the study can judge, from the values of its primary number by
    seed and the p value after Holm's correction."""
    if claim.withheld:
        return Verdict("cannot be judged", claim.withheld)
    verdict = compare(values, claim, p, pooled)
    is_measured = p is not None and not all_diverged(values)
    if claim.late and is_measured and verdict.word in EARLY:
        return Verdict("too early to say", claim.late)
    return verdict


def compare(values: list[float], claim: Claim, p: float | None, pooled: Variance | None) -> Verdict:
    """`classify` of a claim whose effect is not said to come late."""
    if p is None:
        n_diverged = sum(not math.isfinite(v) for v in values)
        if n_diverged:
            return Verdict("undecided", f"{n_diverged} of {len(values)} seeds diverged")
        return Verdict("undecided", f"{len(values)} seeds have no interval: {FEWEST} have")
    published = claim.number.published
    small = claim.effect
    if all_diverged(values):
        mean = low = high = claim.toward * values[0]
        published = None
    else:  # positive values have the claimed sign
        mean, low, high = interval([claim.toward * value for value in values], pooled)
    doubt = (
        f"p = {p:.2g} after Holm's correction; ± {(high - low) / 2:.2g} around the mean, "
        f"{small:.2g} would matter"
    )
    if claim.expect == "not above":  # better is no objection
        low = min(low, 0)
        high = min(high, 0)
    inside = -small <= low and high <= small
    if claim.expect in ("equal", "not above"):
        if inside and p < LEVEL:
            return Verdict("reproduced" if claim.paper else "holds")
        if high <= -small or low >= small:
            return Verdict("opposite")
        return Verdict("undecided", doubt)
    if inside:
        return Verdict("smaller than matters")
    if p >= LEVEL:
        return Verdict("undecided", doubt)
    if mean < 0:
        return Verdict("opposite")
    if not claim.paper:
        return Verdict("holds")
    if published is None:
        return Verdict("same direction")
    if abs(published) / 2 <= mean <= 2 * abs(published):
        return Verdict("reproduced")
    return Verdict("same direction", "another size")
