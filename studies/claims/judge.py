"""The verdict on each claim, from its primary number and what was written down before: a pure function of the record.

Classes:
no effect          the interval lies within ± the smallest effect of interest, though it may exclude 0
reproduced         the sign is the paper's, and the mean lies between half and twice the published value; for a claim
                   of equality: the interval lies within ± the smallest effect of interest; for a claim of "not
                   above": it lies below + the smallest effect
direction only     the sign is the paper's, but the size is not, or none is published
contradicted here  the sign is not the paper's; for a claim of equality: the interval lies outside ± the smallest
                   effect; for one of "not above": above it
undecided          none of these, or the scale's regime cannot show the effect

A sign, an equality and a "not above" count if their p value is below 0.05 after Holm's correction over the primary
numbers of all claims of the scale. The interval alone says what lies within or outside of ± the smallest effect.
"""

import math

from studies.claims.claims import COUNTED, Claim, Number
from studies.claims.experiment import Experiment, MissingRun
from studies.claims.quantities import CONFIG_MEASURES
from studies.claims.statistics import holm, interval, p_differs, p_diverged, p_equal, tail_above
from studies.sweep.runner import resolve_configs

CLASSES = ("reproduced", "direction only", "no effect", "contradicted here", "undecided")
NOT_JUDGED = "not judged"  # at a scale that only tests the machinery
LEVEL = 0.05


def all_diverged(values: list) -> bool:
    """Whether all runs of one side diverged, and none of the other."""
    return all(map(math.isinf, values)) and len(set(values)) == 1


def p_value(values: list, claim: Claim, smallest: float) -> float | None:
    """The p value of a primary number's values; None if it has none: fewer than two, or some diverged."""
    if len(values) < 2:
        return None
    if all_diverged(values):
        return p_diverged(len(values))
    if not all(map(math.isfinite, values)):
        return None
    if claim.expect == "not above":
        return tail_above([-v for v in values], -smallest)
    return p_equal(values, smallest) if claim.expect == "equal" else p_differs(values)


def classify(values: list, claim: Claim, scale: str, p: float | None) -> tuple:
    """(class, why) of a claim with these values of its primary number by seed, and Holm's p value."""
    if scale not in claim.adequate:
        return "undecided", f"cannot show at this scale, needs {claim.adequate[0]}"
    if p is None:
        diverged = sum(not math.isfinite(v) for v in values)
        return "undecided", f"{diverged} of {len(values)} seeds diverged" if diverged else "one seed has no interval"
    toward = claim.toward()
    published, small = claim.effect(scale)
    if all_diverged(values):
        right = claim.expect != "equal" and toward * values[0] > 0
        why = f"{len(values)} of {len(values)} seeds diverged"
        return ("undecided" if p >= LEVEL else "direction only" if right else "contradicted here"), why
    mean, low, high = interval([toward * value for value in values])
    inside = -small <= low and high <= small
    if claim.expect in ("equal", "not above"):
        one_sided = claim.expect == "not above"
        if p < LEVEL and (-small <= low if one_sided else inside):
            return "reproduced", ""
        outside = high <= -small or (low >= small and not one_sided)
        return ("contradicted here", "") if outside else ("undecided", doubt(p, low, high, small))
    if inside:
        return "no effect", ""
    if p >= LEVEL:
        return "undecided", doubt(p, low, high, small)
    if mean < 0:
        return "contradicted here", ""
    if published is None:
        return "direction only", "no size is published"
    published *= toward
    return ("reproduced", "") if published / 2 <= mean <= 2 * published else ("direction only", "another size")


def doubt(p: float, low: float, high: float, small: float) -> str:
    return f"p = {p:.2g} after Holm's correction; ± {(high - low) / 2:.2g} around the mean, {small:.2g} would matter"


def judge(claims: list, experiment: Experiment) -> dict:
    """{claim id: {"class", "why", "p", "primary": row, "sides": rows}} of the claims whose primary number is recorded.
    A row is {"number", "values"}; a side that is not recorded is left out."""
    by_id, scale = {claim.id: claim for claim in experiment.claims}, experiment.config.scale
    found = {}
    for claim in claims:
        if primary := find_row(claim.primary, experiment):
            sides = [row for number in claim.sides_at(scale) if (row := find_row(number, experiment))]
            found[claim.id] = dict(primary=primary, sides=sides)
    values = {name: row["primary"]["values"] for name, row in found.items()}
    p_values = {name: p_value(values[name], by_id[name], by_id[name].effect(scale)[1]) for name in found}
    adjusted = holm({name: p for name, p in p_values.items() if p is not None}, len(experiment.claims))
    for name, row in found.items():
        row["p"] = adjusted.get(name)
        row["class"], row["why"] = classify(values[name], by_id[name], scale, row["p"])
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
