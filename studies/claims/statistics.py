"""Intervals, p values and Holm's correction for the few numbers that several seeds give."""

import math
import statistics

# Two-sided 95% quantiles of Student's t, by degrees of freedom
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def interval(values: list) -> tuple:
    """(mean, low, high): the 95% interval of the mean by Student's t, of 2 to 10 finite values."""
    mean = statistics.mean(values)
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def upper_tail(t: float, degrees: int) -> float:
    """The probability that Student's t with that many degrees of freedom is above t (Abramowitz and Stegun 26.7.3,
    26.7.4)."""
    angle = math.atan(t / degrees**0.5)
    cos, terms, term = math.cos(angle), 0.0, 1.0
    if degrees % 2:
        term = cos
        for k in range(2, degrees, 2):
            terms, term = terms + term, term * cos**2 * k / (k + 1)
        inside = 2 / math.pi * (angle + math.sin(angle) * terms)
    else:
        for k in range(1, degrees, 2):
            terms, term = terms + term, term * cos**2 * k / (k + 1)
        inside = math.sin(angle) * terms
    return (1 - inside) / 2


def tail_above(values: list, limit: float) -> float:
    """The one-sided p value of "the mean is at most `limit`"."""
    mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    if error == 0:
        return 0.0 if mean > limit else 1.0
    return upper_tail((mean - limit) / error, len(values) - 1)


def p_differs(values: list) -> float:
    """The two-sided p value of "the mean is 0"."""
    return min(1.0, 2 * min(tail_above(values, 0.0), tail_above([-v for v in values], 0.0)))


def p_equal(values: list, margin: float) -> float:
    """The p value of "the mean is not within ± margin": the larger one of two one-sided tests."""
    return max(tail_above(values, -margin), tail_above([-v for v in values], -margin))


def p_diverged(n: int) -> float:
    """The two-sided p value of "all n runs of one side diverge, and none of the other's n": they could be exchanged."""
    return 2 / math.comb(2 * n, n)


def holm(p_values: dict, total: int) -> dict:
    """Holm's correction over `total` tests, of which these are the ones made so far: the adjusted p value of each, such
    that the chance of any false one below 0.05 is at most 5% over all of them."""
    adjusted, largest = {}, 0.0
    for i, name in enumerate(sorted(p_values, key=p_values.get)):
        largest = max(largest, min(1.0, (total - i) * p_values[name]))
        adjusted[name] = largest
    return adjusted
