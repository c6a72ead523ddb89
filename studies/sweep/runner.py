"""Training runs, each made once by train.py, `jobs` at a time, and found again later, for sweep.py
and reproduce.py.

A run's folder is named after its command, and its files say whether the run is finished. An
unfinished run goes on from its last checkpoint. Threads may ask for the same run: a lock lets one
of them train it.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import torch

from configurator import configure
from layers.cores import own_cores
from model import GPTConfig
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


class Stopped(Exception):
    """The user ended the command; the runs have saved."""


def make_run(folder: Path, files: list, flags: dict) -> TrainingRun:
    """The run of `train.py FILES --FLAG=VALUE …` in `folder`. Its command decides which run it
    is."""
    flags = {name: plain_number(value) for name, value in sorted(flags.items())}
    args = [*files, *(f"--{name}={value}" for name, value in flags.items())]
    digest = hashlib.sha256(" ".join(args).encode()).hexdigest()[:6]
    words = [Path(name).stem for name in files[1:] or files] or ["base"]
    words += [f"{name}{value}" for name, value in flags.items() if name != "min_lr"]
    return TrainingRun(
        folder / f"{'-'.join(words).replace('/', '_')[:MAX_NAME]}-{digest}", tuple(args)
    )


def plain_number(value) -> str:
    """A flag's value as text; a number always in the same form, so that 1e-3 and 0.001 are one
    run."""
    with suppress(ValueError):
        if float(text := f"{float(value):.12g}") == float(value):
            return text
    return str(value)


# Python 3.11's ast.parse fails at random when several threads call it at once
PARSING = threading.Lock()


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


def is_finished(run: TrainingRun) -> bool:
    """Whether the run has ended and saved, or has diverged. ValueError if it was trained with other
    settings."""
    if not (run.path / "config.json").exists():
        return False
    model_config, config = resolve_configs(run.args)
    made = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    made = resolve_none(made["model"]) | made["train"]
    wanted = resolve_none(asdict(model_config)) | asdict(config)
    ignored = {*IGNORED_FIELDS, *task_of(model_config).left_to_dataset(model_config)}
    names = [name for name in made if name in wanted and name not in ignored]
    changed = [
        f"{name} {made[name]!r} → {wanted[name]!r}" for name in names if made[name] != wanted[name]
    ]
    if changed:
        raise ValueError(
            f"{run.path} was trained with other settings ({', '.join(changed)}): remove it"
        )
    rows, last = read_metrics(run.path), run.path / "last.pt"
    if not rows or "failure" in rows[-1]:
        return bool(rows)
    if rows[-1]["step"] < config.max_iters or "val_loss" not in rows[-1] or not last.exists():
        return False
    return last.stat().st_mtime >= (run.path / "metrics.jsonl").stat().st_mtime


def read_outcome(path: Path) -> tuple:
    """("finished", the last validation loss) of a run directory; ("diverged", None) if it was ended
    because gradients were not finite, or ends worse than it began. ValueError without any
    validation loss."""
    rows = read_metrics(path)
    if not (losses := [row["val_loss"] for row in rows if "val_loss" in row]):
        raise ValueError(f"{path / 'metrics.jsonl'} has no validation loss: remove {path}")
    if "failure" in rows[-1] or losses[-1] is None or losses[-1] > losses[0]:
        return "diverged", None
    return "finished", losses[-1]


def read_origin(path: Path) -> dict:
    """torch's version, commit and day of a run directory's training."""
    record = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return dict(
        torch=record["versions"]["torch"],
        git_commit=record["git_commit"],
        date=record["started"][:10],
    )


class Runner:
    """Trains runs, each once, `jobs` at a time; 0: one per CPU core, or one per GPU. `distributed`:
    one at a time, on all GPUs, by torchrun."""

    def __init__(self, jobs: int = 0, distributed: bool = False):
        if jobs < 0:
            raise ValueError(f"jobs={jobs} must not be negative (0 = chosen for the machine)")
        n = torch.cuda.device_count()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(gpus) < n:  # it is not set
            gpus = list(map(str, range(n)))
        self.processes = n if distributed else 1
        self.jobs = jobs or (1 if distributed else n or own_cores())
        # a run has a process group of its own or none, not the one that this process may have been
        # started in
        self.env = {name: value for name, value in os.environ.items() if name not in GROUP}
        if self.jobs > 1 and not n:
            self.env.setdefault("OMP_NUM_THREADS", "1")
            # this process measures while others train
            torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))
        self.slots = Queue()  # one for each run at a time
        for i in range(self.jobs):
            self.slots.put({"CUDA_VISIBLE_DEVICES": gpus[i % n]} if n and not distributed else {})
        self.children, self.stopping, self.made = set(), False, []
        self.locks = {}  # a folder's, between threads

    def stop(self, number: int = signal.SIGTERM, frame=None) -> None:
        """End: ask the runs to save and leave. Also a signal handler."""
        self.stopping, self.ended_by = True, number
        for child in list(self.children):
            child.terminate()

    def call_all(self, function, tasks: dict) -> tuple:
        """Call `function(*arguments)` for {name: arguments}, `jobs` at a time; returns ([names that
        ended well], 0 or the exit code). An error is printed, and the others go on. A signal ends
        the runs."""
        finished, code, self.stopping = [], 0, False
        handlers = {number: signal.signal(number, self.stop) for number in signals.heeded()}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            futures = {pool.submit(function, *arguments): name for name, arguments in tasks.items()}
            for future in as_completed(futures):
                name = futures[future]
                try:
                    future.result()
                    finished.append(name)
                except Stopped:
                    print("stopped; the same command goes on from here", flush=True)
                    return finished, 128 + self.ended_by
                except (ValueError, OSError, ArithmeticError) as error:
                    print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                    code = 1
        finally:
            self.stop()
            pool.shutdown(cancel_futures=True)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return finished, code

    def command(self, run: TrainingRun) -> str:
        """The command that makes the run, to be typed in the repository."""
        return shlex.join(["python", *self.launch(run)])

    def launch(self, run: TrainingRun) -> list:
        """Python's arguments in the repository: train.py's, after torchrun's if several GPUs share
        the batch."""
        n = self.processes
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
            if n > 1
            else []
        )
        return [*torchrun, "train.py", *run.args, "--init_from=auto", f"--out_dir={run.path}"]

    def finish(self, run: TrainingRun) -> None:
        """Train `run` unless it is finished. ValueError if it fails; Stopped."""
        with self.locks.setdefault(run.path, threading.Lock()):
            if is_finished(run):
                return
            self.train(run)
        outcome, loss = read_outcome(run.path)
        self.made.append(run.path.name)
        result = outcome if loss is None else f"loss {loss:.4f}"
        print(f"{len(self.made)} made: {run.path.name}  {result}", flush=True)

    def train(self, run: TrainingRun) -> None:
        """Let train.py begin `run`, or go on with it, and wait. ValueError if it fails, but not if
        the run diverged."""
        slot = self.slots.get()
        try:
            if self.stopping:
                raise Stopped
            run.path.mkdir(parents=True, exist_ok=True)
            with open(run.path / "train.log", "ab") as log:
                command = [sys.executable, *self.launch(run)]
                streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                child = subprocess.Popen(command, cwd=ROOT, env=self.env | slot, **streams)
            self.children.add(child)
            if self.stopping:  # `stop` has not seen this child
                child.terminate()
            code = child.wait()
            self.children.remove(child)
        finally:
            self.slots.put(slot)
        if self.stopping:
            raise Stopped
        rows = read_metrics(run.path)
        if code and not (rows and "failure" in rows[-1]):
            lines = (run.path / "train.log").read_text(errors="replace").splitlines()
            raise ValueError(
                f"a run ended with exit code {code} ({(lines or [''])[-1]}): see {run.path / 'train.log'}"
            )
