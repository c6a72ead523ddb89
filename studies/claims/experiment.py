"""The runs of a study: which they are, how learning rates are tuned and seeds counted, and the record of them.

The record is RESULTS/NAME/record.json: {run's name: {"args", "settings", "outcome", "seconds", "measures": {measure:
value, or null if the run diverged}, "machine"}}. Every verdict and figure is derived from it alone. A run's name ends
with a digest of its command; "settings" is one of its resolved configuration.
"""

import fcntl
import json
import math
import statistics
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from configurator import PathName
from nanodnt.data import load_meta
from nanodnt.files import check_folder, make_folder, write_file
from nanodnt.run.checkpoints import is_number
from studies.claims import quantities
from studies.claims.judge import FEWEST, classify, holm, p_value, plan_seeds, pool_variance
from studies.claims.study import arms_in, compare_protocol, load_study, split_value, squared_weights
from studies.sweep import runner
from studies.sweep.results import describe_hardware
from studies.sweep.runner import IGNORED_FIELDS, ROOT, MissingRun, Runner, Stopped, TrainingRun, resolve_configs

ENTRY = {"args", "settings", "outcome", "seconds", "measures", "machine"}  # of the record
MACHINE = ("hardware", "torch", "date")  # of "machine", for the page
TUNING_SEEDS = (0, 5)  # they choose learning rates and the number of seeds, and no verdict is made with them
SEEDS = (1, 2, 3, 4, 6, 7, 8, 9, *range(10, 18))  # that numbers are reported with
MOST_DOUBLINGS = 6  # of the grid's middle, up or down
CLIFF = 0.2  # nats: a rate whose double costs more is no tuned rate


@dataclass
class ReproduceConfig:
    # --- what ---
    claims: PathName = "config/studies/papers.py"  # the claims file: yours, or one of config/studies/
    only: str = ""  # ids of claims, names of papers, separated by commas; empty = all
    dry_run: bool = False  # print how many runs and hours it takes, and the commands that are known; train nothing
    judge_only: bool = False  # run nothing: judge what is recorded
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU; 1 under torchrun
    out: PathName = "out/reproduce"  # folder of the runs
    results: PathName = "docs/results"  # where NAME.md, and NAME/ with the record and figures, are written


class Tuned(NamedTuple):  # an arm's settings, and the losses that chose them
    lr: float | None  # None: the config's own
    files: str
    tried: dict = {}  # learning rate: losses of the tuning seeds, None where the run diverged
    variants: dict = {}  # further files or flags: (their rate, mean loss)


