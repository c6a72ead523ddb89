"""Loss against learning rate, for every layout under every optimizer: what too high a rate costs."""

from contextlib import suppress

from studies.claims.arms import ARMS, FACTORS, TUNING_SEED
from studies.claims.experiment import Experiment, MissingRun
from studies.claims.texts import format_number, loss_text


def find_curve(name: str, experiment: Experiment) -> dict:
    """{learning rate: loss of the tuning seed, None where it diverged} of an arm and the multiples of its best rate, as
    far as they are recorded. MissingRun if it is not tuned yet."""
    tuned = experiment.tune(name)
    found = dict(tuned.tried)
    for other in filter(ARMS.__contains__, (f"{name} ×{factor}" for factor in FACTORS)):
        with suppress(MissingRun):
            lr = experiment.tune(other).lr
            found[lr] = experiment.measure("loss", experiment.run_of(other, lr, TUNING_SEED))
    return dict(sorted(found.items()))


def find_curves(optimizer: str, layouts: tuple, experiment: Experiment) -> dict:
    """{layout: {learning rate over the best one: loss, None where it diverged}} of what is recorded."""
    curves = {}
    for layout in layouts:
        name = f"{layout} {optimizer}"
        with suppress(MissingRun):
            tuned = experiment.tune(name)
            if tuned.tried:  # not at a scale without tuning
                curves[layout] = {lr / tuned.lr: loss for lr, loss in find_curve(name, experiment).items()}
    return curves


def find_rises(optimizer: str, layouts: tuple, experiment: Experiment) -> dict:
    """{layout: [best rate, loss there, the rise at each of FACTORS]} as text, of what is recorded."""
    found = {}
    for layout, curve in find_curves(optimizer, layouts, experiment).items():
        best = curve[1.0]
        cells = [f"{experiment.tune(f'{layout} {optimizer}').lr:g}", loss_text(best)]
        for factor in FACTORS:
            loss = curve.get(float(factor), "–")
            cells.append(loss if loss == "–" else "diverged" if loss is None else format_number(loss - best))
        found[layout] = cells
    return found
