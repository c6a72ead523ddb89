"""The best learning rate of a curve, and how it changes with a model's size."""

import math
import statistics

import numpy as np


def slope(points: dict) -> float:
    """The exponent p of y = c · x^p, by least squares in logarithms, through the points {x: y}; nan
    for fewer than two, or where a y is not above 0."""
    if len(points) < 2 or not all(y > 0 for y in points.values()):
        return math.nan
    return statistics.linear_regression(
        list(map(math.log, points)), list(map(math.log, points.values()))
    ).slope


def parabola(losses: dict, rates: list) -> np.ndarray:
    """(a, b, c) of a x² + b x + c, x = log rate, through three of {rate: loss}; of fewer, the line
    or the constant."""
    return np.polyfit(np.log(rates), [losses[rate] for rate in rates], len(rates) - 1)


def best_rate(losses: dict) -> float:
    """The learning rate of the lowest loss of {rate: loss, None for a run that diverged}: the
    vertex of the `parabola` through the lowest point and its neighbours. nan where one of these is
    missing, or diverged: then it is not known.
    """
    rates, known = sorted(losses), {rate: loss for rate, loss in losses.items() if loss is not None}
    i = rates.index(min(known, key=known.get)) if known else 0
    around = rates[max(0, i - 1) : i + 2]
    if len(around) < 3 or not known.keys() >= set(around):
        return math.nan
    a, b, _ = parabola(known, around)
    return math.exp(-b / (2 * a))


def loss_at(losses: dict, rate: float) -> float:
    """The loss at a rate between those of {rate: loss}, on the `parabola` through its two
    neighbours and the next nearest that did not diverge; inf if a neighbour diverged; nan
    outside."""
    below, above = [x for x in losses if x <= rate], [x for x in losses if x >= rate]
    if not below or not above:
        return math.nan
    beside = (max(below), min(above))
    known = [x for x in losses if losses[x] is not None]
    if not set(beside) <= set(known):
        return math.inf
    nearest = sorted(known, key=lambda x: (x not in beside, abs(math.log(x / rate))))[:3]
    return float(np.polyval(parabola(losses, nearest), math.log(rate)))


def mean_curves(curves: dict, seeds: list) -> dict:
    """{size: {rate: mean loss over these seeds, None if one diverged}} of {size: {rate: {seed: loss
    or None}}}, without rates that lack one of the seeds."""
    means = {}
    for size, curve in curves.items():
        means[size] = {}
        for rate, by_seed in curve.items():
            if set(seeds) <= by_seed.keys():
                losses = [by_seed[seed] for seed in seeds]
                means[size][rate] = None if None in losses else statistics.fmean(losses)
    return means


def seeds_of(curves: dict) -> list:
    """The seeds of {size: {rate: {seed: loss}}}."""
    return sorted(
        {seed for curve in curves.values() for by_seed in curve.values() for seed in by_seed}
    )


def range_over_seeds(curves: dict, function) -> tuple:
    """(function of the mean curves, the lowest and highest value of it and of `function` of each
    seed's own curves) for {size: {rate: {seed: loss}}}. Both are nan for a single seed, or where a
    value is."""
    seeds = seeds_of(curves)
    value = function(mean_curves(curves, seeds))
    values = [value, *(function(mean_curves(curves, [seed])) for seed in seeds)]
    if len(seeds) < 2 or any(map(math.isnan, values)):
        return value, math.nan, math.nan
    return value, min(values), max(values)
