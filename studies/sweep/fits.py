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
    (x0, x1, x2), (y0, y1, y2) = zip(*((math.log(rate), losses[rate]) for rate in rates[i - 1 : i + 2]), strict=True)
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)  # slopes: at most 0, at least 0
    if left == right:  # all three are equal
        return rates[i]
    middle = (x0 + x1) / 2
    return math.exp(middle - left * ((x1 + x2) / 2 - middle) / (right - left))


def loss_at(losses: dict, rate: float) -> float:
    """The loss at a rate between those of {rate: loss}, on the straight line between its neighbours in log rate; inf
    if one of them diverged; nan outside."""
    rates = sorted(losses)
    for low, high in zip(rates, rates[1:], strict=False):
        if low <= rate <= high:
            if None in (losses[low], losses[high]):
                return math.inf
            share = math.log(rate / low) / math.log(high / low)
            return losses[low] + share * (losses[high] - losses[low])
    return math.nan


def seeds_of(by_rate: dict) -> list:
    """The seeds of {rate: {seed: loss}}."""
    return sorted({seed for its in by_rate.values() for seed in its})


def means(by_rate: dict, seeds: list) -> dict:
    """{rate: mean loss over these seeds, None if one diverged} from {rate: {seed: loss or None}}, without rates that
    lack one of the seeds."""
    whole = {rate: [its[seed] for seed in seeds] for rate, its in by_rate.items() if set(seeds) <= its.keys()}
    return {rate: None if None in its else statistics.mean(its) for rate, its in whole.items()}


def bootstrap(curves: dict, function) -> tuple:
    """(function(means of all seeds), its 95% interval over bootstrap samples of the seeds) for {size: {rate: {seed:
    loss}}}: `function` takes {size: {rate: mean}}. The interval is (nan, nan) for a single seed, or where more than
    one sample in twenty gives nan."""
    seeds = sorted({seed for curve in curves.values() for seed in seeds_of(curve)})
    draw, found = random.Random(0), []

    def value(chosen):
        return function({size: means(curve, chosen) for size, curve in curves.items()})

    for _ in range(DRAWS if len(seeds) > 1 else 0):
        found.append(value([draw.choice(seeds) for _ in seeds]))
    known = sorted(x for x in found if not math.isnan(x))
    if len(known) < max(1, 0.95 * len(found)):
        return value(seeds), (math.nan, math.nan)
    return value(seeds), (known[int(0.025 * len(known))], known[int(0.975 * len(known))])
