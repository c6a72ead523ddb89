"""The claims' runs at one scale: which they are, how learning rates are tuned, and the record of what was measured.

The record is docs/results/claims/SCALE.json: {run's name: {"args", "settings", "outcome", "seconds", "measures":
{measure: value, or null if the run diverged}, "machine"}}. Every verdict and figure is derived from it alone. A run's
name ends with a digest of its command; "settings" is one of its resolved configuration.
"""

import fcntl
import json
import math
import re
import zlib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from nanodnt.data import load_meta
from nanodnt.files import write_file
from studies.claims import quantities
from studies.claims.arms import ARMS, CURVES, SCALES, SEEDS, TUNING_SEED
from studies.claims.claims import CLAIMS, GAPS
from studies.sweep import runner
from studies.sweep.results import describe_hardware
from studies.sweep.runner import IGNORED_FIELDS, ROOT, MissingRun, Runner, Stopped, TrainingRun, resolve_configs

ENTRY = {"args", "settings", "outcome", "seconds", "measures", "machine"}  # of the record
EXTRAS = ("robustness", "momentum-sgd")  # what `only` can name beside claims and papers
MOST_DOUBLINGS = 6  # of the grid's middle, up or down


@dataclass
class ReproduceConfig:
    # --- what ---
    only: str = ""  # ids of claims, names of papers, robustness, momentum-sgd, separated by commas; empty = all
    scale: Literal[tuple(SCALES)] = "mini"  # mini, digits (images): CPU cores; small: one GPU; 124m, paper: more
    seeds: int = 8  # of 1, 2, 3, 4, 6, 7, 8, 9, for each number that can decide; learning rates are tuned with seed 0
    dry_run: bool = False  # print the commands that are missing, as far as they are known, and run nothing
    judge_only: bool = False  # run nothing: judge what is recorded
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU; 1 under torchrun
    out: str = "out/reproduce"  # folder of the runs
    results: str = "docs/results"  # where claims.md, and claims/ with the record and figures, are written


class Tuned(NamedTuple):  # an arm's settings, and the losses that chose them: None where the run diverged
    lr: float | None  # None: the config's own
    files: str
    tried: dict = {}  # learning rate: loss
    variants: dict = {}  # further files or flags: loss


def split_value(value: str) -> list:
    """[(sign, arm)] of "A - B + C"."""
    words = re.split(r" ([+-]) ", value)
    return list(zip([1] + [1 if sign == "+" else -1 for sign in words[1::2]], words[::2], strict=True))


def arms_in(numbers) -> list:
    """The names of all arms of some numbers, each once."""
    return list(dict.fromkeys(name for number in numbers for _, name in split_value(number.value)))


def claims_at(scale: str) -> list:
    """The claims of a scale: those whose arms it has the bases of."""
    bases = SCALES[scale].bases
    return [claim for claim in CLAIMS if all(ARMS[name].family in bases for name in arms_in(claim.numbers))]


def choose_claims(only: str, scale: str = "mini") -> tuple:
    """(claims, extras) of a scale that `only` names by id or paper, "" for all. ValueError for another name."""
    names, claims = [name.strip() for name in only.split(",") if name.strip()], claims_at(scale)
    allowed = {claim.id for claim in claims} | {claim.paper for claim in claims} | set(EXTRAS)
    if unknown := [name for name in names if name not in allowed]:
        allowed = ", ".join(sorted(allowed))
        raise ValueError(f"only={unknown[0]} is neither a claim nor a paper of scale {scale}: allowed are {allowed}")
    claims = [claim for claim in claims if not names or claim.id in names or claim.paper in names]
    return claims, [name for name in EXTRAS if not names or name in names]


