"""The runs of a study: their commands, the tuning of learning rates, the number of seeds, and their
record.

The record is RESULTS/NAME/record.json: {run's name: {"args", "settings", "outcome", "seconds",
"measures": {measure: value, or null if the run diverged}, "machine", "changed", "data"}}. Every
verdict and figure is derived from it alone. A run's name ends with a digest of its command;
"settings" is a digest of its resolved configuration, "changed" and "data" are of `read_inputs`.
"""

import io
import json
import math
import statistics
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from configurator import NonNegativeInt, PathName, check_ranges
from nanodnt.data import load_meta
from nanodnt.files import check_folder, make_folder, write_file
from nanodnt.run.directory import read_end
from nanodnt.run.environment import choose_device, choose_dtype
from nanodnt.run.hardware import ASSUMED_MFU, PEAK_FLOPS
from nanodnt.run.metrics import read_formats
from nanodnt.tables import count
from nanodnt.tasks import resolve
from studies.claims import quantities
from studies.claims.judge import (
    FEWEST,
    MOST,
    Losses,
    Plan,
    Variance,
    classify,
    holm,
    p_value,
    paired_variance,
    plan_seeds,
    pool_variance,
)
from studies.claims.study import (
    Claim,
    Number,
    ProtocolRow,
    Study,
    Trials,
    arms_in,
    compare_protocol,
    load_study,
    locate,
    settings_of,
    split_value,
    squared_weights,
    weights_of,
)
from studies.sweep.results import describe_hardware
from studies.sweep.runner import (
    IGNORED_FIELDS,
    ROOT,
    Configs,
    Runner,
    Stopped,
    TrainingRun,
    make_run,
    read_inputs,
    read_origin,
    read_outcome,
    resolve_configs,
)

# These seeds choose learning rates and the number of seeds; verdicts are not made with them.
TUNING_SEEDS = (0, 5)
MOST_DOUBLINGS = 6  # largest distance from the grid's middle, up or down, in doublings
CLIFF = 0.2  # nats: a rate whose double costs more is not taken
# Flags that fill_defaults gives a value, and that did not exist when the first runs were recorded.
NEWER_FLAGS = dict(
    adam_eps=1e-8, cautious_decay=False, muon_coefficients="jordan", muon_row_norm=False
)


@dataclass
class ReproduceConfig:
    # --- what ---
    claims: PathName = "studies/papers.py"  # claims file: your own, or one of studies/
    only: str = ""  # claims to test: ids of claims or names of papers, separated by commas; empty =
    #   all
    seeds: NonNegativeInt = 0  # number of seeds of each of these claims; 0 = that in the claims
    #   file, or as many as the spread over the tuning seeds asks for
    dry_run: bool = False  # print the number of runs, steps and tokens, and the commands known now;
    #   train nothing
    judge_only: bool = False  # run nothing: judge the recorded runs
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU; 1 under torchrun
    out: PathName = "out/reproduce"  # folder of the runs
    results: PathName = ""  # folder for NAME.md, and for NAME/ with the record and the figure;
    #   empty = docs/results for the claims files of studies/, the folder of --out for yours
    format: str = "png"  # of the figure: png, pdf or svg, or several, such as png,pdf

    def __post_init__(self) -> None:
        self.formats = read_formats(self.format)


class MissingRun(Exception):
    """A run is not recorded, and may not be trained."""


class Tuned(NamedTuple):
    """An arm's settings, and the losses that chose them."""

    lr: float | None  # learning rate; None: the config's own
    files: str
    tried: dict[float, Losses] = {}  # {learning rate: losses of the tuning seeds}
    variants: dict[str, tuple[float, float]] = {}  # {further files or flags: (rate, mean loss)}


class RateChoice(NamedTuple):
    """The tuned learning rate or the next one to try, as a power of two; the other is None."""

    tuned: int | None
    to_try: int | None


