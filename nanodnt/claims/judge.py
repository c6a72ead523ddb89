"""The verdict on each claim, from its primary number and what was written down before: a pure function of the record.

Classes:
reproduced         the sign is the paper's, and the interval meets half to twice the published value; for a claim of
                   equality: within ± the smallest effect of interest
direction only     the sign is the paper's, but the size is not, or none is published
no effect          the interval lies within ± the smallest effect of interest, at a scale whose regime can show one
contradicted here  the sign is not the paper's, at a scale whose regime can show the effect
undecided          none of these: the interval is too wide, or the regime cannot show the effect

A sign counts if its p value is below 0.05 after Holm's correction over the primary numbers of all claims.
"""

import math

from nanodnt.claims.claims import CLAIMS, COUNTED, Claim, Number
from nanodnt.claims.experiment import Experiment, MissingRun
from nanodnt.claims.quantities import CONFIG_MEASURES
from nanodnt.claims.statistics import holm, interval, p_differs, p_equal
from nanodnt.sweep.runner import resolve_configs

CLASSES = ("reproduced", "direction only", "no effect", "contradicted here", "undecided")
NOT_JUDGED = "not judged"  # at a scale that only tests the machinery
LEVEL = 0.05


def p_value(values: list, claim: Claim) -> float | None:
    """The p value of a primary number's values; None if it has none: fewer than two, or a run diverged."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return p_equal(values, claim.smallest) if claim.expect == "equal" else p_differs(values)


def classify(values: list, claim: Claim, adequate: bool, p: float | None) -> tuple:
    """(class, why) of a claim with these values of its primary number by seed, and Holm's p value."""
    opposite = ("contradicted here", "") if adequate else ("undecided", "the regime cannot show the effect")
    if not all(map(math.isfinite, values)):
        return classify_diverged(values, claim, opposite)
    if p is None:
        return "undecided", "one seed has no interval"
    toward = -1 if claim.expect == "below" else 1  # so that the paper's sign is +
    mean, low, high = interval([toward * value for value in values])
    small, published = claim.smallest, claim.primary.published and toward * claim.primary.published
    if claim.expect == "equal":
        if p < LEVEL:
            return "reproduced", ""
        return opposite if low >= small or high <= -small else ("undecided", too_wide(low, high, small))
    if -small <= low and high <= small:
        return ("no effect", "") if adequate else ("undecided", "the regime cannot show the effect")
    if p < LEVEL and mean > 0:
        fits = published is not None and low <= 2 * published and high >= published / 2
        size = "no size is published" if published is None else "the size differs"
        return ("reproduced", "") if fits else ("direction only", size)
    return opposite if p < LEVEL else ("undecided", too_wide(low, high, small))


def too_wide(low: float, high: float, small: float) -> str:
    return f"too wide: ± {(high - low) / 2:.2g} around the mean, the smallest effect of interest is {small:.2g}"


def classify_diverged(values: list, claim: Claim, opposite: tuple) -> tuple:
    """The same where runs diverged: an infinite value says that only one side did, nan that both did."""
    count = f"{sum(not math.isfinite(v) for v in values)} of {len(values)} seeds diverged"
    if any(map(math.isnan, values)) or len({v > 0 for v in values}) > 1:
        return "undecided", count
    if claim.expect == "equal" or (values[0] > 0) != (claim.expect == "above"):
        return opposite[0], count
    return "direction only", count


def judge(claims: list, experiment: Experiment) -> dict:
    """{claim id: {"class", "why", "p", "primary": row, "sides": rows}} of the claims whose primary number is recorded.
    A row is {"number", "values"}; a side that is not recorded is left out."""
    found = {}
    for claim in claims:
        if primary := find_row(claim.primary, experiment):
            sides = [row for number in claim.sides if (row := find_row(number, experiment))]
            found[claim.id] = dict(primary=primary, sides=sides)
    by_id = {claim.id: claim for claim in CLAIMS}
    p_values = {name: p_value(row["primary"]["values"], by_id[name]) for name, row in found.items()}
    adjusted = holm({name: p for name, p in p_values.items() if p is not None})
    for name, row in found.items():
        claim = by_id[name]
        row["p"] = adjusted.get(name)
        adequate = experiment.config.scale in claim.adequate
        row["class"], row["why"] = classify(row["primary"]["values"], claim, adequate, row["p"])
        if experiment.scale.smoke:
            row["class"], row["why"] = NOT_JUDGED, ""
    return found


def find_row(number: Number, experiment: Experiment) -> dict | None:
    """A number's values by seed, if it is recorded."""
    try:
        return dict(number=number, values=experiment.values(number))
    except MissingRun:
        return None


def count_all() -> list:
    """[(what, counted, the paper's number, where)] of what is arithmetic."""
    return [
        (what, CONFIG_MEASURES[measure](*resolve_configs(files.split())), published, where)
        for what, files, measure, published, where in COUNTED
    ]
