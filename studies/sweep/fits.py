"""The best learning rate of a curve, and how it changes with a model's size."""

import math
import random
import statistics

DRAWS = 1000  # bootstrap samples of the seeds


def slope(points: dict) -> float:
    """The exponent p of y = c · x^p, by least squares in logarithms, through the points {x: y}; nan for fewer than two,
    or where a y is not above 0."""
    if len(points) < 2 or not all(y > 0 for y in points.values()):
        return math.nan
    return statistics.linear_regression(list(map(math.log, points)), list(map(math.log, points.values()))).slope


def best_rate(losses: dict) -> float:
    """The learning rate of the lowest loss of {rate: loss, None for a run that diverged}: the vertex of the parabola,
    in log rate, through the lowest point and its neighbours. nan where the lowest stands at an end, or next to a run
    that diverged: then it is not known."""
    rates = sorted(losses)
    ended = [rate for rate in rates if losses[rate] is not None]
    i = rates.index(min(ended, key=losses.get)) if ended else 0
    if not ended or not 0 < i < len(rates) - 1 or None in (losses[rates[i - 1]], losses[rates[i + 1]]):
        return math.nan
    (x0, x1), _, left, curvature = parabola(losses, rates[i - 1 : i + 2])
    return math.exp((x0 + x1 - left / curvature) / 2)


def parabola(losses: dict, rates: list) -> tuple:
    """((x0, x1), y0, left, curvature) of y0 + left · (x - x0) + curvature · (x - x0) · (x - x1), Newton's form of the
    parabola through three of {rate: loss}, x = log rate. Through two: the straight line, with curvature 0."""
    x, y = [math.log(rate) for rate in rates], [losses[rate] for rate in rates]
    slopes = [(b - a) / (v - u) for u, v, a, b in zip(x, x[1:], y, y[1:], strict=False)]
    return (x[0], x[1]), y[0], slopes[0], (slopes[-1] - slopes[0]) / (x[-1] - x[0])


def loss_at(losses: dict, rate: float) -> float:
    """The loss at a rate between those of {rate: loss}, on the `parabola` through its two neighbours and the next
    nearest that did not diverge; inf if a neighbour diverged; nan outside."""
    rates = sorted(losses)
    for low, high in zip(rates, rates[1:], strict=False):
        if low <= rate <= high:
            if None in (losses[low], losses[high]):
                return math.inf
            rest = [x for x in rates if x not in (low, high) and losses[x] is not None]
            nearest = sorted(rest, key=lambda x: abs(math.log(x / rate)))[:1]
            (x0, x1), y0, left, curvature = parabola(losses, [low, high, *nearest])
            x = math.log(rate)
            return y0 + left * (x - x0) + curvature * (x - x0) * (x - x1)
    return math.nan


def means(by_rate: dict, seeds: list) -> dict:
    """{rate: mean loss over these seeds, None if one diverged} from {rate: {seed: loss or None}}, without rates that
    lack one of the seeds."""
    whole = {rate: [its[seed] for seed in seeds] for rate, its in by_rate.items() if set(seeds) <= its.keys()}
    return {rate: None if None in its else statistics.fmean(its) for rate, its in whole.items()}


def seeds_of(curves: dict) -> list:
    """The seeds of {size: {rate: {seed: loss}}}."""
    return sorted({seed for curve in curves.values() for its in curve.values() for seed in its})


def mean_curves(curves: dict, seeds: list | None = None) -> dict:
    """{size: `means` over `seeds`, None: all} of {size: {rate: {seed: loss}}}."""
    return {size: means(curve, seeds or seeds_of(curves)) for size, curve in curves.items()}


def bootstrap(curves: dict, function) -> tuple:
    """(function(mean_curves(curves)), its 95% interval over bootstrap samples of the seeds) for {size: {rate: {seed:
    loss}}}. The interval is (nan, nan) for a single seed, or where more than one sample in twenty gives nan."""
    value, seeds, draw = function(mean_curves(curves)), seeds_of(curves), random.Random(0)
    samples = [[draw.choice(seeds) for _ in seeds] for _ in range(DRAWS)] if len(seeds) > 1 else []
    found = [function(mean_curves(curves, sample)) for sample in samples]
    known = sorted(x for x in found if not math.isnan(x))
    if len(known) < max(1, 0.95 * len(found)):
        return value, (math.nan, math.nan)
    return value, (known[int(0.025 * len(known))], known[int(0.975 * len(known))])
