"""Training runs, each made once by train.py, `jobs` at a time, and found again later, for sweep.py and reproduce.py.

A run's folder is named after its command. done.json in it says that the run is finished; an unfinished run goes on from
its last checkpoint. Threads and processes may ask for the same run: a lock lets one of them train it.
"""

import fcntl
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import torch

from configurator import configure
from layers.cores import own_cores
from model import GPTConfig
from nanodnt.files import write_file
from nanodnt.optim import fill_defaults
from nanodnt.run import signals
from nanodnt.run.environment import GROUP
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig
from nanodnt.tasks import resolve_none, task_of

ROOT = Path(__file__).resolve().parents[2]  # of the repository
# fields of config.json that may differ from the command line's without making it another run
IGNORED_FIELDS = ("vocab_size", "out_dir", "init_from", "overwrite", "keep_every", "track_interval")

MAX_NAME = 100  # characters of a run folder's name, before its digest


class TrainingRun(NamedTuple):
    path: Path  # its folder
    args: tuple  # of train.py, that make it


class MissingRun(Exception):
    """A run is not there, and may not be trained."""


class Stopped(Exception):
    """The user ended the command; the runs have saved."""


def make_run(folder: Path, files: list, flags: dict, keep: int = 0, first=()) -> TrainingRun:
    """The run of `train.py FILES --FLAG=VALUE …` in `folder`. Its command decides which run it is, but not `keep`, the
    number of checkpoints to keep over the run. Where its name must be cut, the flags `first` come first."""
    flags = {name: plain_number(value) for name, value in sorted(flags.items())}
    args = [*files, *(f"--{name}={value}" for name, value in flags.items())]
    digest = hashlib.sha256(" ".join(args).encode()).hexdigest()[:6]
    words = [Path(name).stem for name in files[1:] or files] or ["base"]
    named = {name: f"{name}{value}" for name, value in flags.items() if name != "min_lr"}
    if len("-".join([*words, *named.values()])) > MAX_NAME:
        words = [named.pop(name) for name in first if name in named] + words
    words += named.values()
    if keep:
        args += [f"--keep_every={max(1, resolve_configs(args)[1].max_iters // keep)}"]
    return TrainingRun(folder / f"{'-'.join(words).replace('/', '_')[:MAX_NAME]}-{digest}", tuple(args))


def plain_number(value) -> str:
    """A flag's value as text; a number always in the same form, so that 1e-3 and 0.001 are one run."""
    with suppress(ValueError):
        if float(text := f"{float(value):.12g}") == float(value):
            return text
    return str(value)


PARSING = threading.Lock()  # Python 3.11's ast.parse fails at random when several threads call it at once


def read_configs(args) -> tuple:
    """(GPTConfig, TrainConfig) of a command line."""
    with PARSING:
        paths = [arg if arg.startswith("-") else str(ROOT / arg) for arg in args]
        return tuple(configure(GPTConfig, TrainConfig, argv=paths)[0])


def resolve_configs(args) -> tuple:
    """`read_configs`, with the optimizer's defaults. ValueError where they contradict."""
    model_config, config = read_configs(args)
    fill_defaults(config)
    return model_config, config


def read_outcome(path: Path) -> tuple:
    """("finished", the last validation loss) of a run directory; ("diverged", None) if it was ended because gradients
    were not finite, or ends worse than it began. ValueError without any validation loss."""
    rows = read_metrics(path)
    if not (losses := [row["val_loss"] for row in rows if "val_loss" in row]):
        raise ValueError(f"{path / 'metrics.jsonl'} has no validation loss: remove {path}")
    if "failure" in rows[-1] or losses[-1] is None or losses[-1] > losses[0]:
        return "diverged", None
    return "finished", losses[-1]


def read_origin(path: Path) -> dict:
    """torch's version, commit and day of a run directory's training, and its last bits per byte, None without."""
    bits = [row["val_bpb"] for row in read_metrics(path) if "val_bpb" in row]
    record = json.loads((path / "config.json").read_text(encoding="utf-8"))
    origin = dict(torch=record["versions"]["torch"], git_commit=record["git_commit"], date=record["started"][:10])
    return origin | {"val_bpb": bits[-1] if bits else None}


