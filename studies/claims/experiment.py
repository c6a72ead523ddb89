"""The runs of a study: which they are, how learning rates are tuned and seeds counted, and the
record of them.

The record is RESULTS/NAME/record.json: {run's name: {"args", "settings", "outcome", "seconds",
"measures": {measure: value, or null if the run diverged}, "machine"}}. Every verdict and figure is
derived from it alone. A run's name ends with a digest of its command; "settings" is one of its
resolved configuration.
"""

import json
import math
import statistics
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from configurator import PathName
from nanodnt.data import load_meta
from nanodnt.files import check_folder, make_folder, write_file
from nanodnt.run.directory import read_end
from nanodnt.tasks import fill_from_dataset
from studies.claims import quantities
from studies.claims.judge import FEWEST, MOST, classify, holm, p_value, plan_seeds, pool_variance
from studies.claims.study import (
    arms_in,
    compare_protocol,
    load_study,
    settings_of,
    split_value,
    squared_weights,
)
from studies.sweep.results import describe_hardware
from studies.sweep.runner import (
    IGNORED_FIELDS,
    ROOT,
    Runner,
    Stopped,
    TrainingRun,
    make_run,
    read_origin,
    read_outcome,
    resolve_configs,
)

# they choose learning rates and the number of seeds, and no verdict is made with them
TUNING_SEEDS = (0, 5)
SEEDS = (1, 2, 3, 4, 6, 7, 8, 9, *range(10, 18))  # that numbers are reported with
MOST_DOUBLINGS = 6  # of the grid's middle, up or down
CLIFF = 0.2  # nats: a rate whose double costs more is no tuned rate


@dataclass
class ReproduceConfig:
    # --- what ---
    claims: PathName = "studies/papers.py"  # the claims file: yours, or one of
    #   studies/
    only: str = ""  # ids of claims, names of papers, separated by commas; empty = all
    dry_run: bool = False  # print how many runs, steps and tokens it takes, and the commands known
    #   now; train nothing
    judge_only: bool = False  # run nothing: judge what is recorded
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU; 1 under torchrun
    out: PathName = "out/reproduce"  # folder of the runs
    results: PathName = "docs/results"  # where NAME.md, and NAME/ with the record and figures, are
    #   written


class MissingRun(Exception):
    """A run is not recorded, and may not be trained."""


class Tuned(NamedTuple):  # an arm's settings, and the losses that chose them
    lr: float | None  # None: the config's own
    files: str
    tried: dict = {}  # learning rate: losses of the tuning seeds, None where the run diverged
    variants: dict = {}  # further files or flags: (their rate, mean loss)


