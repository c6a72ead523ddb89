"""Intervals and verdicts: what the numbers of several seeds say about a claim."""

import math
import statistics

# Two-sided 95% quantiles of Student's t, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
VERDICTS = ("not confirmed", "inconclusive", "confirmed")  # from worst to best


def interval(values: list) -> tuple:
    """(mean, low, high): the 95% interval of the mean by Student's t. A single value, or several equal ones, are taken
    as exact. If some values are infinite or nan, and not all are equal, the interval is (−∞, ∞)."""
    if len(values) == 1 or len(set(values)) == 1:
        return values[0], values[0], values[0]
    if not all(map(math.isfinite, values)):
        return math.nan, -math.inf, math.inf
    mean = statistics.mean(values)
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def limits(expect: str) -> tuple:
    """(least, most) of the values that `expect` allows: "< 0", "> 0.5", "within 0.02" (of 0)."""
    kind, number = expect.split()
    x = float(number)
    return {"<": (-math.inf, x), ">": (x, math.inf), "within": (-x, x)}[kind]


def verdict(low: float, high: float, expect: str) -> str:
    """Of an interval: "confirmed" if it lies inside what is expected, "not confirmed" if it lies outside,
    "inconclusive" if it crosses a limit."""
    least, most = limits(expect)
    if least < low and high < most:
        return "confirmed"
    return "not confirmed" if high <= least or low >= most else "inconclusive"


def overall_verdict(verdicts: list) -> str:
    """The verdict on a claim: the worst of its rows' verdicts."""
    return min(verdicts, key=VERDICTS.index)
