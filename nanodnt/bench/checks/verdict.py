"""A check: what was compared, what was found, and how much is allowed."""

import math

from nanodnt.tables import table


def verdict(what: str, found: float, allowed: float, note: str = "") -> dict:
    """One line of a check. It has passed if found ≤ allowed; a NaN has not."""
    return dict(what=what, found=float(found), allowed=float(allowed), passed=bool(found <= allowed), note=note)


def worst(errors: dict) -> tuple:
    """(largest value, its key); a NaN is larger than all others."""
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[name], name


def failures(result: dict) -> list:
    """The lines that have not passed, of a result that may have none."""
    return [check for check in result.get("checks", ()) if not check["passed"]]


def describe_checks(result: dict) -> list:
    """A table of the lines, and where the limits come from."""
    lines = [("compared", "found", "allowed", "", "")]
    for check in result["checks"]:
        texts = [f"{check[key]:.3g}" for key in ("found", "allowed")]
        lines.append((check["what"], *texts, "pass" if check["passed"] else "FAIL", check["note"]))
    return [*table(lines), f"limits: {result['why']}"]