def digest_settings(run: TrainingRun) -> str:
    """A checksum of the run's settings that are not the default; so a new flag with a default changes nothing, nor does
    a new type of block, whose ratio of learning rates is 1."""
    found = {}
    for part in resolve_configs(run.args):
        found |= {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
    unused = {name for name, value in found.items() if name.startswith("lr_ratio_") and value == 1}
    kept = {name: value for name, value in sorted(found.items()) if name not in {*IGNORED_FIELDS, *unused}}
    return f"{zlib.crc32(json.dumps(kept).encode()):08x}"


class Record:
    """Runs and what was measured of them, in one file that is written after each change. Threads may share it."""

    def __init__(self, path: Path):
        """ValueError if the file is damaged."""
        self.path, self.runs, self.digest = path, self._read(path), cache(digest_settings)

    @staticmethod
    def _read(path: Path) -> dict:
        try:
            runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if all(ENTRY <= run.keys() for run in runs.values()):
                return runs
        except (ValueError, AttributeError):
            pass
        raise ValueError(f"{path} is damaged: restore it from git, or remove it")

    def measures(self, run: TrainingRun) -> dict:
        """{measure: value} of what is known. ValueError if it was recorded with other settings than its command has."""
        if not (entry := self.runs.get(run.path.name)):
            return {}
        if entry["settings"] != self.digest(run):
            what = f"{self.path}: {run.path.name} was recorded with other settings than its config files have now"
            raise ValueError(f"{what}: undo their change, or remove the entry and its folder to train it again")
        return entry["measures"]

    def add(self, run: TrainingRun, measure: str, value: float | None, **about) -> None:
        """Note a measure, and `about`: outcome, seconds, machine; write the file, with what others recorded."""
        about |= {"args": list(run.args), "settings": self.digest(run)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # between threads too
            runs = self._read(self.path)
            known = runs.get(run.path.name, {"measures": {}})
            runs[run.path.name] = known | about | {"measures": known["measures"] | {measure: value}}
            lines = [f"{json.dumps(name)}: {json.dumps(runs[name], ensure_ascii=False)}" for name in sorted(runs)]
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            write_file(self.path, lambda f: f.write(text.encode()))
            self.runs = runs  # another thread sees the old dictionary or the new one


class Experiment:
    """Claims at a scale: finds each number in the record; where it is not there, trains and measures."""

    def __init__(self, config: ReproduceConfig):
        if not 1 <= config.seeds <= len(SEEDS):
            raise ValueError(f"seeds={config.seeds} must be between 1 and {len(SEEDS)}")
        self.config, self.scale, self.claims = config, SCALES[config.scale], claims_at(config.scale)
        self.curves = CURVES if self.scale.rates and "gpt" in self.scale.bases else {}  # at multiples of tuned rates
        self.record = Record(ROOT / config.results / "claims" / f"{config.scale}.json")
        self.out = (ROOT / config.out / config.scale).resolve()
        self.may_train, self.missing = not (config.dry_run or config.judge_only), {}
        self.tune = cache(self.tune)
        self.runner = Runner(config.jobs, distributed=bool(self.scale.own))

    # -- which runs there are

    def command_of(self, name: str) -> tuple:
        """(base, files) of an arm: its family's and its own, or "" and the papers' own."""
        arm = ARMS[name]
        own = self.scale.own.get(arm.of if arm.times != 1 else name)
        return ("", own) if own else (self.scale.bases.get(arm.family), arm.files)

    def names_of(self, name: str) -> list:
        """All arms with the command and the learning rate of this one: the same runs, as each claim names them."""
        arm, command = ARMS[name], self.command_of(name)
        alike = [other for other, a in ARMS.items() if (a.times, a.lr) == (arm.times, arm.lr)]
        alike = [other for other in alike if not self.scale.rates or ARMS[other].of == arm.of]
        return [other for other in alike if self.command_of(other) == command]

    def run_of(self, name: str, lr: float | None, seed: int, files: str | None = None) -> TrainingRun:
        """The run of an arm with this learning rate (None: its config's own), seed, and files (None: the arm's)."""
        base, its_files = self.command_of(name)
        paths, flags = {}, {}
        for word in f"{base} {its_files if files is None else files}".split():
            flag, equals, value = word.removeprefix("--").partition("=")
            if equals:
                flags[flag] = value  # the last one wins
            else:
                paths["init" if word.startswith("config/init/") else word] = word  # in the first one's place
        if lr is not None:
            flags |= {"learning_rate": lr} if self.scale.own else {"learning_rate": lr, "min_lr": lr / 10}
        keep = any(ARMS[other].keep for other in self.names_of(name))
        return runner.make_run(self.out, list(paths.values()), flags | {"seed": seed}, keep=10 * keep)

    def tune(self, name: str) -> Tuned:
        """An arm's learning rate and files: given, of another arm, or the best of factors of two around the scale's
        rate, and of one beyond while the best is at an edge; then of `tries`. Trains what it needs, or MissingRun."""
        arm, (_, files) = ARMS[name], self.command_of(name)
        if arm.of:
            lr = self.tune(arm.of).lr
            if lr is None and arm.times != 1:  # of what its config files set
                lr = resolve_configs(self.run_of(arm.of, None, TUNING_SEED).args)[1].learning_rate
            return Tuned(lr and lr * arm.times, files)
        middle = self.tune(arm.around).lr if arm.around else self.scale.rates.get(arm.rate)
        if arm.lr is not None or middle is None:
            return Tuned(arm.lr, files)
        low, high = -(arm.points // 2), arm.points // 2
        while True:
            runs = {middle * 2.0**k: self.run_of(name, middle * 2.0**k, TUNING_SEED) for k in range(low, high + 1)}
            self.require(runs.values())
            tried = {lr: self.measure("loss", run) for lr, run in runs.items()}
            best = lowest(tried)
            k = round(math.log2(best / middle))
            if low < k < high or abs(k) == MOST_DOUBLINGS:
                break
            low, high = min(low, k - 1), max(high, k + 1)
        runs = {more: self.run_of(name, best, TUNING_SEED, f"{files} {more}") for more in arm.tries}
        variants = {more: self.measure("loss", run) for more, run in runs.items()}
        return Tuned(best, f"{files} {lowest(variants)}".strip(), tried, variants)

    def seeds_of(self, name: str) -> list:
        """The seeds that an arm is reported with: the first of SEEDS, as many as any of its claims needs."""
        names, most = self.names_of(name), self.config.seeds
        n = min(max(self.scale.side_seeds, *(ARMS[other].seeds for other in names)), most)
        for claim in self.claims:
            if not set(names).isdisjoint(arms_in(claim.numbers[:1])):
                whole = self.config.scale in claim.adequate and not claim.few_seeds
                n = max(n, most if whole else (most + 1) // 2)
        return list(SEEDS[:n])

    def reported(self, name: str, seed: int) -> TrainingRun:
        """The run of an arm, as it was tuned, with a seed that is reported."""
        tuned = self.tune(name)
        return self.run_of(name, tuned.lr, seed, tuned.files)

    def values(self, number) -> list:
        """A `Number` seed by seed, of the seeds that all its arms have: infinite where the loss of one side diverged,
        of two arms or of one at a multiple of its best rate; nan where another arm diverged, or both sides did.
        MissingRun if one is not recorded."""
        parts = split_value(number.value)
        seeds, values = min((self.seeds_of(name) for _, name in parts), key=len), []
        for seed in seeds:
            terms = []
            for sign, name in parts:
                value = self.measure(number.measure, self.reported(name, seed))
                tells = number.measure == "loss" and (len(parts) == 2 or ARMS[name].times != 1)
                terms.append(sign * (value if value is not None else math.inf if tells else math.nan))
            values.append(sum(terms))
        return values

    # -- training and measuring them

    def list_needs(self, claims: list, extras: list) -> dict:
        """{arm: {measures of its reported seeds, none if it only has the tuning seed}}, in the order of training: what
        claims are judged by, robustness, gaps, the other numbers; in each group those last that need another's rate."""
        numbers = [claim.numbers_at(self.config.scale) for claim in claims]
        curves = [name for name in ARMS if name.partition(" ×")[0] in self.curves and "robustness" in extras]
        gaps = GAPS if "momentum-sgd" in extras and self.config.scale == "mini" else []  # its values are those of mini
        groups = [primary for primary, *_ in numbers], gaps, [side for _, *sides in numbers for side in sides]
        pairs = [[(name, {number.measure}) for number in group for name in arms_in([number])] for group in groups]
        pairs.insert(1, [(name, set()) for name in curves])
        needs = {}
        for group in pairs:
            for name, measures in sorted(group, key=lambda need: bool(ARMS[need[0]].of or ARMS[need[0]].around)):
                needs.setdefault(name, set()).update(measures)
        return needs

    def check_datasets(self, names) -> None:
        """ValueError if a dataset of these arms is not prepared."""
        runs = {self.run_of(name, None, TUNING_SEED) for name in names}
        for dataset in {resolve_configs(run.args)[1].dataset for run in runs}:
            load_meta(dataset)

    def train_arm(self, name: str, measures: set) -> None:
        """Train and measure an arm: with the tuning seed, and if any number needs it with the reported seeds."""
        lr = self.tune(name).lr
        runs = {self.run_of(name, lr, TUNING_SEED): ["loss"]} if ARMS[name].times != 1 else {}  # robustness
        for seed in self.seeds_of(name) if measures else ():
            runs[self.reported(name, seed)] = ["loss", *sorted(measures - {"loss"})]
        self.require(runs)
        for run, its in runs.items():
            for measure in its:
                self.measure(measure, run)

    def measure(self, measure: str, run: TrainingRun) -> float | None:
        """A measure of a run: recorded, or trained, measured and recorded now. None if the run diverged."""
        if measure in (known := self.record.measures(run)):
            return known[measure]
        self.require([run], measure)
        self.runner.finish(run)
        if self.runner.stopping:
            raise Stopped
        outcome, value = runner.read_outcome(run.path)
        if measure != "loss" and outcome != "diverged":
            value = quantities.MEASURES[measure](run.path)
        seconds = json.loads((run.path / "done.json").read_text())["seconds"]
        machine = {"hardware": describe_hardware(), **runner.read_origin(run.path)}
        self.record.add(run, measure, value, outcome=outcome, seconds=round(seconds or 0), machine=machine)
        return value

    def require(self, runs, measure: str = "loss") -> None:
        """Without leave to train, note those of the runs whose measure is not recorded; MissingRun if there are any."""
        missing = [run for run in runs if not self.may_train and measure not in self.record.measures(run)]
        self.missing |= {run.path: run for run in missing}
        if missing:
            raise MissingRun


def lowest(losses: dict):
    """The key of the lowest loss, the first of several, "" of none; a run that diverged, None, is the highest."""
    return min(losses, key=lambda key: math.inf if losses[key] is None else losses[key], default="")
