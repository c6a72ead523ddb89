"""Test the papers' claims: train the runs that are missing, measure, judge, and write docs/results/claims.md.

python reproduce.py                                    # every claim at the smallest scale, on CPU cores
python reproduce.py --only=lns-loss,DyT                # some claims, or those of a paper
python reproduce.py --scale=small --jobs=4             # on one GPU
python reproduce.py --scale=124m --dry_run=True        # the commands that are missing, here for torchrun

claims.py has the claims, as data. Kill it at any time and start it again: finished runs stay, an unfinished one goes on
from its last checkpoint. An arm's learning rate is searched from a stated start along a stated grid, with the first
seed, until both neighbours are worse or it ends; the best is run with all seeds. A number is confirmed or refuted where
the 95% interval of its mean over seeds (Student's t) lies within or without the values that confirm it, else
inconclusive.
"""

import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import claims_report
import quantities
import rundir
import runtime
from claims import ARMS, CLAIMS, SCALES, Arm, Claim, interval, together, verdict
from configurator import configure
from loader import load_meta
from measure import device_name
from model import GPTConfig
from optim import fill_defaults
from train import TrainConfig

ROOT = Path(__file__).resolve().parent
# what a run may have otherwise than its command line says, without being another
UNLIKE = ("vocab_size", "out_dir", "init_from", "overwrite", "keep_every", "track_interval")


@dataclass
class ReproduceConfig:
    # --- what ---
    only: str = ""  # ids of claims or names of papers, with commas between; empty = all
    scale: Literal["tiny", "small", "124m", "paper"] = "tiny"  # CPU cores; one GPU; 0.12B; the papers' own
    seeds: int = 3  # seeds of each number, from 1
    dry_run: bool = False  # print the commands that are missing as far as they are known, and run nothing
    judge_only: bool = False  # run nothing: judge the claims whose runs are all there
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one a CPU core, 4 on a GPU, 1 under torchrun
    out: str = "out/reproduce"  # folder of the runs
    results: str = "docs/results"  # where claims.md, and claims/ with numbers and figures, are written

    def check(self):
        """ValueError for values that mean nothing."""
        if not 1 <= self.seeds <= 10:
            raise ValueError(f"seeds={self.seeds} must be between 1 and 10")
        if self.jobs < 0:
            raise ValueError(f"jobs={self.jobs} must not be negative (0 = by the machine)")


