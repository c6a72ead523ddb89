"""The training runs behind the claims: each is made once by train.py, `jobs` at a time, and found again later.

A run's folder is named after its command. done.json in it says that the run is finished; an unfinished run goes on from
its last checkpoint. Threads and processes may ask for the same run: a lock lets one of them train it.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from configurator import configure
from model import GPTConfig
from nanodnt.claims import quantities
from nanodnt.claims.claims import ARMS, SCALES, Arm
from nanodnt.files import write_file
from nanodnt.optim import fill_defaults
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[2]  # of the repository
# fields of config.json that may differ from the command line's without making it another run
IGNORED_FIELDS = ("vocab_size", "out_dir", "init_from", "overwrite", "keep_every", "track_interval")


@dataclass
class ReproduceConfig:
    # --- what ---
    only: str = ""  # ids of claims or names of papers, separated by commas; empty = all
    scale: Literal["tiny", "small", "124m", "paper"] = "tiny"  # CPU cores; one GPU; 0.12B; the papers' own
    seeds: int = 3  # seeds of each number, from 1
    dry_run: bool = False  # print the commands that are missing, as far as they are known, and run nothing
    judge_only: bool = False  # run nothing: judge the claims whose runs are all there
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, 4 on a GPU, 1 under torchrun
    out: str = "out/reproduce"  # folder of the runs
    results: str = "docs/results"  # where claims.md, and claims/ with numbers and figures, are written

    def check(self):
        """ValueError for values that make no sense."""
        if not 1 <= self.seeds <= 10:
            raise ValueError(f"seeds={self.seeds} must be between 1 and 10")
        if self.jobs < 0:
            raise ValueError(f"jobs={self.jobs} must not be negative (0 = chosen for the machine)")


class TrainingRun(NamedTuple):
    """One training run: its folder, and the arguments of `train.py`."""

    path: Path
    args: tuple


class Stopped(Exception):
    """The user ended reproduce.py; the runs have saved."""


class MissingRun(Exception):
    """A run is not there, and --dry_run or --judge_only forbids to train it."""


def split_command(*parts: str) -> tuple:
    """(config files, {flag: value}) of texts in this order; a later flag replaces an earlier one."""
    files, flags = [], {}
    for word in " ".join(parts).split():
        name, equals, value = word.removeprefix("--").partition("=")
        if equals:
            flags[name] = value
        else:
            files.append(word)
    return files, flags


PARSING = threading.Lock()  # Python 3.11's ast.parse fails at random when several threads call it at once


def resolve_configs(args) -> tuple:
    """(GPTConfig, TrainConfig) of a command line."""
    with PARSING:
        (flags, config), _ = configure(GPTConfig, TrainConfig, argv=[str(ROOT / a) if a[0] != "-" else a for a in args])
    return flags, config


class Runner:
    """Trains runs, each once, `jobs` at a time; measures them; searches learning rates."""

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
            torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))  # this process measures while others train
        self.guard, self.locks, self.children, self.stopping = threading.Lock(), {}, set(), False
        self.missing, self.trained, self.began = [], 0, time.perf_counter()
        self.pool = ThreadPoolExecutor(self.jobs)

    # -- which runs there are

    def training_run(self, arm: Arm, lr: float | None, seed: int) -> TrainingRun:
        """The run of an arm with this learning rate (None: its config's own) and seed."""
        name = next((name for name, other in ARMS.items() if other is arm), None)
        files, flags = split_command(self.scale.bases[arm.family], arm.files, self.scale.changes.get(name, ""))
        if lr is not None:
            flags |= {"learning_rate": f"{lr:g}", "min_lr": f"{lr / 10:g}"}
        args = [*files, *(f"--{name}={value}" for name, value in flags.items()), f"--seed={seed}"]
        digest = hashlib.sha256(" ".join(args).encode()).hexdigest()[:6]
        words = [Path(f).stem for f in split_command(arm.files)[0]] or ["base"]
        name = "-".join([arm.family, *words, *([f"lr{lr:g}"] if lr is not None else []), f"seed{seed}", digest])
        if arm.keep:  # not part of the name: the same run, with more checkpoints
            args += [f"--keep_every={max(1, resolve_configs(args)[1].max_iters // 10)}"]
        return TrainingRun(self.out / name, tuple(args))

    def search_rate(self, arm: Arm) -> tuple:
        """(learning rate of the arm, {rate tried: loss of the first seed}). The search trains what it needs.

        It begins at the grid's start and goes downhill until both neighbours are worse or the grid ends. Of equally
        good rates, as when all diverged, it takes the lowest."""
        if isinstance(arm.lr, str):
            return self.search_rate(ARMS[arm.lr])[0], {}
        grid, start = self.scale.grids[arm.grid]
        if arm.lr is not None or grid == (None,):
            return arm.lr, {}
        tried, i = {}, grid.index(start)
        while True:
            near = [j for j in (i - 1, i, i + 1) if 0 <= j < len(grid)]
            runs = {grid[j]: self.training_run(arm, grid[j], 1) for j in near if grid[j] not in tried}
            for run in runs.values():
                self.finish(run)  # all before the first is measured, so that dry_run lists them all
            tried |= {lr: self.measure("loss", run) for lr, run in runs.items()}
            best = min(near, key=lambda j: tried[grid[j]])
            if best == i:
                return grid[i], tried
            i = best

    def measure_seeds(self, name: str, measure: str) -> list:
        """A measure of the arm `name`, seed by seed. `name` may be a number, which stands for itself, or, for a measure
        of CONFIG_MEASURES, config files and flags."""
        if re.fullmatch(r"[\d.]+", name):
            return [float(name)]
        if measure in quantities.CONFIG_MEASURES:
            return [quantities.CONFIG_MEASURES[measure](*resolve_configs(name.split()))]
        arm = ARMS[name]
        lr = self.search_rate(arm)[0]
        return [self.measure(measure, self.training_run(arm, lr, seed)) for seed in range(1, self.config.seeds + 1)]

    def measure(self, measure: str, run: TrainingRun) -> float:
        """A measure of a run, which is trained first if it is not there; kept in its folder.

        MissingRun if it may not be trained (dry_run, judge_only)."""
        self.finish(run)
        if not (run.path / "done.json").exists():
            raise MissingRun
        if self.stopping:
            raise Stopped
        with self.thread_lock(run.path):  # several arms may ask at once
            return quantities.measure_cached(measure, run.path)

    # -- training them

    def thread_lock(self, path: Path) -> threading.Lock:
        """The lock between the threads of this process for a run's folder."""
        with self.guard:
            return self.locks.setdefault(path, threading.Lock())

    def finish(self, run: TrainingRun) -> None:
        """Train `run` unless it is finished; under dry_run and judge_only only note that it is missing."""
        with self.thread_lock(run.path):
            if self.is_finished(run):
                return
            if self.config.dry_run or self.config.judge_only:
                with self.guard:
                    self.missing.append(run)
                return
            run.path.mkdir(parents=True, exist_ok=True)
            with self.lock_folder(run.path) as lock:
                if self.is_finished(run):  # the process that held the lock has finished it
                    return
                began = time.perf_counter()
                self.train(run, lock)
                outcome, seconds = self.outcome(run), time.perf_counter() - began
                record = {"args": run.args, "outcome": outcome, "seconds": seconds}
                write_file(run.path / "done.json", lambda f: f.write(json.dumps(record, indent=1).encode()))
            with self.guard:
                self.trained += 1
                minutes = (time.perf_counter() - self.began) / 60
                result = f"{outcome}, loss {quantities.final_loss(run.path):.4f}"
                print(f"{minutes:6.1f} min  run {self.trained}: {run.path.name}  {result}", flush=True)

    def is_finished(self, run: TrainingRun) -> bool:
        """Whether the run is finished. ValueError if it was trained with other settings than its command has now."""
        if not (run.path / "done.json").exists():
            return False
        flags, config = resolve_configs(run.args)
        fill_defaults(config)
        made = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
        made, wanted = {**made["model"], **made["train"]}, {**asdict(flags), **asdict(config)}
        names = [name for name in made if name in wanted and name not in IGNORED_FIELDS]
        changed = [f"{name} {made[name]!r} → {wanted[name]!r}" for name in names if made[name] != wanted[name]]
        if changed:
            raise ValueError(f"{run.path} was trained with other settings ({', '.join(changed)}): remove it")
        return True

    def lock_folder(self, path: Path):
        """An open file that locks `path` for this process and for the train.py that inherits it.

        So a train.py that outlives a killed reproduce.py keeps the lock, and the next reproduce.py waits for it."""
        file, announced = open(path / ".reproduce", "w"), False
        while fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    print(f"waiting: {path} is being trained by another process", flush=True)
                announced = True
                if self.stopping:
                    raise Stopped from None
                time.sleep(1)
            except OSError:  # a file system without locks
                break
        return file

    def train(self, run: TrainingRun, lock) -> None:
        """Start train.py on `run`, from its last checkpoint if there is one, and wait until it ends. ValueError if it
        fails, but not if the run diverged."""
        command = [*self.launcher, str(ROOT / "train.py"), *run.args, "--init_from=auto", f"--out_dir={run.path}"]
        with open(run.path / "train.log", "ab") as log:
            how = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
            how |= dict(pass_fds=(lock.fileno(),)) if fcntl else {}
            with self.guard:
                if self.stopping:
                    raise Stopped
                child = subprocess.Popen(command, **how)
                self.children.add(child)
                if self.stopping:  # `stop` was called in between and has not seen this child
                    child.terminate()
            code = child.wait()
        with self.guard:
            self.children.remove(child)
            if self.stopping:
                raise Stopped
        if code and self.outcome(run) != "diverged":
            lines = (run.path / "train.log").read_text(errors="replace").splitlines()
            raise ValueError(f"a run ended with exit code {code} ({(lines or [''])[-1]}): see {run.path / 'train.log'}")

    def outcome(self, run: TrainingRun) -> str:
        """ "diverged" or "finished"."""
        rows = read_metrics(run.path)
        return "diverged" if rows and "failure" in rows[-1] else "finished"

    def stop(self, *_) -> None:
        """End: ask the runs to save and leave. Also a signal handler."""
        self.stopping = True
        for child in list(self.children):
            child.terminate()