def choose_claims(only: str, study) -> list:
    """The claims that `only` names by id or paper, "" for all. ValueError for another name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    allowed = sorted({claim.id for claim in study.claims} | {claim.paper for claim in study.claims} - {""})
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"only={unknown[0]} is neither a claim nor a paper of the study: it has {', '.join(allowed)}")
    return [claim for claim in study.claims if not names or claim.id in names or claim.paper in names]


def choose_rate(losses: dict) -> tuple:
    """(the tuned one or None, those to try before that can be said) of learning rates as powers of two: {k: mean loss,
    infinite if a run diverged}. The tuned one has the lowest loss of those whose double was tried and costs at most
    CLIFF more, and a lower one was tried. Where stepping back from a cliff costs more than CLIFF too, half steps are
    tried."""
    tried = sorted(losses)
    best = min(reversed(tried), key=losses.get)
    if best in (tried[0], tried[-1]):
        return None, [best + 1 if best == tried[-1] and losses[best] < math.inf else tried[0] - 1]
    safe = [k for k in tried if losses.get(k + 1, math.inf) - losses[k] <= CLIFF]  # inf - inf is nan
    chosen = min(reversed(safe), key=losses.get, default=tried[0])
    if chosen == tried[0]:
        return None, [chosen - 1]
    halves = [best - 0.5, best + 0.5]
    if losses[chosen] - losses[best] > CLIFF and best == int(best) and not set(halves) <= set(losses):
        return None, halves
    return chosen, []


def digest_settings(run: TrainingRun) -> str:
    """A checksum of the run's settings that are not the default; so a new flag with a default changes nothing, nor does
    a new type of block, whose ratio of learning rates is 1."""
    found = {}
    for part in resolve_configs(run.args):
        found |= {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
    unused = {name for name, value in found.items() if name.startswith("lr_ratio_") and value == 1}
    kept = {name: value for name, value in sorted(found.items()) if name not in {*IGNORED_FIELDS, *unused}}
    return f"{zlib.crc32(json.dumps(kept).encode()):08x}"


def is_entry(run: dict) -> bool:
    """Whether it is an entry of the record: what is read of one is there and of its type."""
    texts = [run["args"][0], *run["args"], run["outcome"], *(run["machine"][key] for key in MACHINE)]
    numbers = [run["seconds"], *(value for value in run["measures"].values() if value is not None)]
    return ENTRY <= run.keys() and all(isinstance(text, str) for text in texts) and all(map(is_number, numbers))


class Record:
    """Runs and what was measured of them, in one file that is written after each change. Threads may share it."""

    def __init__(self, path: Path):
        """ValueError if the file is damaged."""
        self.path, self.runs, self.digest = path, self._read(path), cache(digest_settings)

    @staticmethod
    def _read(path: Path) -> dict:
        try:
            runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if all(map(is_entry, runs.values())):
                return runs
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
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
        make_folder(self.path.parent, "--results")
        with open(self.path.with_name(f".{self.path.name}.lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # between threads too
            runs = self._read(self.path)
            known = runs.get(run.path.name, {"measures": {}})
            runs[run.path.name] = known | about | {"measures": known["measures"] | {measure: value}}
            lines = [f"{json.dumps(name)}: {json.dumps(runs[name], ensure_ascii=False)}" for name in sorted(runs)]
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            write_file(self.path, lambda f: f.write(text.encode()))
            self.runs = runs  # another thread sees the old dictionary or the new one


class Experiment:
    """A study: finds each number in the record; where it is not there, trains and measures."""

    def __init__(self, config: ReproduceConfig):
        self.config, self.name = config, Path(config.claims).stem
        self.study = load_study(str(ROOT / config.claims), {"loss", *quantities.MEASURES})
        self.chosen = choose_claims(config.only, self.study)
        self.folder = ROOT / config.results / self.name
        self.record = Record(self.folder / "record.json")
        self.out = (ROOT / config.out / self.name).resolve()
        self.may_train, self.missing = not (config.dry_run or config.judge_only), {}
        self.tune, self.plan = cache(self.tune), cache(self.plan)
        self.runner = Runner(config.jobs, distributed=not self.study.tuned)

    # -- which runs there are

    def run_of(self, name: str, lr: float | None, seed: int, files: str | None = None) -> TrainingRun:
        """The run of an arm with this learning rate (None: its config's own), seed, and files (None: the arm's)."""
        arm = self.study.arms[name]
        paths, flags = {}, {}
        for word in f"{self.study.bases[arm.base]} {arm.files if files is None else files}".split():
            flag, equals, value = word.removeprefix("--").partition("=")
            if equals:
                flags[flag] = value  # the last one wins
            else:
                paths["init" if word.startswith("config/init/") else word] = word  # in the first one's place
        if lr is not None:
            flags["learning_rate"] = lr
            if arm.floor:
                flags.setdefault("min_lr", lr * arm.floor)
        keep = any(a.keep for a in self.study.arms.values() if a[:2] == arm[:2])
        return runner.make_run(self.out, list(paths.values()), flags | {"seed": seed}, keep=10 * keep)

    def tune(self, name: str) -> Tuned:
        """An arm's learning rate and files: given, of another arm, or found by `find_rate`, for each of its `tries`.
        Trains what it needs, or MissingRun."""
        arm = self.study.arms[name]
        if arm.of or arm.lr is not None or not self.study.tuned:
            lr = self.tune(arm.of).lr if arm.of else arm.lr
            if lr is None and arm.times != 1:  # of what its config files set
                lr = resolve_configs(self.run_of(arm.of, None, TUNING_SEEDS[0]).args)[1].learning_rate
            return Tuned(lr and lr * arm.times, arm.files)
        found = {more: self.find_rate(name, f"{arm.files} {more}".strip()) for more in arm.tries or ("",)}
        losses = {more: mean_loss(tuned.tried[tuned.lr]) for more, tuned in found.items()}
        variants = {more: (found[more].lr, loss) for more, loss in losses.items()} if arm.tries else {}
        return found[min(losses, key=losses.get)]._replace(variants=variants)

    def find_rate(self, name: str, files: str) -> Tuned:
        """The best learning rate of an arm with these files, by `choose_rate`: factors of two around that of the files,
        on the mean of the tuning seeds."""
        middle = resolve_configs(self.run_of(name, None, TUNING_SEEDS[0], files).args)[1].learning_rate
        wanted, tried, best = [-1, 0, 1], {}, None
        while wanted and max(map(abs, wanted)) <= MOST_DOUBLINGS:
            runs = {k: [self.run_of(name, middle * 2.0**k, s, files) for s in TUNING_SEEDS] for k in wanted}
            self.require(run for its in runs.values() for run in its)
            with ThreadPoolExecutor(len(wanted) * len(TUNING_SEEDS)) as pool:  # the runner has `jobs` at a time
                found = {k: pool.map(partial(self.measure, "loss"), its) for k, its in runs.items()}
            tried |= {k: list(its) for k, its in found.items()}
            best, wanted = choose_rate({k: mean_loss(losses) for k, losses in tried.items()})
        if best is None:  # at the end of the grid: one step inside its top, or its lowest
            best = max(tried) - 1 if wanted[0] > 0 else min(tried)
        return Tuned(middle * 2.0**best, files, {middle * 2.0**k: tried[k] for k in sorted(tried)})

    def plan(self, name: str) -> tuple:
        """(seeds of a claim's primary number, 0 if the scale cannot judge it; why): `plan_seeds` from the tuning seeds.
        The spread of one run is that of the tuning seeds' pairs at the tuned rates and at their neighbours."""
        claim = next(claim for claim in self.study.claims if claim.id == name)
        if claim.seeds or claim.cannot:
            return (0 if claim.cannot else claim.seeds), claim.cannot or f"{claim.seeds} seeds, set in the claims file"
        pairs = []
        for arm in arms_in([claim.number]):
            tuned = self.tune(arm)
            near = [its for lr, its in tuned.tried.items() if 0.4 < lr / tuned.lr < 2.5]
            if claim.number.measure != "loss" or not near:
                near = [[self.measure(claim.number.measure, self.reported(arm, s)) for s in TUNING_SEEDS]]
            pairs += [its for its in near if None not in its]
        spread = math.sqrt(sum((a - b) ** 2 / 2 for a, b in pairs) / max(1, len(pairs)))
        spread *= math.sqrt(squared_weights(claim.number.value))
        tests = sum(not claim.cannot for claim in self.study.claims)
        return plan_seeds(claim, self.values(claim.number, TUNING_SEEDS), spread, tests)

    def seeds_of(self, name: str, claims: list | None = None) -> list:
        """The seeds that an arm is reported with: the first of SEEDS, as many as any of the claims needs that can be
        planned; side numbers FEWEST."""
        n = 0
        for claim in self.study.claims if claims is None else claims:
            if name in arms_in(claim.numbers):
                with suppress(MissingRun):
                    planned = self.plan(claim.id)[0] or claim.seeds
                    n = max(n, planned if name in arms_in([claim.number]) else min(planned, FEWEST))
        return list(SEEDS[:n])

    def reported(self, name: str, seed: int) -> TrainingRun:
        """The run of an arm, as it was tuned, with a seed."""
        tuned = self.tune(name)
        return self.run_of(name, tuned.lr, seed, tuned.files)

    def values(self, number, seeds=None) -> list:
        """A `Number` seed by seed, of these seeds or of those that all its arms have: infinite where the loss of one
        side diverged, of two arms or of one at a multiple of its best rate; nan where another arm diverged, or both
        sides did. MissingRun if one is not recorded."""
        parts, values = split_value(number.value), []
        seeds = seeds or min((self.seeds_of(name) for _, name in parts), key=len) or TUNING_SEEDS
        for seed in seeds:
            terms = []
            for sign, name in parts:
                value = self.measure(number.measure, self.reported(name, seed))
                tells = number.measure == "loss" and (len(parts) == 2 or self.study.arms[name].times != 1)
                terms.append(sign * (value if value is not None else math.inf if tells else math.nan))
            values.append(sum(terms))
        return values

    # -- training and measuring them

    def check(self) -> None:
        """ValueError if a protocol is not the paper's and no reason is given, a dataset is not prepared, or there is no
        place to write to."""
        check_folder(ROOT / self.config.out / self.name, "--out")
        check_folder(self.folder, "--results")
        for claim in self.chosen:
            self.protocol(claim)
        names = arms_in(number for claim in self.chosen for number in claim.numbers)
        runs = {self.run_of(name, None, TUNING_SEEDS[0]) for name in names}
        for dataset in {resolve_configs(run.args)[1].dataset for run in runs}:
            load_meta(dataset)

    def protocol(self, claim) -> list:
        """The rows of `compare_protocol`, from the configurations of the arms of the claim's primary number."""
        configs = []
        for name in arms_in([claim.number]):
            arm = self.study.arms[name]
            given = self.study.arms[arm.of] if arm.of else arm
            lr = given.lr and given.lr * arm.times
            args = self.run_of(name, lr, TUNING_SEEDS[0]).args
            model_config, config = resolve_configs(args)
            if lr is None and arm.floor and self.study.tuned and "min_lr" not in arm.files:
                config.min_lr = config.learning_rate * arm.floor
            configs.append((model_config, config, arm.rate_from if self.study.tuned and lr is None else ""))
        return compare_protocol(claim, configs)

    def tuning_tasks(self) -> dict:
        """{arm: arguments of `prepare`}: what claims are judged by; those last that need another's rate."""
        arms = arms_in(claim.number for claim in self.chosen if not claim.cannot or claim.seeds)
        return {name: (name,) for name in sorted(arms, key=lambda name: bool(self.study.arms[name].of))}

    def prepare(self, name: str) -> None:
        """Tune an arm, and measure with the tuning seeds what its claims' seeds are counted by."""
        self.tune(name)
        judged = [claim.number for claim in self.chosen if not claim.cannot and not claim.seeds]
        for measure in sorted({number.measure for number in judged if name in arms_in([number])}):
            self.finish(name, TUNING_SEEDS, {measure})

    def reporting_tasks(self) -> dict:
        """{what: arguments of `finish`} of the reported seeds, of the claims that can be planned, in their order. All
        have their loss measured, for the page."""
        tasks = {}
        for claim in self.chosen:
            for number in claim.numbers:
                for name in arms_in([number]):
                    for seed in self.seeds_of(name, [claim]):
                        what = f"{name}, seed {seed}"
                        tasks.setdefault(what, (name, [seed], {"loss"}))[2].add(number.measure)
        return tasks

    def finish(self, name: str, seeds, measures: set) -> None:
        """Train an arm with these seeds, as it is tuned, and measure it."""
        runs = [self.reported(name, seed) for seed in seeds]
        for measure in sorted(measures, key=lambda measure: (measure != "loss", measure)):
            self.require(runs, measure)
            for run in runs:
                self.measure(measure, run)

    @contextmanager
    def only_reading(self):
        """Inside, nothing is trained: what is not recorded is a MissingRun."""
        before, self.may_train = self.may_train, False
        try:
            yield
        finally:
            self.may_train, self.missing = before, {}

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
        seconds = json.loads((run.path / "done.json").read_text(encoding="utf-8"))["seconds"]
        machine = {"hardware": describe_hardware(), **runner.read_origin(run.path)}
        self.record.add(run, measure, value, outcome=outcome, seconds=round(seconds or 0), machine=machine)
        return value

    def require(self, runs, measure: str = "loss") -> None:
        """Without leave to train, note those of the runs whose measure is not recorded; MissingRun if there are any."""
        missing = [run for run in runs if not self.may_train and measure not in self.record.measures(run)]
        self.missing |= {run.path: run for run in missing}
        if missing:
            raise MissingRun

    # -- verdicts

    def judge(self) -> dict:
        """{claim id: {"claim", "values": {`Number`: by seed}, the primary one first, "pooled", "p", "class", "why",
        "plan"}} of the claims whose primary number is recorded, or that cannot be judged."""
        found = {}
        for claim in self.study.claims:
            try:
                n, plan = self.plan(claim.id)
                values = self.find_values(claim, n)
            except MissingRun:
                continue
            if claim.number not in values and not claim.cannot:
                continue
            row = found[claim.id] = dict(claim=claim, values=values, plan=plan, p=None, pooled={})
            if n:
                row["pooled"] = self.pool(claim, values)
                row["p"] = p_value(values[claim.number], claim, row["pooled"].get(claim.number))
            else:
                row["class"], row["why"] = "cannot judge", plan
        raw = {name: row["p"] for name, row in found.items() if row["p"] is not None}
        waiting = [claim for claim in self.study.claims if claim.id not in found and not claim.cannot]
        adjusted = holm(raw, sum(row.get("class") != "cannot judge" for row in found.values()) + len(waiting))
        for name, row in found.items():
            row["p"] = adjusted.get(name)
            if "class" not in row:
                pooled = row["pooled"].get(row["claim"].number)
                row["class"], row["why"] = classify(row["values"][row["claim"].number], row["claim"], row["p"], pooled)
        return found

    def pool(self, claim, values: dict) -> dict:
        """{the primary `Number`: (variance, degrees of freedom)} if the variances of the claim's arms may be pooled: of
        those of the same measure that have all its seeds. {} if not."""
        measure, losses = claim.number.measure, []
        seeds = SEEDS[: len(values[claim.number])]
        for name in arms_in(number for number in values if number.measure == measure):
            if len(self.seeds_of(name)) >= len(seeds):
                losses.append([self.measure(measure, self.reported(name, seed)) for seed in seeds])
        found = pool_variance([its for its in losses if None not in its])
        whole = found and all(map(math.isfinite, values[claim.number]))
        return {claim.number: (found[0] * squared_weights(claim.number.value), found[1])} if whole else {}

    def find_values(self, claim, n: int) -> dict:
        """{`Number`: its values by seed} of a claim's numbers that are recorded; of the primary one the n planned, or
        where the plan has none, those that it was made by; of losses all that there are, for whichever claim."""
        found = {}
        for number in claim.numbers:
            with suppress(MissingRun):
                seeds = None
                if number == claim.number and not claim.cannot:
                    seeds = SEEDS[:n] or TUNING_SEEDS
                elif number.measure != "loss":
                    seeds = min((self.seeds_of(name, [claim]) for name in arms_in([number])), key=len) or TUNING_SEEDS
                found[number] = self.values(number, seeds)
        return found


def mean_loss(losses: list) -> float:
    """The mean over seeds; infinite where one diverged."""
    return math.inf if None in losses else statistics.mean(losses)