def choose_claims(only: str, study: Study) -> list[Claim]:
    """The claims that `only` names by id or paper, "" for all. ValueError for another name."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    ids = {claim.id for claim in study.claims}
    papers = {claim.paper for claim in study.claims if claim.paper}
    allowed = sorted(ids | papers)
    if unknown := names.difference(allowed):
        raise ValueError(
            f"only={unknown.pop()} is neither a claim nor a paper of the study: it has "
            f"{', '.join(allowed)}"
        )
    return [claim for claim in study.claims if not names or {claim.id, claim.paper} & names]


def first_seeds(n: int) -> list[int]:
    """The first n seeds of the reported numbers: 1, 2, …, without those that tune."""
    seeds = [seed for seed in range(1, n + len(TUNING_SEEDS) + 1) if seed not in TUNING_SEEDS]
    return seeds[:n]


def choose_rate(losses: dict[int, float]) -> RateChoice:
    """Choose among learning rates that were tried, as powers of two: {k: mean loss, infinite if a
    run diverged}. The tuned rate has the lowest loss of those whose double was tried and costs at
    most CLIFF more; a lower rate than it, and than the best, must have been tried."""
    lowest = min(losses)
    best = min(sorted(losses, reverse=True), key=losses.get)
    if best == max(losses) and losses[best] < math.inf:
        return RateChoice(None, best + 1)
    # inf - inf is nan, which is not below CLIFF
    safe = [k for k in losses if losses.get(k + 1, math.inf) - losses[k] <= CLIFF]
    chosen = min(sorted(safe, reverse=True), key=losses.get, default=lowest)
    if lowest in (best, chosen):
        return RateChoice(None, lowest - 1)
    return RateChoice(chosen, None)


def digest_settings(run: TrainingRun) -> str:
    """A checksum of the run's settings that are not the default, so that a new flag with a default
    changes no checksum. Nor do NEWER_FLAGS, or a new type of block, whose ratio of learning rates
    is 1."""
    settings = {}
    for config in resolve_configs(run.args):
        for field in fields(config):
            value = getattr(config, field.name)
            is_unused_ratio = field.name.startswith("lr_ratio_") and value == 1
            defaults = (field.default, NEWER_FLAGS.get(field.name, field.default))
            if value not in defaults and not is_unused_ratio:
                settings[field.name] = value
    for name in IGNORED_FIELDS:
        settings.pop(name, None)
    return f"{zlib.crc32(json.dumps(settings, sort_keys=True).encode()):08x}"


def read_runs(path: Path) -> dict[str, dict[str, Any]]:
    """{run's name: entry} of a record. ValueError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no record {path}, which the claims file names") from None
    except ValueError:
        raise ValueError(f"{path} is damaged: restore it from git, or remove it") from None


class Record:
    """Runs and their measures, in one file that is written after each change. Threads may share
    it. Runs of the other records are found too, and are not written to."""

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        """ValueError if a file is damaged, or if one of `others` is missing."""
        self.path = path
        self.runs = read_runs(path) if path.exists() else {}  # {run's name: entry}
        # {path: runs} of all records, its own first
        self.all = {path: self.runs} | {other: read_runs(other) for other in others}
        self.lock = threading.Lock()
        self.digest = cache(digest_settings)

    def measures(self, run: TrainingRun) -> dict[str, float | None]:
        """{measure: value} of a run, as far as recorded. ValueError if it was recorded with other
        settings than its command has now."""
        name = run.path.name
        path = next((path for path, runs in self.all.items() if name in runs), None)
        if path is None:
            return {}
        entry = self.all[path][name]
        if entry["settings"] != self.digest(run):
            raise ValueError(
                f"{path}: {name} was recorded with other settings than its config files have now: "
                "undo their change, or remove the entry and its folder to train it again"
            )
        return entry["measures"]

    def add(self, run: TrainingRun, measure: str, value: float | None, **about: object) -> None:
        """Add a measure of a run, and `about`: outcome, seconds, machine; write the file."""
        make_folder(self.path.parent, "--results")
        with self.lock:
            before = self.runs.get(run.path.name, {})  # a run of another record is trained anew
            measures = before.get("measures", {}) | {measure: value}
            entry = {"args": run.args, "settings": self.digest(run), "measures": measures, **about}
            self.runs[run.path.name] = entry
            lines = []
            for name, entry in sorted(self.runs.items()):
                lines.append(f"{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}")
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            write_file(self.path, lambda f: f.write(text.encode()))


def choose_results(config: ReproduceConfig) -> Path:
    """The folder for the page and the record: the given one; or docs/results for a claims file of
    studies/, and for yours if its record is there already; or else that of the runs."""
    if config.results:
        return ROOT / config.results
    tracked = ROOT / "docs" / "results"
    claims = Path(config.claims)
    ours = ROOT / "studies" / claims.name
    is_tracked = (tracked / claims.stem / "record.json").exists()
    if ours.exists():
        is_tracked = ours.resolve() == (ROOT / claims).resolve()
    return tracked if is_tracked else ROOT / config.out


class Experiment:
    """A study that finds each number in the record, or trains and measures the runs for it."""

    def __init__(self, config: ReproduceConfig) -> None:
        check_ranges(config)
        self.config = config
        self.name = Path(config.claims).stem
        self.claims = str(ROOT / config.claims)
        self.study = load_study(self.claims, {"loss", *quantities.MEASURES})
        if config.seeds:
            claims = list(self.study.claims)
            for claim in choose_claims(config.only, self.study):
                claims[claims.index(claim)] = claim._replace(seeds=config.seeds)
            self.study = self.study._replace(claims=claims)
        self.chosen = choose_claims(config.only, self.study)
        self.results = choose_results(config)
        self.folder = self.results / self.name
        others = [ROOT / path for path in self.study.records]
        self.record = Record(self.folder / "record.json", others)
        self.out = (ROOT / config.out / self.name).resolve()
        self.tune = cache(self.tune)
        self.plan = cache(self.plan)
        self.runner = Runner(config.jobs, distributed=not self.study.tuned)
        self.may_train = False  # False: a run that is not recorded raises MissingRun
        self.missing = {}  # {folder: run} of these runs

    # -- the runs of an arm

    def run_of(
        self, name: str, lr: float | None, seed: int, files: str | None = None
    ) -> TrainingRun:
        """The run of an arm with this learning rate (None: its config's own), seed, and files
        (None: the arm's)."""
        arm = self.study.arms[name]
        if files is None:
            files = arm.files
        paths = {}
        flags = {}  # the last value of a flag counts
        for word in f"{self.study.bases[arm.base]} {files}".split():
            if "=" in word:
                flag, value = word.removeprefix("--").split("=", 1)
                flags[flag] = value
            else:  # a file of config/init/ takes the place of the one before it
                paths["init" if "config/init/" in word else word] = word
        if lr is not None:
            flags["learning_rate"] = lr
            if arm.floor:
                flags.setdefault("min_lr", lr * arm.floor)
        run = make_run(self.out, list(paths.values()), flags | {"seed": seed})
        arms = [other for other in self.study.arms.values() if other[:2] == arm[:2]]
        if any(other.keep for other in arms):
            keep_every = max(1, resolve_configs(run.args).train.max_iters // 10)
            run = run._replace(args=(*run.args, f"--keep_every={keep_every}"))
        rate = flags.get("learning_rate", "of its config")
        return run._replace(words=f"{name}, learning rate {rate}, seed {seed}")

    def configs_of(self, name: str, lr: float | None = None, files: str | None = None) -> Configs:
        """The configurations of an arm's runs."""
        return resolve_configs(self.run_of(name, lr, TUNING_SEEDS[0], files).args)

    def tune(self, name: str) -> Tuned:
        """An arm's learning rate and files: given, of another arm, or found by `find_rate`, for
        each of its `tries`. Trains the runs for it, or raises MissingRun."""
        arm = self.study.arms[name]
        if arm.of or arm.lr is not None or not self.study.tuned:
            lr = self.tune(arm.of).lr if arm.of else arm.lr
            if lr is None and arm.times != 1:  # a multiple of the config files' rate
                lr = self.configs_of(arm.of).train.learning_rate
            return Tuned(lr and lr * arm.times, arm.files)
        if not arm.tries:
            return self.find_rate(name, arm.files)
        tuned = {}
        variants = {}
        for more in arm.tries:
            with suppress(MissingRun):  # so that a dry run sees the others' runs too
                tuned[more] = self.find_rate(name, f"{arm.files} {more}".strip())
                lr = tuned[more].lr
                variants[more] = (lr, mean_loss(tuned[more].tried[lr]))
        if len(tuned) < len(arm.tries):
            raise MissingRun
        best = min(variants, key=lambda more: variants[more][1])
        return tuned[best]._replace(variants=variants)

    def find_rate(self, name: str, files: str) -> Tuned:
        """The best learning rate of an arm with these files, by `choose_rate`: factors of two
        around that of the files, on the mean of the tuning seeds."""
        if self.study.trials:
            return self.try_rates(name, files, self.study.trials[self.study.arms[name].base])
        middle = self.configs_of(name, files=files).train.learning_rate
        wanted = [-1, 0, 1]
        tried = {}  # {k: losses of the tuning seeds} at the rate middle · 2^k
        best = None
        while best is None and max(map(abs, wanted)) <= MOST_DOUBLINGS:
            runs = []
            for seed in TUNING_SEEDS:
                runs += [self.run_of(name, middle * 2.0**k, seed, files) for k in wanted]
            losses = self.measure("loss", runs)
            for i, k in enumerate(wanted):
                tried[k] = losses[i :: len(wanted)]
            best, more = choose_rate({k: mean_loss(losses) for k, losses in tried.items()})
            wanted = [more]
        if best is None:  # the grid ends: take one step inside its top, or its lowest rate
            best = max(tried) - 1 if more > 0 else min(tried)
        by_rate = {middle * 2.0**k: tried[k] for k in sorted(tried)}
        return Tuned(middle * 2.0**best, files, by_rate)

    def try_rates(self, name: str, files: str, trials: Trials) -> Tuned:
        """The rate of an arm with the lowest loss, of those that all arms try."""
        words = f"{files} {trials.flags}"
        runs = [self.run_of(name, lr, TUNING_SEEDS[0], words) for lr in trials.rates]
        losses = self.measure("loss", runs)
        tried = {lr: [loss] for lr, loss in zip(trials.rates, losses, strict=True)}
        best = min(tried, key=lambda lr: mean_loss(tried[lr]))
        return Tuned(best, files, tried)

    def plan(self, claim_id: str) -> Plan:
        """The number of seeds of a claim's primary number, by `plan_seeds` from the tuning
        seeds."""
        claim = next(claim for claim in self.study.claims if claim.id == claim_id)
        if claim.cannot:
            return Plan(0, claim.cannot)
        if claim.seeds:
            return Plan(claim.seeds, f"{claim.seeds} seeds, as the claims file or --seeds says")
        spread = self.spread_of(claim.number)
        tuning = self.values(claim.number, TUNING_SEEDS)
        return plan_seeds(claim, tuning, spread, self.tests)

    @property
    def tests(self) -> int:
        """The number of claims that Holm's correction counts."""
        return sum(not claim.cannot for claim in self.study.claims)

    def spread_of(self, number: Number) -> float:
        """The standard deviation of a number over seeds, estimated from the two tuning seeds at its
        arms' tuned rates and at their neighbours: of the number itself, or, if the study is not
        `paired`, as if its arms were independent."""
        near = []  # for each arm [losses with the tuning seeds] at these rates
        for arm in arms_in([number]):
            tuned = self.tune(arm)
            pairs = [losses for lr, losses in tuned.tried.items() if 0.4 < lr / tuned.lr < 2.5]
            if number.measure != "loss" or not pairs:
                pairs = [self.measure(number.measure, self.reported(arm, TUNING_SEEDS))]
            near.append(pairs)
        weights = list(weights_of(number.value).values())
        if not self.study.paired:  # one arm of all pairs
            weights = [math.sqrt(squared_weights(number.value))]
            near = [[pair for pairs in near for pair in pairs]]
        return math.sqrt(paired_variance(weights, near))

    def seeds_of(self, name: str, claims: list[Claim] | None = None) -> list[int]:
        """The seeds that an arm is reported with, of `first_seeds`. Their number is the largest
        that any of the claims (None: all) plans; a side number has its own, or at most
        FEWEST."""
        n = 0
        for claim in claims or self.study.claims:
            with suppress(MissingRun):  # a claim that cannot be planned yet
                planned = self.plan(claim.id).seeds or claim.seeds
                if name in arms_in([claim.number]):
                    n = max(n, planned)
                for side in claim.sides:
                    if name in arms_in([side]):
                        n = max(n, side.seeds or min(planned, FEWEST))
        return first_seeds(n)

    def common_seeds(self, number: Number, claims: list[Claim] | None = None) -> Sequence[int]:
        """The seeds that all arms of a number are reported with; the tuning seeds if none."""
        seeds = [self.seeds_of(name, claims) for name in arms_in([number])]
        return min(seeds, key=len) or TUNING_SEEDS

    def reported(self, name: str, seeds: Sequence[int]) -> list[TrainingRun]:
        """The runs of an arm, as it was tuned, with these seeds; without seeds it is not tuned."""
        runs = []
        for seed in seeds:
            tuned = self.tune(name)
            runs.append(self.run_of(name, tuned.lr, seed, tuned.files))
        return runs

    def values(self, number: Number, seeds: Sequence[int] | None = None) -> list[float]:
        """A number seed by seed, for these seeds or those of `common_seeds`.

        A value is infinite where the loss of one side diverged, in a number of two arms or at a
        multiple of an arm's best rate; nan where another arm diverged, or both sides did.
        MissingRun if a run is not recorded."""
        parts = split_value(number.value)
        seeds = seeds or self.common_seeds(number)
        totals = [0.0] * len(seeds)
        for sign, name in parts:
            decides = len(parts) == 2 or self.study.arms[name].times != 1
            diverged = math.inf if decides and number.measure == "loss" else math.nan
            for i, value in enumerate(self.measure(number.measure, self.reported(name, seeds))):
                totals[i] += sign * (diverged if value is None else value)
        return totals

    # -- training and measuring

    def check(self) -> None:
        """ValueError if a protocol is not the paper's and no reason is given, a dataset is not
        prepared (a dry run needs none), or there is no place to write to."""
        check_folder(self.out, "--out")
        check_folder(self.folder, "--results")
        names = arms_in(number for claim in self.chosen for number in claim.numbers)
        datasets = set()
        for name in names:
            datasets.add(self.read_arm(name).train.dataset)
        for claim in self.chosen:
            self.protocol(claim)
            self.check_arms(claim)
        if not self.config.dry_run:
            for dataset in datasets:
                load_meta(dataset)

    def read_arm(self, name: str) -> Configs:
        """The configurations of an arm's runs. ValueError, with its line in the claims file, for a
        mistake in its files or flags."""
        printed = io.StringIO()  # the mistake, if a command line cannot be read
        try:
            with redirect_stderr(printed):
                return self.configs_of(name)
        except (ValueError, SystemExit) as error:
            mistake = printed.getvalue().strip().removeprefix("error: ") or error
        raise ValueError(f"{locate(self.claims, name)}: arm {name!r}: {mistake}")

    def check_arms(self, claim: Claim) -> None:
        """ValueError if two arms of a number are one configuration at one rate."""
        for number in claim.numbers:
            seen = {}  # {settings and the source of the rate: arm}
            for name in weights_of(number.value):
                arm = self.study.arms[name]
                settings = digest_settings(self.run_of(name, arm.lr, TUNING_SEEDS[0]))
                other = seen.setdefault((settings, arm.of, arm.times, arm.tries), name)
                if other != name:
                    raise ValueError(
                        f"{locate(self.claims, name)}: {other!r} and {name!r}, which claim "
                        f"{claim.id} compares, have the same settings: the base may have them too"
                    )

    def protocol(self, claim: Claim) -> list[ProtocolRow]:
        """The claim's protocol beside the configurations of its primary number's arms."""
        settings = []
        for name in arms_in([claim.number]):
            arm = self.study.arms[name]
            given = self.study.arms[arm.of] if arm.of else arm
            lr = given.lr and given.lr * arm.times
            tuned = self.study.tuned and lr is None
            for more in arm.tries or ("",):
                model_config, config = self.configs_of(name, lr, f"{arm.files} {more}")
                if tuned and arm.floor and "min_lr" not in arm.files:
                    config.min_lr = config.learning_rate * arm.floor
                settings.append(settings_of(model_config, config))
                if tuned:
                    settings[-1]["learning_rate"] = arm.rate_from
        return compare_protocol(claim, settings)

    def train(self) -> int:
        """Settle all claims; returns the exit code."""
        self.find_missing()
        progress = self.runner.progress
        progress.needed = set(self.missing)
        print(f"runs: {progress.size()}, {self.runner.jobs} at a time, in {self.out}", flush=True)
        self.may_train = True
        _, code = self.runner.call_all(self.settle, {claim.id: (claim,) for claim in self.chosen})
        self.may_train = False
        return code

    def settle(self, claim: Claim) -> None:
        """Tune a claim's arms, plan its seeds, and measure its numbers. The loss of every run is
        measured too, for the page."""
        plan = self.plan(claim.id)
        by_path = {}  # each run once
        runs = {}
        for number in claim.numbers:
            runs[number] = []
            for name in arms_in([number]):
                runs[number] += self.reported(name, self.seeds_of(name, [claim]))
            by_path |= {run.path: run for run in runs[number]}
        self.runner.progress.waiting.discard(claim.id)
        if self.may_train:
            self.runner.console.print(f"{claim.id}: {plan.why}")
        self.measure("loss", list(by_path.values()))
        for number in claim.numbers:
            self.measure(number.measure, runs[number])

    def find_missing(self) -> None:
        """Fill `missing` with the runs that are known to be needed, and `waiting` of the progress
        with the ids of the claims that take more."""
        self.runner.progress.waiting = {claim.id for claim in self.chosen}
        for claim in self.chosen:
            seeds = first_seeds(claim.seeds) or TUNING_SEEDS
            for name in arms_in([claim.number]):
                with suppress(MissingRun):
                    if not claim.cannot:
                        self.measure(claim.number.measure, self.reported(name, seeds))
            with suppress(MissingRun):
                self.settle(claim)

    def forecast(self) -> list[str]:
        """Lines on the training that is left: runs, steps and tokens that are known now, their cost
        if it is an hour of an H100 or more, the number of claims that take more, and the commands
        whose rates are known."""
        self.find_missing()
        waiting = [claim for claim in self.chosen if claim.id in self.runner.progress.waiting]
        later = self.find_later(waiting)
        runs = [*self.missing.values(), *later]
        steps = 0
        tokens = 0
        flops = 0
        for run in runs:
            model_config, config = resolve_configs(run.args)
            _, model = resolve(model_config, config)
            n = config.max_iters * config.batch_size * model_config.block_size
            steps += config.max_iters
            tokens += n
            flops += n * model.flops_per_token()
        lines = [f"{len(runs)} runs are known now: {steps:,} steps, {tokens:,} tokens"]
        if later:
            lines.append(f"{len(later)} of them at the rates that the others choose")
        hours = flops / (ASSUMED_MFU * PEAK_FLOPS["H100"]) / 3600
        if hours >= 1:
            lines.append(f"{hours:,.0f} hours of an H100 at {ASSUMED_MFU:.0%} of its peak")
        if unplanned := sum(not claim.seeds for claim in waiting):
            more = f"rates, and {FEWEST} to {MOST} seeds of their arms"
            lines.append(f"more for {count(unplanned, 'claim')}: {more}")
        return lines + [self.runner.command(run) for run in self.missing.values()]

    def find_later(self, claims: list[Claim]) -> list[TrainingRun]:
        """The reported runs of the arms, not tuned yet, of claims that name their seeds; at their
        config files' rates, in place of those that are to be chosen."""
        runs = []
        for name in arms_in(claim.number for claim in claims):
            try:
                self.tune(name)
            except MissingRun:
                runs += [self.run_of(name, None, seed) for seed in self.seeds_of(name, claims)]
        return runs

    def measure(self, measure: str, runs: list[TrainingRun]) -> Losses:
        """A measure of some runs, None for a run that diverged. It is recorded, or the run is
        trained, measured and recorded now. MissingRun if `may_train` is False."""
        missing = [run for run in runs if measure not in self.record.measures(run)]
        if missing and not self.may_train:
            self.missing |= {run.path: run for run in missing}
            raise MissingRun
        self.runner.progress.needed.update(run.path for run in missing)
        with ThreadPoolExecutor(self.runner.jobs) as pool:
            list(pool.map(partial(self.train_and_measure, measure), missing))
        return [self.record.measures(run)[measure] for run in runs]

    def train_and_measure(self, measure: str, run: TrainingRun) -> None:
        """Train a run and record a measure of it, unless that is done already."""
        self.runner.finish(run)
        if self.runner.stopping:
            raise Stopped
        if measure in self.record.measures(run):  # another claim measured it meanwhile
            return
        outcome, value = read_outcome(run.path)
        if measure != "loss" and outcome != "diverged":
            value = quantities.MEASURES[measure](run.path)
        end = read_end(run.path)
        seconds = round(end["wall_s"]) if end else 0  # a run that diverged has no end
        config = resolve_configs(run.args).train
        dtype, _ = choose_dtype(config.dtype, choose_device(config.device)[0])
        hardware = dict(hardware=describe_hardware(), dtype=str(dtype).removeprefix("torch."))
        machine = hardware | read_origin(run.path)
        about = dict(outcome=outcome, seconds=seconds, machine=machine)
        self.record.add(run, measure, value, **about, **read_inputs(run.path))

    # -- verdicts

    def judge(self) -> dict[str, dict[str, Any]]:
        """{claim id: {"claim", "values": {`Number`: by seed}, the primary number first, "pooled",
        "p", "class", "why", "plan"}} of the claims whose primary number is recorded, or that cannot
        be judged."""
        rows = {}
        judged = []
        waiting = 0
        for claim in self.study.claims:
            values = {}
            with suppress(MissingRun):
                plan = self.plan(claim.id)
                values = self.find_values(claim, plan.seeds)
            if claim.number not in values and not claim.cannot:
                waiting += 1
                continue
            row = dict(claim=claim, values=values, plan=plan.why, p=None, pooled=None)
            rows[claim.id] = row
            if plan.seeds == 0:
                row["class"] = "cannot be judged"
                row["why"] = plan.why
                continue
            row["pooled"] = self.pool(claim, values)
            row["p"] = p_value(values[claim.number], claim, row["pooled"])
            judged.append(row)
        p_values = {row["claim"].id: row["p"] for row in judged if row["p"] is not None}
        adjusted = holm(p_values, len(judged) + waiting)
        for row in judged:
            claim = row["claim"]
            row["p"] = adjusted.get(claim.id)
            verdict = classify(row["values"][claim.number], claim, row["p"], row["pooled"])
            row["class"] = verdict.word
            row["why"] = verdict.why
        return rows

    def pool(self, claim: Claim, values: dict[Number, list[float]]) -> Variance | None:
        """The variance of the primary number, pooled over the claim's arms with the same measure
        that have all its seeds; None if they may not be pooled, or if the study is `paired`."""
        if self.study.paired:
            return None
        measure = claim.number.measure
        primary = values[claim.number]
        losses = []
        for name in arms_in(number for number in values if number.measure == measure):
            if len(self.seeds_of(name)) >= len(primary):
                runs = self.reported(name, first_seeds(len(primary)))
                with suppress(MissingRun):
                    losses.append(self.measure(measure, runs))
        pooled = pool_variance([arm for arm in losses if None not in arm])
        if pooled is None or not all(map(math.isfinite, primary)):
            return None
        variance = pooled.variance * squared_weights(claim.number.value)
        return pooled._replace(variance=variance)

    def recorded_seeds(self, number: Number) -> Sequence[int]:
        """The reported seeds with which all arms of a number are recorded; the tuning seeds if
        there are none."""
        recorded = []
        for seed in first_seeds(MOST):
            with suppress(MissingRun):
                self.values(number, [seed])
                recorded.append(seed)
        return recorded or TUNING_SEEDS

    def find_values(self, claim: Claim, n: int) -> dict[Number, list[float]]:
        """The values by seed of a claim's numbers that are recorded. The primary number has the n
        planned seeds, or those of `recorded_seeds` if n is 0; a number of losses all seeds that any
        claim has trained; another number those of this claim."""
        values = {}
        for number in claim.numbers:
            seeds = None
            if number == claim.number:
                seeds = first_seeds(n) or self.recorded_seeds(number)
            elif number.measure != "loss":
                seeds = self.common_seeds(number, [claim])
            with suppress(MissingRun):
                values[number] = self.values(number, seeds)
        return values


def mean_loss(losses: Losses) -> float:
    """The mean over seeds; infinite where one diverged."""
    return math.inf if None in losses else statistics.mean(losses)
