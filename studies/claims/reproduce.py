"""Trains what the chosen claims need, records it, and writes the page."""

from nanodnt.data import load_meta
from studies.claims.arms import ARMS, TUNING_SEED
from studies.claims.claims import GAPS
from studies.claims.experiment import Experiment, arms_in
from studies.claims.page import write_page
from studies.sweep.runner import MissingRun, Stopped, resolve_configs


def list_needs(claims: list, extras: list, experiment: Experiment) -> dict:
    """{arm: {measures of its reported seeds}} of all that the claims and extras need, in the order in which it is
    trained: what claims are judged by, robustness, the gaps of momentum SGD, the claims' other numbers; in each group
    those last that need another arm's rate. A set is empty for arms that are only run with the tuning seed."""
    scale, smoke = experiment.config.scale, experiment.scale.smoke
    numbers = [claim.numbers_at(scale) for claim in claims]
    tuned = {f"{layout} {name}" for name, layouts in experiment.robustness.items() for layout in layouts}
    curves = [name for name in ARMS if name.partition(" ×")[0] in tuned and "robustness" in extras and not smoke]
    gaps = GAPS if "momentum-sgd" in extras and scale == "mini" else []  # its values are those of mini
    groups = [primary for primary, *_ in numbers], gaps, [side for _, *sides in numbers for side in sides]
    pairs = [[(name, {number.measure}) for number in group for name in arms_in([number])] for group in groups]
    pairs.insert(1, [(name, set()) for name in curves])
    needs = {}
    for group in pairs:
        for name, measures in sorted(group, key=lambda need: bool(ARMS[need[0]].of or ARMS[need[0]].around)):
            needs.setdefault(name, set()).update(measures)
    return needs


def train_arm(name: str, measures: set, experiment: Experiment) -> None:
    """Train and measure an arm: with the tuning seed, and if any number needs it with the reported seeds."""
    lr = experiment.tune(name).lr
    runs = [experiment.reported(name, seed) for seed in experiment.seeds_of(name)] if measures else []
    curve = [experiment.run_of(name, lr, TUNING_SEED)] if ARMS[name].times != 1 else []  # a point of robustness
    experiment.require([*curve, *runs])
    for run in curve:
        experiment.measure("loss", run)
    for run in runs:
        for measure in ["loss", *sorted(measures - {"loss"})]:
            experiment.measure(measure, run)


def reproduce(claims: list, extras: list, experiment: Experiment) -> int:
    """Train, measure and record, arm by arm, and write the page; returns the exit code."""
    config, runner = experiment.config, experiment.runner
    if config.judge_only:
        if not experiment.record.runs:
            raise ValueError(f"{experiment.record.path} has no runs: train them, without --judge_only")
        print(write_page(experiment))
        return 0
    needs, failed = list_needs(claims, extras, experiment), 0
    if not config.dry_run:
        check_datasets(needs, experiment)
    runner.expected = count_runs(needs, experiment)
    with runner:
        for _, error in runner.call_all(train_arm, {name: (name, needs[name], experiment) for name in needs}):
            if isinstance(error, Stopped):
                return 130
            failed += error is not None and not isinstance(error, MissingRun)
    if config.dry_run:
        print("".join(f"{runner.command(run)}\n" for run in experiment.missing.values()), end="")
    elif experiment.record.runs:
        write_page(experiment)
    return int(failed > 0)


def count_runs(needs: dict, experiment: Experiment) -> int:
    """About how many runs are still to be made, for the progress line: the number of tuning runs is a guess."""
    total = 0
    for name, measures in needs.items():
        arm = ARMS[name]
        tuning = 0 if arm.of or arm.lr is not None or experiment.scale.smoke else arm.points + len(arm.tries)
        total += tuning + (len(experiment.seeds_of(name)) if measures else bool(arm.of))
    return max(0, total - len(experiment.record.runs))


def check_datasets(needs: dict, experiment: Experiment) -> None:
    """ValueError if a dataset of the runs is not prepared."""
    runs = {experiment.run_of(name, None, TUNING_SEED) for name in needs}
    for dataset in {resolve_configs(run.args)[1].dataset for run in runs}:
        load_meta(dataset)