def choose_claims(only: str, study) -> list:
    """The claims that `only` names by id or paper, "" for all. ValueError for another name."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    allowed = {claim.id for claim in study.claims} | {
        claim.paper for claim in study.claims if claim.paper
    }
    if unknown := names - allowed:
        there = ", ".join(sorted(allowed))
        raise ValueError(
            f"only={unknown.pop()} is neither a claim nor a paper of the study: it has {there}"
        )
    return [claim for claim in study.claims if not names or {claim.id, claim.paper} & names]


def choose_rate(losses: dict) -> tuple:
    """(the tuned one or None, else the next one to try) of learning rates as powers of two: {k:
    mean loss, infinite if a run diverged}. The tuned one has the lowest loss of those whose double
    was tried and costs at most CLIFF more, and a lower one was tried."""
    lowest, highest = min(losses), max(losses)
    best = min(sorted(losses, reverse=True), key=losses.get)
    if best == highest and losses[best] < math.inf:
        return None, best + 1
    # inf - inf is nan
    safe = [k for k in losses if losses.get(k + 1, math.inf) - losses[k] <= CLIFF]
    chosen = min(sorted(safe, reverse=True), key=losses.get, default=lowest)
    return (None, lowest - 1) if lowest in (best, chosen) else (chosen, None)


def digest_settings(run: TrainingRun) -> str:
    """A checksum of the run's settings that are not the default; so a new flag with a default
    changes nothing, nor does a new type of block, whose ratio of learning rates is 1."""
    found = {}
    for part in resolve_configs(run.args):
        found |= {
            f.name: getattr(part, f.name)
            for f in fields(part)
            if getattr(part, f.name) != f.default
        }
    unused = {name for name, value in found.items() if name.startswith("lr_ratio_") and value == 1}
    kept = {
        name: value
        for name, value in sorted(found.items())
        if name not in {*IGNORED_FIELDS, *unused}
    }
    return f"{zlib.crc32(json.dumps(kept).encode()):08x}"


class Record:
    """Runs and what was measured of them, in one file that is written after each change. Threads
    may share it."""

    def __init__(self, path: Path):
        """ValueError if the file is damaged."""
        self.path, self.runs = path, {}
        self.lock, self.digest = threading.Lock(), cache(digest_settings)
        if path.exists():
            try:
                self.runs = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                raise ValueError(f"{path} is damaged: restore it from git, or remove it") from None

    def measures(self, run: TrainingRun) -> dict:
        """{measure: value} of what is known. ValueError if it was recorded with other settings than
        its command has."""
        if not (entry := self.runs.get(run.path.name)):
            return {}
        if entry["settings"] != self.digest(run):
            what = f"{self.path}: {run.path.name} was recorded with other settings than its config files have now"
            raise ValueError(
                f"{what}: undo their change, or remove the entry and its folder to train it again"
            )
        return entry["measures"]

    def add(self, run: TrainingRun, measure: str, value: float | None, **about) -> None:
        """Note a measure, and `about`: outcome, seconds, machine; write the file."""
        make_folder(self.path.parent, "--results")
        with self.lock:
            known = self.runs.get(run.path.name, {"measures": {}})["measures"]
            entry = {
                "args": run.args,
                "settings": self.digest(run),
                "measures": known | {measure: value},
            }
            self.runs[run.path.name] = entry | about
            runs = sorted(self.runs.items())
            lines = [
                f"{json.dumps(name)}: {json.dumps(run, ensure_ascii=False)}" for name, run in runs
            ]
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            write_file(self.path, lambda f: f.write(text.encode()))


class Experiment:
    """A study: finds each number in the record; where it is not there, trains and measures."""

    def __init__(self, config: ReproduceConfig):
        self.config, self.name = config, Path(config.claims).stem
        self.study = load_study(str(ROOT / config.claims), {"loss", *quantities.MEASURES})
        self.chosen = choose_claims(config.only, self.study)
        self.folder = ROOT / config.results / self.name
        self.record = Record(self.folder / "record.json")
        self.out = (ROOT / config.out / self.name).resolve()
        self.tune, self.plan = cache(self.tune), cache(self.plan)
        self.runner = Runner(config.jobs, distributed=not self.study.tuned)
        # if not, what is not recorded is a MissingRun, and its run is noted in `missing`
        self.may_train = False
        self.missing = {}

    # -- which runs there are

    def run_of(
        self, name: str, lr: float | None, seed: int, files: str | None = None
    ) -> TrainingRun:
        """The run of an arm with this learning rate (None: its config's own), seed, and files
        (None: the arm's)."""
        arm = self.study.arms[name]
        words = f"{self.study.bases[arm.base]} {arm.files if files is None else files}".split()
        # the last one wins
        flags = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        # a file of config/init/ takes the place of the first one
        paths = {
            "init" if "config/init/" in word else word: word for word in words if "=" not in word
        }
        if lr is not None:
            flags["learning_rate"] = lr
            if arm.floor:
                flags.setdefault("min_lr", lr * arm.floor)
        run = make_run(self.out, list(paths.values()), flags | {"seed": seed})
        if any(other.keep for other in self.study.arms.values() if other[:2] == arm[:2]):
            keep_every = max(1, resolve_configs(run.args)[1].max_iters // 10)
            run = run._replace(args=(*run.args, f"--keep_every={keep_every}"))
        return run

    def configs_of(self, name: str, lr: float | None = None, files: str | None = None) -> tuple:
        """(GPTConfig, TrainConfig) of an arm's runs."""
        return resolve_configs(self.run_of(name, lr, TUNING_SEEDS[0], files).args)

    def tune(self, name: str) -> Tuned:
        """An arm's learning rate and files: given, of another arm, or found by `find_rate`, for
        each of its `tries`. Trains what it needs, or MissingRun."""
        arm = self.study.arms[name]
        if arm.of or arm.lr is not None or not self.study.tuned:
            lr = self.tune(arm.of).lr if arm.of else arm.lr
            if lr is None and arm.times != 1:  # of what its config files set
                lr = self.configs_of(arm.of)[1].learning_rate
            return Tuned(lr and lr * arm.times, arm.files)
        tuned, variants = {}, {}
        for more in arm.tries or ("",):
            tuned[more] = self.find_rate(name, f"{arm.files} {more}".strip())
            variants[more] = tuned[more].lr, mean_loss(tuned[more].tried[tuned[more].lr])
        best = min(variants, key=lambda more: variants[more][1])
        return tuned[best]._replace(variants=variants if arm.tries else {})

    def find_rate(self, name: str, files: str) -> Tuned:
        """The best learning rate of an arm with these files, by `choose_rate`: factors of two
        around that of the files, on the mean of the tuning seeds."""
        middle = self.configs_of(name, files=files)[1].learning_rate
        wanted, tried, best = [-1, 0, 1], {}, None
        while best is None and max(map(abs, wanted)) <= MOST_DOUBLINGS:
            runs = [
                self.run_of(name, middle * 2.0**k, seed, files)
                for seed in TUNING_SEEDS
                for k in wanted
            ]
            losses = self.measure("loss", runs)
            tried |= {k: losses[i :: len(wanted)] for i, k in enumerate(wanted)}
            best, more = choose_rate({k: mean_loss(its) for k, its in tried.items()})
            wanted = [more]
        if best is None:  # at the end of the grid: one step inside its top, or its lowest
            best = max(tried) - 1 if more > 0 else min(tried)
        return Tuned(middle * 2.0**best, files, {middle * 2.0**k: tried[k] for k in sorted(tried)})

    def plan(self, name: str) -> tuple:
        """(seeds of a claim's primary number, 0 if the scale cannot judge it; why): `plan_seeds`
        from the tuning seeds. The spread of one run is that of the tuning seeds' pairs at the tuned
        rates and at their neighbours."""
        claim = next(claim for claim in self.study.claims if claim.id == name)
        if claim.seeds or claim.cannot:
            return (
                0 if claim.cannot else claim.seeds
            ), claim.cannot or f"{claim.seeds} seeds, set in the claims file"
        pairs = []
        for arm in arms_in([claim.number]):
            tuned = self.tune(arm)
            near = [its for lr, its in tuned.tried.items() if 0.4 < lr / tuned.lr < 2.5]
            if claim.number.measure != "loss" or not near:
                near = [self.measure(claim.number.measure, self.reported(arm, TUNING_SEEDS))]
            pairs += [its for its in near if None not in its]
        spread = math.sqrt(sum((a - b) ** 2 / 2 for a, b in pairs) / max(1, len(pairs)))
        spread *= math.sqrt(squared_weights(claim.number.value))
        tests = sum(not claim.cannot for claim in self.study.claims)
        return plan_seeds(claim, self.values(claim.number, TUNING_SEEDS), spread, tests)

    def seeds_of(self, name: str, claims: list | None = None) -> list:
        """The seeds that an arm is reported with: the first of SEEDS, as many as any of the claims
        (None: all) needs that can be planned; side numbers FEWEST."""
        n = 0
        for claim in claims or self.study.claims:
            with suppress(MissingRun):
                planned = self.plan(claim.id)[0] or claim.seeds
                if name in arms_in([claim.number]):
                    n = max(n, planned)
                elif name in arms_in(claim.sides):
                    n = max(n, min(planned, FEWEST))
        return list(SEEDS[:n])

    def reported(self, name: str, seeds) -> list:
        """The runs of an arm, as it was tuned, with these seeds."""
        return [
            self.run_of(name, self.tune(name).lr, seed, self.tune(name).files) for seed in seeds
        ]

    def values(self, number, seeds=None) -> list:
        """A `Number` seed by seed, of these seeds or of those that all its arms have: infinite
        where the loss of one side diverged, of two arms or of one at a multiple of its best rate;
        nan where another arm diverged, or both sides did. MissingRun if one is not recorded."""
        parts = split_value(number.value)
        seeds = seeds or min((self.seeds_of(name) for _, name in parts), key=len) or TUNING_SEEDS
        totals = [0.0] * len(seeds)
        for sign, name in parts:
            tells = number.measure == "loss" and (
                len(parts) == 2 or self.study.arms[name].times != 1
            )
            diverged = math.inf if tells else math.nan
            for i, value in enumerate(self.measure(number.measure, self.reported(name, seeds))):
                totals[i] += sign * (diverged if value is None else value)
        return totals

    # -- training and measuring them

    def check(self) -> None:
        """ValueError if a protocol is not the paper's and no reason is given, a dataset is not
        prepared, or there is no place to write to."""
        check_folder(ROOT / self.config.out / self.name, "--out")
        check_folder(self.folder, "--results")
        for claim in self.chosen:
            self.protocol(claim)
        names = arms_in(number for claim in self.chosen for number in claim.numbers)
        for dataset in {self.configs_of(name)[1].dataset for name in names}:
            load_meta(dataset)

    def protocol(self, claim) -> list:
        """The rows of `compare_protocol`, from the configurations of the arms of the claim's
        primary number."""
        settings = []
        for name in arms_in([claim.number]):
            arm = self.study.arms[name]
            given = self.study.arms[arm.of] if arm.of else arm
            lr = given.lr and given.lr * arm.times
            model_config, config = self.configs_of(name, lr)
            tuned = self.study.tuned and lr is None
            if tuned and arm.floor and "min_lr" not in arm.files:
                config.min_lr = config.learning_rate * arm.floor
            settings.append(settings_of(model_config, config))
            if tuned:
                settings[-1]["learning_rate"] = arm.rate_from
        return compare_protocol(claim, settings)

    def train(self) -> int:
        """Settle all claims; returns the exit code."""
        self.may_train = True
        _, code = self.runner.call_all(self.settle, {claim.id: (claim,) for claim in self.chosen})
        self.may_train = False
        return code

    def settle(self, claim) -> None:
        """Tune a claim's arms, count its seeds, and measure what it asks for. All have their loss
        measured, for the page."""
        self.plan(claim.id)
        runs = {}
        for number in claim.numbers:
            arms = arms_in([number])
            runs[number] = [
                run for name in arms for run in self.reported(name, self.seeds_of(name, [claim]))
            ]
        self.measure("loss", list({run.path: run for its in runs.values() for run in its}.values()))
        for number in claim.numbers:
            self.measure(number.measure, runs[number])

    def forecast(self) -> list:
        """Lines on what is still to be trained: how much of it is known now, what may follow, and
        the commands."""
        waiting = 0
        for claim in self.chosen:
            for name in arms_in([claim.number]):
                with suppress(MissingRun):
                    if not claim.cannot and not claim.seeds:
                        self.measure(claim.number.measure, self.reported(name, TUNING_SEEDS))
            try:
                self.settle(claim)
            except MissingRun:
                waiting += 1
        configs = [resolve_configs(run.args) for run in self.missing.values()]
        for model_config, config in configs:
            fill_from_dataset(model_config, load_meta(config.dataset, verify=False), config.dataset)
        steps = sum(config.max_iters for _, config in configs)
        tokens = sum(
            config.max_iters * config.batch_size * model.block_size for model, config in configs
        )
        lines = [f"{len(configs)} runs are known now: {steps:,} steps, {tokens:,} tokens"]
        if waiting:
            lines.append(
                f"then {waiting} claims take more: rates, and {FEWEST} to {MOST} seeds of their arms"
            )
        return lines + [self.runner.command(run) for run in self.missing.values()]

    def measure(self, measure: str, runs: list) -> list:
        """A measure of some runs, None of one that diverged: recorded, or trained, measured and
        recorded now. Without leave to train, MissingRun."""
        missing = [run for run in runs if measure not in self.record.measures(run)]
        if missing and not self.may_train:
            self.missing |= {run.path: run for run in missing}
            raise MissingRun
        with ThreadPoolExecutor(self.runner.jobs) as pool:
            list(pool.map(partial(self.train_and_measure, measure), missing))
        return [self.record.measures(run)[measure] for run in runs]

    def train_and_measure(self, measure: str, run: TrainingRun) -> None:
        self.runner.finish(run)
        if self.runner.stopping:
            raise Stopped
        if measure in self.record.measures(run):  # of another claim too
            return
        outcome, value = read_outcome(run.path)
        if measure != "loss" and outcome != "diverged":
            value = quantities.MEASURES[measure](run.path)
        end = read_end(run.path) or {"wall_s": 0}  # a run that diverged has none
        machine = {"hardware": describe_hardware(), **read_origin(run.path)}
        self.record.add(
            run, measure, value, outcome=outcome, seconds=round(end["wall_s"]), machine=machine
        )

    # -- verdicts

    def judge(self) -> dict:
        """{claim id: {"claim", "values": {`Number`: by seed}, the primary one first, "pooled", "p",
        "class", "why", "plan"}} of the claims whose primary number is recorded, or that cannot be
        judged."""
        rows, judged, waiting = {}, [], 0
        for claim in self.study.claims:
            values = {}
            with suppress(MissingRun):
                n, plan = self.plan(claim.id)
                values = self.find_values(claim, n)
            if claim.number not in values and not claim.cannot:
                waiting += 1
                continue
            row = dict(claim=claim, values=values, plan=plan, p=None, pooled=None)
            rows[claim.id] = row
            if n:
                row["pooled"] = self.pool(claim, values)
                row["p"] = p_value(values[claim.number], claim, row["pooled"])
                judged.append(row)
            else:
                row["class"], row["why"] = "cannot judge", plan
        p_values = {row["claim"].id: row["p"] for row in judged if row["p"] is not None}
        adjusted = holm(p_values, len(judged) + waiting)
        for row in judged:
            claim = row["claim"]
            row["p"] = adjusted.get(claim.id)
            row["class"], row["why"] = classify(
                row["values"][claim.number], claim, row["p"], row["pooled"]
            )
        return rows

    def pool(self, claim, values: dict) -> tuple | None:
        """(variance of the primary number, its degrees of freedom) if the variances of the claim's
        arms may be pooled: of those of the same measure that have all its seeds."""
        measure, primary = claim.number.measure, values[claim.number]
        losses = []
        for name in arms_in(number for number in values if number.measure == measure):
            if len(self.seeds_of(name)) >= len(primary):
                losses.append(self.measure(measure, self.reported(name, SEEDS[: len(primary)])))
        pooled = pool_variance([its for its in losses if None not in its])
        if pooled is None or not all(map(math.isfinite, primary)):
            return None
        variance, freedom = pooled
        return variance * squared_weights(claim.number.value), freedom

    def find_values(self, claim, n: int) -> dict:
        """{`Number`: its values by seed} of a claim's numbers that are recorded; of the primary one
        the n planned, or where the plan has none, those that it was made by; of losses all that
        there are, for whichever claim."""
        values = {}
        for number in claim.numbers:
            seeds = None
            if number == claim.number and not claim.cannot:
                seeds = SEEDS[:n] or TUNING_SEEDS
            elif number.measure != "loss":
                seeds = (
                    min((self.seeds_of(name, [claim]) for name in arms_in([number])), key=len)
                    or TUNING_SEEDS
                )
            with suppress(MissingRun):
                values[number] = self.values(number, seeds)
        return values


def mean_loss(losses: list) -> float:
    """The mean over seeds; infinite where one diverged."""
    return math.inf if None in losses else statistics.mean(losses)
