"""The best learning rate of a curve, and how it changes with a model's size.

A curve is {learning rate: loss, None for a run that diverged}; curves of several sizes and seeds
are {size: {learning rate: {seed: loss or None}}}.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Curve = dict[float, float | None]
SeedCurves = dict[int, dict[float, dict[int, float | None]]]


class Range(NamedTuple):
    """A value of the mean curves, and the lowest and highest of it and of each seed's value."""

    value: float
    low: float
    high: float


def slope(points: dict[float, float]) -> float:
    """The exponent p of y = c · x^p, by least squares in logarithms, through the points {x: y}; nan
    for fewer than two, or where a y is not above 0."""
    if len(points) < 2 or not all(y > 0 for y in points.values()):
        return math.nan
    log_x = [math.log(x) for x in points]
    log_y = [math.log(y) for y in points.values()]
    return statistics.linear_regression(log_x, log_y).slope


def parabola(losses: Curve, rates: list[float]) -> np.ndarray:
    """(a, b, c) of a x² + b x + c, x = log rate, through the losses at three rates; through fewer,
    the line or the constant."""
    return np.polyfit(np.log(rates), [losses[rate] for rate in rates], len(rates) - 1)


def best_rate(losses: Curve) -> float:
    """The learning rate of the lowest loss: the vertex of the `parabola` through the lowest point
    and its two neighbours. nan where a neighbour is missing or diverged: then it is not known."""
    rates = sorted(losses)
    known = {rate: loss for rate, loss in losses.items() if loss is not None}
    if not known:
        return math.nan
    i = rates.index(min(known, key=known.get))
    around = rates[max(0, i - 1) : i + 2]
    if len(around) < 3 or not known.keys() >= set(around):
        return math.nan
    a, b, _ = parabola(known, around)
    return math.exp(-b / (2 * a))


def loss_at(losses: Curve, rate: float) -> float:
    """The loss at a rate between those of the curve, on the `parabola` through its two neighbours
    and the next nearest that did not diverge; inf if a neighbour diverged; nan outside."""
    below = [x for x in losses if x <= rate]
    above = [x for x in losses if x >= rate]
    if not below or not above:
        return math.nan
    beside = (max(below), min(above))
    known = [x for x in losses if losses[x] is not None]
    if not set(beside) <= set(known):
        return math.inf
    nearest = sorted(known, key=lambda x: (x not in beside, abs(math.log(x / rate))))[:3]
    return float(np.polyval(parabola(losses, nearest), math.log(rate)))


def mean_curves(curves: SeedCurves, seeds: list[int]) -> dict[int, Curve]:
    """{size: {rate: mean loss over these seeds, None if one diverged}}, without the rates that lack
    one of the seeds."""
    means = {}
    for size, curve in curves.items():
        means[size] = {}
        for rate, by_seed in curve.items():
            if set(seeds) <= by_seed.keys():
                losses = [by_seed[seed] for seed in seeds]
                means[size][rate] = None if None in losses else statistics.fmean(losses)
    return means


def seeds_of(curves: SeedCurves) -> list[int]:
    """All seeds of these curves, in order."""
    seeds = set()
    for curve in curves.values():
        for by_seed in curve.values():
            seeds |= by_seed.keys()
    return sorted(seeds)


def range_over_seeds(curves: SeedCurves, function: Callable[[dict], float]) -> Range:
    """`function` of the mean curves, with its range over the seeds: the lowest and highest of that
    value and of `function` of each seed's own curves. Both are nan for a single seed, or where one
    of the values is nan."""
    seeds = seeds_of(curves)
    value = function(mean_curves(curves, seeds))
    values = [value]
    for seed in seeds:
        values.append(function(mean_curves(curves, [seed])))
    if len(seeds) < 2 or any(map(math.isnan, values)):
        return Range(value, math.nan, math.nan)
    return Range(value, min(values), max(values))