def mark_finished(run: TrainingRun, seconds: float | None) -> tuple:
    """Write done.json of a run that took `seconds` (None: not known); returns `read_outcome`."""
    outcome = read_outcome(run.path)
    record = {"args": run.args, "outcome": outcome[0], "seconds": seconds}
    write_file(run.path / "done.json", lambda f: f.write(json.dumps(record, indent=1).encode()))
    return outcome


class Runner:
    """Trains runs, each once, `jobs` at a time; 0: one per CPU core, or one per GPU. `distributed`: one at a time, on
    all GPUs, by torchrun. The attribute `expected`: how many will be trained, for the progress line; 0: not known."""

    def __init__(self, jobs: int = 0, distributed: bool = False):
        if jobs < 0:
            raise ValueError(f"jobs={jobs} must not be negative (0 = chosen for the machine)")
        n = torch.cuda.device_count()
        named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpus, self.processes = (named or [str(i) for i in range(n)]) if n else [], n if distributed else 1
        self.jobs = jobs or (1 if distributed else len(gpus) or own_cores())
        one_thread = {"OMP_NUM_THREADS": "1"} if self.jobs > 1 and not gpus else {}
        # a run has a process group of its own or none, not the one that this process may have been started in
        without_group = {name: value for name, value in os.environ.items() if name not in GROUP}
        self.env = one_thread | without_group
        if "OMP_NUM_THREADS" in self.env:
            torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))  # this process measures while others train
        several = len(gpus) > 1 and not distributed
        self.slots = Queue()  # one for each run at a time
        for i in range(self.jobs):
            self.slots.put({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if several else {})
        self.guard, self.locks, self.children, self.stopping = threading.Lock(), {}, set(), False
        self.expected, self.seconds, self.began = 0, [], time.perf_counter()

    def stop(self, number: int = signal.SIGTERM, frame=None) -> None:
        """End: ask the runs to save and leave. Also a signal handler."""
        self.stopping, self.ended_by = True, number
        for child in list(self.children):
            child.terminate()

    def call_all(self, function, tasks: dict) -> tuple:
        """Call `function(*arguments)` for {name: arguments}, `jobs` at a time; returns ([names that ended well], 0 or
        the exit code). An error, or what a `MissingRun` says, is printed, the others go on. A signal ends the runs."""
        finished, code, handlers = [], 0, {s: signal.signal(s, self.stop) for s in signals.heeded()}
        pool, self.stopping = ThreadPoolExecutor(self.jobs), False
        try:
            futures = {pool.submit(function, *arguments): name for name, arguments in tasks.items()}
            for future in as_completed(futures):
                name, error = futures[future], future.exception()
                if error is None:
                    finished.append(name)
                elif isinstance(error, Stopped):
                    print("stopped; the same command goes on from here", flush=True)
                    return finished, 128 + self.ended_by
                elif isinstance(error, MissingRun):
                    print(*error.args, sep="", end="\n" if error.args else "")
                elif isinstance(error, (ValueError, OSError, ArithmeticError)):
                    print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                    self.expected, code = self.expected - 1, 1
                else:
                    raise error
        finally:
            self.stop()
            pool.shutdown(cancel_futures=True)
            for name, handler in handlers.items():
                signal.signal(name, handler)
        return finished, code

    def command(self, run: TrainingRun) -> str:
        """The command that makes the run, to be typed in the repository."""
        return shlex.join(["python", *self.launch(run)])

    def launch(self, run: TrainingRun) -> list:
        """Python's arguments in the repository: train.py's, after torchrun's if several GPUs can share the batch."""
        n = self.processes
        if n > 1:
            config = resolve_configs(run.args)[1]
            whole = config.batch_size // max(1, config.micro_batch_size)  # micro batches of a step
            n = max(i for i in range(1, n + 1) if whole % i == 0)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"] if n > 1 else []
        path = run.path.relative_to(ROOT) if run.path.is_relative_to(ROOT) else run.path
        return [*torchrun, "train.py", *run.args, "--init_from=auto", f"--out_dir={path}"]

    def finish(self, run: TrainingRun, train: bool = True) -> None:
        """Train `run` unless it is finished. ValueError if it fails; Stopped; without `train`, MissingRun."""
        with self.guard:
            thread_lock = self.locks.setdefault(run.path, threading.Lock())
        with thread_lock:
            known = (run.path / "done.json").exists()  # else it is one of those expected
            if not self.is_finished(run):
                if not train:
                    raise MissingRun(f"not finished: {run.path.name}")
                run.path.mkdir(parents=True, exist_ok=True)
                with self.lock_folder(run.path) as lock:
                    if not self.is_finished(run):  # else the process that held the lock has finished it
                        began = time.perf_counter()
                        self.train(run, lock)
                        return self.report(run, time.perf_counter() - began)
            with self.guard:
                self.expected -= not known

    def report(self, run: TrainingRun, seconds: float) -> None:
        """Note that a run is made; print the minutes since the start, how many are made and expected, its result."""
        outcome, loss = mark_finished(run, seconds)
        with self.guard:
            self.seconds.append(seconds)
            done, left = len(self.seconds), self.expected - len(self.seconds)
            text = f"{(time.perf_counter() - self.began) / 60:6.1f} min  {done} done"
            if left > 0:
                text += f", {left} left, about {sum(self.seconds) / done / 60 * left / min(self.jobs, left):.0f} min"
            print(f"{text}  {run.path.name}  {outcome if loss is None else f'loss {loss:.4f}'}", flush=True)

    def is_finished(self, run: TrainingRun) -> bool:
        """Whether the run is finished, here or by its command somewhere else. ValueError for other settings."""
        if not (run.path / "config.json").exists():
            return False
        model_config, config = resolve_configs(run.args)
        try:
            made = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
            made = resolve_none(made["model"]) | made["train"]
            wanted = resolve_none(asdict(model_config)) | asdict(config)
            read_origin(run.path)  # which a table has
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{run.path / 'config.json'} is damaged: remove {run.path}") from None
        ignored = {*IGNORED_FIELDS, *task_of(model_config).left_to_dataset(model_config)}
        names = [name for name in made if name in wanted and name not in ignored]
        changed = [f"{name} {made[name]!r} → {wanted[name]!r}" for name in names if made[name] != wanted[name]]
        if changed:
            raise ValueError(f"{run.path} was trained with other settings ({', '.join(changed)}): remove it")
        if (run.path / "done.json").exists():
            return True
        rows, last = read_metrics(run.path), run.path / "last.pt"  # else it may have ended, and saved, elsewhere
        whole = rows and rows[-1]["step"] == config.max_iters and "val_loss" in rows[-1] and last.exists()
        saved = whole and last.stat().st_mtime >= (run.path / "metrics.jsonl").stat().st_mtime
        if ended := bool(saved or rows and "failure" in rows[-1]):
            mark_finished(run, None)
        return ended

    def lock_folder(self, path: Path):
        """An open file that locks `path` for this process and for the train.py that inherits it: one that outlives a
        killed command keeps the lock, and the next command waits for it."""
        file = open(path / ".runner", "w", encoding="utf-8")
        for naps in count():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if self.stopping:
                    raise Stopped from None
                if not naps:
                    print(f"waiting: {path} is being trained by another process", flush=True)
                time.sleep(1)
            except OSError:  # a file system without locks
                return file

    def train(self, run: TrainingRun, lock) -> None:
        """Let train.py begin `run`, or go on with it, and wait. ValueError if it fails, but not if the run diverged."""
        slot = self.slots.get()
        try:
            with open(run.path / "train.log", "ab") as log:
                how = dict(cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock.fileno(),))
                with self.guard:
                    if self.stopping:
                        raise Stopped
                    child = subprocess.Popen([sys.executable, *self.launch(run)], env=self.env | slot, **how)
                    self.children.add(child)
                    if self.stopping:  # `stop` was called in between and has not seen this child
                        child.terminate()
                code = child.wait()
            with self.guard:
                self.children.remove(child)
                if self.stopping:
                    raise Stopped
        finally:
            self.slots.put(slot)
        rows = read_metrics(run.path)
        if code and not (rows and "failure" in rows[-1]):
            lines = (run.path / "train.log").read_text(errors="replace").splitlines()
            raise ValueError(f"a run ended with exit code {code} ({(lines or [''])[-1]}): see {run.path / 'train.log'}")
