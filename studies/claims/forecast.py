"""What a study will take before it is trained: runs and hours."""

import statistics
import tempfile
import time
from pathlib import Path

from nanodnt.run.metrics import read_metrics
from studies.claims.experiment import TUNING_SEEDS, Experiment
from studies.claims.judge import FEWEST, MOST
from studies.claims.study import arms_in
from studies.sweep.runner import MissingRun, TrainingRun, resolve_configs

PROBE_STEPS = 4
MORE_RATES = (1, 3)  # that a grid of three learning rates grows by: few, many


class Clock:
    """Seconds that runs take: the median of recorded runs of the same base model and number of steps; else what the
    first steps of one say, trained in a temporary folder."""

    def __init__(self, experiment: Experiment):
        self.runner, self.known = experiment.runner, {}
        for entry in experiment.record.runs.values():
            if entry["seconds"] and entry["outcome"] == "finished":
                self.known.setdefault(self.kind(entry["args"]), []).append(entry["seconds"])

    @staticmethod
    def kind(args) -> tuple:
        """What tells base models and lengths apart in a run's arguments."""
        return args[0], *(arg for arg in args if arg.startswith(("--max_iters=", "--n_layer=", "--n_embd=")))

    def seconds(self, run: TrainingRun) -> float:
        if (kind := self.kind(run.args)) not in self.known:
            self.known[kind] = [self.probe(run)]
        return statistics.median(self.known[kind])

    def probe(self, run: TrainingRun) -> float:
        """The seconds of the whole run, from its first steps."""
        steps = resolve_configs(run.args)[1].max_iters
        flags = dict(max_iters=PROBE_STEPS, warmup_iters=0, log_interval=1, eval_interval=PROBE_STEPS, keep_every=0)
        with tempfile.TemporaryDirectory() as folder:
            path, began = Path(folder) / "probe", time.perf_counter()
            path.mkdir()
            args = [arg for arg in run.args if arg.removeprefix("--").partition("=")[0] not in flags]
            with open(path / ".runner", "w", encoding="utf-8") as lock:
                self.runner.train(TrainingRun(path, (*args, *(f"--{n}={v}" for n, v in flags.items()))), lock)
            whole, rows = time.perf_counter() - began, read_metrics(path)
        (rate,) = (name for name in rows[-1] if name.endswith("_per_s"))  # tokens or images
        amount = rows[-1][rate.removesuffix("_per_s")] / PROBE_STEPS  # of a step
        return whole + (steps - PROBE_STEPS) * amount / statistics.median(row[rate] for row in rows if rate in row)


def forecast(experiment: Experiment) -> list:
    """Lines on what is still to be trained: the runs that are known now, which are then in `experiment.missing`, and
    how many may follow when rates are tuned and seeds counted."""
    clock, study, jobs = Clock(experiment), experiment.study, experiment.runner.jobs
    untuned = [name for name in experiment.tuning_tasks() if not is_done(experiment.prepare, name)]
    for task in experiment.reporting_tasks().values():
        is_done(experiment.finish, *task)
    known = list(experiment.missing.values())
    waiting = [claim for claim in experiment.chosen if set(arms_in([claim.number])) & set(untuned)]
    waiting = [claim for claim in waiting if not claim.seeds]
    totals = []
    for i, seeds in enumerate((FEWEST, MOST)):
        more = dict.fromkeys(arms_in(claim.number for claim in waiting), seeds)
        for name in untuned:
            arm = study.arms[name]
            grows = study.tuned and arm.lr is None and not arm.of
            more[name] = more.get(name, 0) + grows * MORE_RATES[i] * len(TUNING_SEEDS)
        cost = {name: clock.seconds(experiment.run_of(name, None, TUNING_SEEDS[0])) for name in more}
        seconds = sum(map(clock.seconds, known)) + sum(n * cost[name] for name, n in more.items())
        totals.append((len(known) + sum(more.values()), seconds / jobs / 3600))
    (few, low), (many, high) = totals
    hours = sum(map(clock.seconds, known)) / jobs / 3600
    lines = [f"{len(known)} runs are known now: {hours:.1f} hours, {jobs} at a time"]
    if many > len(known):
        what = f"when rates are tuned and {FEWEST} to {MOST} seeds counted"
        lines.append(f"{what}: {few} to {many} runs in all, {low:.1f} to {high:.1f} hours")
    return lines


def is_done(function, *arguments) -> bool:
    try:
        function(*arguments)
    except MissingRun:
        return False
    return True