def chosen(only: str, scale: str = "tiny") -> list:
    """The claims that `only` names, by id or paper, and `scale` can test. ValueError for a name that is neither."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    allowed = {claim.id for claim in CLAIMS} | {claim.paper for claim in CLAIMS}
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"only={unknown[0]} is neither a claim nor a paper: allowed are {', '.join(sorted(allowed))}")
    named = [claim for claim in CLAIMS if not names or claim.id in names or claim.paper in names]
    if beyond := [claim.id for claim in named if claim.id in names and scale not in claim.scales]:
        raise ValueError(f"{beyond[0]} is no claim for scale {scale}: {claims_report.why_not(beyond[0])}")
    return [claim for claim in named if scale in claim.scales]


# ------------------------------------------------------------------------------------------------------------- runs


class Run(NamedTuple):
    """One training run: its folder, and what follows `train.py`."""

    path: Path
    args: tuple


def command_of(*parts: str) -> tuple:
    """(config files, {flag: value}) of texts in that order; a later flag replaces an earlier."""
    files, flags = [], {}
    for word in " ".join(parts).split():
        name, equals, value = word.removeprefix("--").partition("=")
        if equals:
            flags[name] = value
        else:
            files.append(word)
    return files, flags


def resolved(args) -> tuple:
    """(GPTConfig, TrainConfig) of a command line."""
    (flags, config), _ = configure(GPTConfig, TrainConfig, argv=[str(ROOT / a) if a[0] != "-" else a for a in args])
    return flags, config


class Stopped(Exception):
    """The user ended it; runs have saved."""


class Runner:
    """Trains runs, each once, `jobs` at a time, and remembers the learning rates found."""

    def __init__(self, config: ReproduceConfig):
        self.config, self.scale = config, SCALES[config.scale]
        self.out = (ROOT / config.out / config.scale).resolve()
        cuda = torch.cuda.is_available()
        self.jobs = config.jobs or (1 if self.scale.distributed else 4 if cuda else os.cpu_count() or 1)
        self.launcher = [sys.executable]
        if self.scale.distributed and torch.cuda.device_count() > 1:
            self.launcher += ["-m", "torch.distributed.run", "--standalone"]
            self.launcher += [f"--nproc_per_node={torch.cuda.device_count()}"]
        self.env = os.environ | ({} if cuda or self.jobs == 1 else {"OMP_NUM_THREADS": "1"})
        if "OMP_NUM_THREADS" in self.env:
            torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))  # measuring goes on beside training
        self.guard, self.locks, self.children, self.stopping = threading.Lock(), {}, set(), False
        self.missing, self.made, self.began = [], 0, time.perf_counter()
        self.pool = ThreadPoolExecutor(self.jobs)

    # -- what is to be run

    def run(self, arm: Arm, lr: float | None, seed: int) -> Run:
        name = next((name for name, other in ARMS.items() if other is arm), None)
        files, flags = command_of(self.scale.bases[arm.family], arm.files, self.scale.changes.get(name, ""))
        if lr is not None:
            flags |= {"learning_rate": f"{lr:g}", "min_lr": f"{lr / 10:g}"}
        args = [*files, *(f"--{name}={value}" for name, value in flags.items()), f"--seed={seed}"]
        if arm.keep:  # not in the name: the same run, watched
            keep = [f"--keep_every={max(1, resolved(args)[1].max_iters // 10)}"]
        digest = hashlib.sha256(" ".join(args).encode()).hexdigest()[:6]
        words = [Path(f).stem for f in command_of(arm.files)[0]] or ["base"]
        name = "-".join([arm.family, *words, *([f"lr{lr:g}"] if lr is not None else []), f"seed{seed}", digest])
        return Run(self.out / name, tuple(args + keep if arm.keep else args))

    def rates(self, arm: Arm) -> tuple:
        """(learning rate of the arm, {rate tried: loss of the first seed}); the search trains what it needs."""
        if isinstance(arm.lr, str):
            return self.rates(ARMS[arm.lr])[0], {}
        grid, start = self.scale.grids[arm.grid]
        if arm.lr is not None or grid == (None,):
            return arm.lr, {}
        tried, i = {}, grid.index(start)
        while True:
            near = [j for j in (i - 1, i, i + 1) if 0 <= j < len(grid)]  # of equals, such as diverged ones, the lowest
            runs = {grid[j]: self.run(arm, grid[j], 1) for j in near if grid[j] not in tried}
            for run in runs.values():
                self.finish(run)  # all before the first is measured: dry_run knows them too
            tried |= {lr: self.measured("loss", run) for lr, run in runs.items()}
            best = min(near, key=lambda j: tried[grid[j]])
            if best == i:
                return grid[i], tried
            i = best

    def values(self, name: str, measure: str) -> list:
        """The measure of an arm, seed by seed; a number in place of an arm is itself."""
        if re.fullmatch(r"[\d.]+", name):
            return [float(name)]
        if measure in quantities.OF_CONFIG:
            return [quantities.OF_CONFIG[measure](*resolved(name.split()))]
        arm = ARMS[name]
        lr = self.rates(arm)[0]
        return [self.measured(measure, self.run(arm, lr, seed)) for seed in range(1, self.config.seeds + 1)]

    # -- running it

    def lock_of(self, path: Path) -> threading.Lock:
        with self.guard:
            return self.locks.setdefault(path, threading.Lock())

    def finish(self, run: Run) -> None:
        """Train `run` unless it is finished; under dry_run and judge_only note that it is missing."""
        with self.lock_of(run.path):
            if self.is_done(run):
                return
            if self.config.dry_run or self.config.judge_only:
                with self.guard:
                    self.missing.append(run)
                return
            run.path.mkdir(parents=True, exist_ok=True)
            with self.hold(run.path) as lock:
                if self.is_done(run):  # by the process that held it
                    return
                began = time.perf_counter()
                self.train(run, lock)
                outcome, seconds = self.outcome(run), time.perf_counter() - began
                record = {"args": run.args, "outcome": outcome, "seconds": seconds}
                rundir.write_file(run.path / "done.json", lambda f: f.write(json.dumps(record, indent=1).encode()))
            with self.guard:
                self.made += 1
                minutes = (time.perf_counter() - self.began) / 60
                loss = quantities.loss(run.path)
                print(f"{minutes:6.1f} min  run {self.made}: {run.path.name}  {outcome}, loss {loss:.4f}", flush=True)

    def is_done(self, run: Run) -> bool:
        """Whether it is finished. ValueError if that was with other settings than its files and flags have now."""
        if not (run.path / "done.json").exists():
            return False
        flags, config = resolved(run.args)
        fill_defaults(config)
        made = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
        made, wanted = {**made["model"], **made["train"]}, {**asdict(flags), **asdict(config)}
        for name in UNLIKE:
            made.pop(name, None)
        changed = [f"{k} {v!r} → {wanted.get(k)!r}" for k, v in made.items() if wanted.get(k) != v]
        if changed:
            raise ValueError(f"{run.path} was trained with other settings ({', '.join(changed)}): remove it")
        return True

    def hold(self, path: Path):
        """An open file that locks `path` for this process, and for the train.py that inherits it: one that outlives a
        killed reproduce.py goes on, and the next one waits for it."""
        file, said = open(path / ".reproduce", "w"), False
        while rundir.fcntl:
            try:
                rundir.fcntl.flock(file, rundir.fcntl.LOCK_EX | rundir.fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    print(f"waiting: {path} is being trained by another process", flush=True)
                said = True
                if self.stopping:
                    raise Stopped from None
                time.sleep(1)
            except OSError:  # a file system without locks
                break
        return file

    def train(self, run: Run, lock) -> None:
        """train.py on `run`, from its last checkpoint if there is one, until it ends."""
        command = [*self.launcher, str(ROOT / "train.py"), *run.args, "--init_from=auto", f"--out_dir={run.path}"]
        with open(run.path / "train.log", "ab") as log:
            how = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
            how |= dict(pass_fds=(lock.fileno(),)) if rundir.fcntl else {}
            with self.guard:
                if self.stopping:
                    raise Stopped
                child = subprocess.Popen(command, **how)
                self.children.add(child)
                if self.stopping:  # meanwhile: `stop` has not seen it
                    child.terminate()
            code = child.wait()
        with self.guard:
            self.children.remove(child)
            if self.stopping:
                raise Stopped
        if code and self.outcome(run) != "diverged":
            lines = (run.path / "train.log").read_text(errors="replace").splitlines()
            raise ValueError(f"a run ended with exit code {code} ({(lines or [''])[-1]}): see {run.path / 'train.log'}")

    def outcome(self, run: Run) -> str:
        rows = rundir.read_metrics(run.path)
        return "diverged" if rows and "failure" in rows[-1] else "finished"

    def stop(self, *_) -> None:
        """End: runs save and leave."""
        self.stopping = True
        for child in list(self.children):
            child.terminate()

    def measured(self, measure: str, run: Run) -> float:
        """A measure of a finished run, which is trained if it is not there; kept in its folder.

        Missing under dry_run and judge_only, where it is not trained."""
        self.finish(run)
        if not (run.path / "done.json").exists():
            raise Missing
        if self.stopping:
            raise Stopped
        with self.lock_of(run.path):  # several arms may ask at once
            return quantities.cached(measure, run.path)


class Missing(Exception):
    """A run that is not there, where none may be made."""


# ----------------------------------------------------------------------------------------------- judging, recording


def judge(claim: Claim, runner: Runner) -> dict:
    """The claim's numbers and verdict, training what is missing."""
    rows, arms = [], {}
    for row in claim.rows:
        terms = re.split(r" ([+-]) ", row.value)
        signs = [1] + [1 if sign == "+" else -1 for sign in terms[1::2]]
        parts = {name: runner.values(name, row.measure) for name in terms[::2]}
        n = max(map(len, parts.values()))
        columns = [v * (n // len(v)) for v in parts.values()]
        values = [sum(s * x for s, x in zip(signs, column, strict=True)) for column in zip(*columns, strict=True)]
        mean, low, high = interval(values)
        different = {v for column in columns for v in column}  # a single one: all diverged, and count as ln V
        if (len(columns) > 1 and len(different) == 1) or (len(values) == 1 and set(parts) & set(ARMS)):  # or no spread
            low, high = -math.inf, math.inf
        rows.append(dict(says=row.says, measure=row.measure, value=row.value, expect=row.expect, values=values))
        rows[-1] |= dict(parts=parts, mean=mean, low=low, high=high, verdict=verdict(low, high, row.expect))
        for name in [name for name in parts if name in ARMS]:
            lr, tried = runner.rates(ARMS[name])
            arms[name] = dict(lr=lr, tried=tried, files=ARMS[name].files, lr_of=ARMS[name].lr)
            grid = runner.scale.grids[ARMS[name].grid][0]
            arms[name]["edge"] = bool(tried) and lr in (grid[0], grid[-1])
    return dict(id=claim.id, verdict=together([row["verdict"] for row in rows]), rows=rows, arms=arms)


def arms_of(claim: Claim) -> list:
    """The names of the arms that a claim's rows need."""
    names = [name for row in claim.rows for name in re.split(r" [+-] ", row.value)]
    return list(dict.fromkeys(name for name in names if name in ARMS))


def train_all(claims: list, runner: Runner) -> dict:
    """Begin the runs of all claims, arms that need another's learning rate last: {claim id: futures}."""

    def work(name):
        arm = ARMS[name]
        lr = runner.rates(arm)[0]
        for seed in range(1, runner.config.seeds + 1):
            runner.finish(runner.run(arm, lr, seed))

    names = list(dict.fromkeys(name for claim in claims for name in arms_of(claim)))
    names.sort(key=lambda name: isinstance(ARMS[name].lr, str))
    futures = {name: runner.pool.submit(work, name) for name in names}
    return {claim.id: [futures[name] for name in arms_of(claim)] for claim in claims}


def reproduce(claims: list, runner: Runner) -> int:
    """Make, measure, judge, write, claim by claim; returns the exit code."""
    config = runner.config
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), runner.stop)
    if not (config.dry_run or config.judge_only):
        families = {ARMS[name].family for claim in claims for name in arms_of(claim)}
        for dataset in {resolved(runner.scale.bases[family].split())[1].dataset for family in families}:
            load_meta(dataset)  # now, not in the first run
    futures, results, left, failed = train_all(claims, runner), ROOT / config.results, 0, 0
    try:
        for future in [f for some in futures.values() for f in some] if runner.scale.distributed else ():
            future.exception()  # all GPUs are training: measure when that is over
        for claim in claims:
            try:
                for future in futures[claim.id]:
                    future.result()
                found = judge(claim, runner)
            except Missing:
                left += 1
                continue
            except ValueError as e:  # others may go on
                failed += 1
                print(f"error: {claim.id}: {e}", file=sys.stderr, flush=True)
                continue
            if config.dry_run:
                continue
            record(found, runner, results)
            print(f"{found['verdict']:>13}  {claim.id}: {claim.statement}", flush=True)
    except (Stopped, KeyboardInterrupt):
        print("stopped; the same command goes on from here", flush=True)
        return 130
    finally:
        runner.stop()
        runner.pool.shutdown(cancel_futures=True)
    if config.judge_only and left:
        print(f"{left} of {len(claims)} claims are not judged: they lack runs")
    for run in dict.fromkeys(runner.missing) if config.dry_run else ():
        print(shlex.join([*runner.launcher, "train.py", *run.args, "--init_from=auto", f"--out_dir={run.path}"]))
    return int(failed > 0)


def record(found: dict, runner: Runner, results: Path) -> None:
    """Put a claim's result among those of its scale, draw it, and write claims.md anew."""
    folder = results / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{runner.config.scale}.json"
    kept = claims_report.load(results).get(runner.config.scale, {})
    device, made = quantities.device(), rundir.run_record()
    hardware = f"{os.cpu_count()} CPU cores, {device_name(device)}" if device.type == "cpu" else device_name(device)
    found |= dict(seeds=runner.config.seeds, hardware=hardware, torch=torch.__version__)
    found |= dict(git_commit=made["git_commit"], judged=made["started"][:10])
    kept[found["id"]] = found
    rundir.write_file(path, lambda f: f.write(json.dumps(kept, indent=1).encode()))
    claims_report.draw(found, folder / f"{runner.config.scale}-{found['id']}.png")
    claims_report.write(results)


def main() -> int:
    (config,), _ = configure(ReproduceConfig, description=__doc__)
    try:
        config.check()
        claims, runner = chosen(config.only, config.scale), Runner(config)
        return reproduce(claims, runner)
    except runtime.EXPECTED as e:
        return runtime.report(e)


if __name__ == "__main__":
    sys.exit(main())
