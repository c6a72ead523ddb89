"""The verdict on each claim, from its primary number and what was written down before: a pure function of the record.

docs/claims.md explains the classes. Signs count if their p value is below LEVEL after Holm's correction over the
primary numbers of all claims of the scale; the interval says what lies within ± the smallest effect of interest.
"""

import math
import statistics
from contextlib import suppress
from itertools import accumulate

from scipy import stats

from studies.claims.claims import Claim
from studies.claims.experiment import Experiment
from studies.sweep.runner import MissingRun

CLASSES = ("reproduced", "direction only", "no effect", "contradicted here", "undecided")
LEVEL = 0.05


def interval(values: list) -> tuple:
    """(mean, low, high): the 95% interval of the mean by Student's t, of two finite values or more."""
    mean, half = statistics.mean(values), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return mean, mean - half, mean + half


def p_value(values: list, claim: Claim, smallest: float) -> float | None:
    """The p value of a primary number's values; None if it has none: fewer than two, or some diverged. If all runs of
    one side diverge and none of the other, it is that of so extreme a split of exchangeable runs."""
    if len(values) > 1 and all_diverged(values):
        return 2 / math.comb(2 * len(values), len(values))
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    limits = {"not above": [(smallest, "less")], "equal": [(smallest, "less"), (-smallest, "greater")]}
    tests = limits.get(claim.expect, [(0.0, "two-sided")])
    return max(float(stats.ttest_1samp(values, limit, alternative=side).pvalue) for limit, side in tests)


def all_diverged(values: list) -> bool:
    """Whether all runs of one side diverged, and none of the other."""
    return all(map(math.isinf, values)) and len(set(values)) == 1


def holm(p_values: dict, total: int) -> dict:
    """Holm's correction over `total` tests, of which these are the ones made so far: the adjusted p value of each, such
    that the chance of any false one below 0.05 is at most 5% over all of them."""
    names = sorted(p_values, key=p_values.get)
    raised = [min(1.0, (total - i) * p_values[name]) for i, name in enumerate(names)]
    return dict(zip(names, accumulate(raised, max), strict=True))


def classify(values: list, claim: Claim, scale: str, p: float | None) -> tuple:
    """(class, why) of a claim with these values of its primary number by seed, and Holm's p value."""
    if scale not in claim.adequate:
        return "undecided", f"cannot show at this scale, needs {claim.adequate[0]}"
    if p is None:
        diverged = sum(not math.isfinite(v) for v in values)
        return "undecided", f"{diverged} of {len(values)} seeds diverged" if diverged else "one seed has no interval"
    toward, (published, small) = claim.toward(), claim.effect(scale)
    if all_diverged(values):
        right = claim.expect != "equal" and toward * values[0] > 0
        why = f"{len(values)} of {len(values)} seeds diverged"
        return ("undecided" if p >= LEVEL else "direction only" if right else "contradicted here"), why
    mean, low, high = interval([toward * value for value in values])  # + is the paper's sign
    doubt = f"p = {p:.2g} after Holm's correction; ± {(high - low) / 2:.2g} around the mean, {small:.2g} would matter"
    if claim.expect == "not above":  # better is no objection
        low, high = min(low, 0), min(high, 0)
    inside = -small <= low and high <= small
    if claim.expect in ("equal", "not above"):
        if inside and p < LEVEL:
            return "reproduced", ""
        return ("contradicted here", "") if high <= -small or low >= small else ("undecided", doubt)
    if inside:
        return "no effect", ""
    if p >= LEVEL:
        return "undecided", doubt
    if mean < 0:
        return "contradicted here", ""
    if published is None:
        return "direction only", "no size is published"
    as_large = abs(published) / 2 <= mean <= 2 * abs(published)
    return ("reproduced", "") if as_large else ("direction only", "another size")


def judge(experiment: Experiment) -> dict:
    """{claim id: {"claim", "values": {`Number`: by seed}, the primary one first, "primary": its values, "p", "class",
    "why"}} of the claims whose primary number is recorded."""
    scale, found = experiment.config.scale, {}
    for claim in experiment.claims:
        numbers = claim.numbers_at(scale)
        values = find_values(numbers, experiment)
        if primary := values.get(numbers[0]):
            p = p_value(primary, claim, claim.effect(scale)[1])
            found[claim.id] = {"claim": claim, "values": values, "primary": primary, "p": p}
    adjusted = holm({name: row["p"] for name, row in found.items() if row["p"] is not None}, len(experiment.claims))
    for name, row in found.items():
        row["p"] = adjusted.get(name)
        row["class"], row["why"] = classify(row["primary"], row["claim"], scale, row["p"])
    return found


def find_values(numbers: list, experiment: Experiment) -> dict:
    """{`Number`: its values by seed} of the numbers that are recorded."""
    found = {}
    for number in numbers:
        with suppress(MissingRun):
            found[number] = experiment.values(number)
    return found
