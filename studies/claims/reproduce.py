"""Trains what the chosen claims need, records it, and writes the page."""

import sys
from concurrent.futures import FIRST_COMPLETED, wait

from nanodnt.data import load_meta
from studies.claims.arms import ARMS, STUDY, TUNING_SEED
from studies.claims.experiment import Experiment, MissingRun, split_value
from studies.claims.report import write_page
from studies.claims.study import LAYOUTS, gap_number
from studies.sweep.runner import Stopped, resolve_configs, split_command


def list_needs(claims: list, extras: list, experiment: Experiment) -> dict:
    """{arm: {measures of its reported seeds}} of all that the claims and extras need, in the order in which it is
    trained: what claims are judged by, robustness, the study of momentum SGD, the claims' other numbers; in each group
    those last that need another arm's rate. A set is empty for arms that are only run with the tuning seed."""
    smoke, needs, groups = experiment.scale.smoke, {}, []
    groups.append([claim.primary for claim in claims])
    groups.append(
        [
            name
            for optimizer, layouts in experiment.robustness.items()
            for layout in layouts
            for name in curve_arms(layout, optimizer)
            if "robustness" in extras and not smoke
        ]
    )
    groups.append(
        [
            gap_number(layout, what, value)
            for what, (values, _) in STUDY.items()
            for value in values
            for layout in LAYOUTS
            if "momentum-sgd" in extras and experiment.config.scale == "mini"  # its values are those of mini
        ]
    )
    groups.append([number for claim in claims for number in claim.sides_at(experiment.config.scale)])
    for group in groups:
        found = {}
        for part in group:
            for name in [part] if isinstance(part, str) else [arm for _, arm in split_value(part.value)]:
                found.setdefault(name, set()).update(() if isinstance(part, str) else (part.measure,))
        for name in sorted(found, key=lambda name: bool(ARMS[name].of or ARMS[name].around)):
            needs.setdefault(name, set()).update(found[name])
    return needs


def curve_arms(layout: str, optimizer: str) -> list:
    """The arms that give the loss against the learning rate: the tuned one, and multiples of its rate."""
    name = f"{layout} {optimizer}"
    return [name] + [other for other, arm in ARMS.items() if arm.of == name and other.startswith(f"{name} ×")]


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
    """Train, measure and record, arm by arm, and write the page after each; returns the exit code."""
    config, runner, failed = experiment.config, experiment.runner, 0
    if config.judge_only:
        if not experiment.record.runs:
            raise ValueError(f"{experiment.record.path} has no runs: train them, without --judge_only")
        print(write_page(experiment))
        return 0
    needs = list_needs(claims, extras, experiment)
    if not config.dry_run:
        check_datasets(needs, experiment)
    runner.expected = count_runs(needs, experiment)
    with runner:
        futures = {runner.pool.submit(train_arm, name, needs[name], experiment): name for name in needs}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                try:
                    future.result()
                except MissingRun:
                    continue
                except Stopped:
                    print("stopped; the same command goes on from here", flush=True)
                    return 130
                except (ValueError, OSError, ArithmeticError) as e:  # the other arms go on
                    failed += 1
                    print(f"error: {futures[future]}: {e}", file=sys.stderr, flush=True)
            if experiment.record.runs and not config.dry_run and not runner.stopping:
                write_page(experiment)
    for run in experiment.missing.values():
        print(runner.command(run))
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
    commands = {" ".join(experiment.command_of(name)) for name in needs}
    configs = [
        resolve_configs([*files, *(f"--{k}={v}" for k, v in flags.items())])
        for files, flags in map(split_command, commands)
    ]
    for dataset in {config.dataset for _, config in configs}:
        load_meta(dataset)
