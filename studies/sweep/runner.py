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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import Any, NamedTuple

import torch

from configurator import configure
from layers.cores import own_cores
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.optim import fill_defaults
from nanodnt.run import signals
from nanodnt.run.console import Console
from nanodnt.run.environment import GROUP
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig
from nanodnt.tasks import resolve_none, task_of
from studies.sweep.progress import Progress

ROOT = Path(__file__).resolve().parents[2]  # root of the repository
# fields of config.json that may differ from the command line in one and the same run
IGNORED_FIELDS = ("vocab_size", "out_dir", "init_from", "overwrite", "keep_every", "track_interval")

MAX_NAME = 100  # characters of a run folder's name, before its digest, in the records of claims
MAX_SHORT_NAME = 92  # the same in sweeps


class TrainingRun(NamedTuple):
    path: Path  # folder of the run
    args: tuple[str, ...]  # arguments of train.py
    words: str = ""  # the run in words, where the folder's name is not enough

    @property
    def name(self) -> str:
        return self.words or self.path.name


class Configs(NamedTuple):
    model: GPTConfig
    train: TrainConfig


class Outcome(NamedTuple):
    word: str  # "finished" or "diverged"
    loss: float | None  # the last validation loss; None if the run diverged


class Stopped(Exception):
    """The user ended the command; the runs have saved."""


def make_run(folder: Path, files: list[str], flags: dict[str, object]) -> TrainingRun:
    """The run of `train.py FILES --FLAG=VALUE …`, with a folder in `folder` named after all files
    but the first and all flags. The name ends with a digest of the command."""
    flags = {name: plain_number(value) for name, value in sorted(flags.items())}
    args = [*files, *(f"--{name}={value}" for name, value in flags.items())]
    digest = hashlib.sha256(" ".join(args).encode()).hexdigest()[:6]
    words = [Path(name).stem for name in files[1:] or files] or ["base"]
    words += [f"{name}{value}" for name, value in flags.items() if name != "min_lr"]
    name = "-".join(words).replace("/", "_")[:MAX_NAME]
    return TrainingRun(folder / f"{name}-{digest}", tuple(args))


def rename_run(run: TrainingRun, words: list[str]) -> TrainingRun:
    """`run` with a folder named after these words and its digest. A folder with the same digest
    that is there already keeps its name, whatever varied when it was made."""
    folder = run.path.parent
    digest = run.path.name[-7:]
    path = folder / ("-".join(words).replace("/", "_")[:MAX_SHORT_NAME] + digest)
    return run._replace(path=min(folder.glob(f"*{digest}"), default=path))


def plain_number(value: object) -> str:
    """A flag's value as text; a number always in the same form, so that 1e-3 and 0.001 give one
    run."""
    with suppress(ValueError):
        if float(text := f"{float(value):.12g}") == float(value):
            return text
    return str(value)


# Python 3.11's ast.parse fails at random when several threads call it at once
PARSING = threading.Lock()


def read_configs(args: Iterable[str]) -> Configs:
    """The configurations that a command line gives."""
    paths = [arg if arg.startswith("-") else str(ROOT / arg) for arg in args]
    with PARSING:
        return Configs(*configure(GPTConfig, TrainConfig, argv=paths)[0])


def resolve_configs(args: Iterable[str]) -> Configs:
    """`read_configs`, with the optimizer's defaults. ValueError where a flag is out of its range,
    or where flags contradict each other."""
    configs = read_configs(args)
    configs.train.check()  # before defaults follow from a wrong value
    fill_defaults(configs.train)
    return configs


def read_record(path: Path) -> dict[str, Any]:
    """The content of config.json in a run directory. ValueError if it is damaged."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path / 'config.json'} is damaged: remove {path}") from None


def is_finished(run: TrainingRun) -> bool:
    """Whether the run has ended and saved, or has diverged. ValueError if it was trained with
    other settings."""
    if not (run.path / "config.json").exists():
        return False
    model_config, config = resolve_configs(run.args)
    made = read_record(run.path)
    made = resolve_none(made["model"]) | made["train"]
    wanted = resolve_none(asdict(model_config)) | asdict(config)
    ignored = {*IGNORED_FIELDS, *task_of(model_config).left_to_dataset(model_config)}
    changed = []
    for name, value in made.items():
        if name in wanted and name not in ignored and value != wanted[name]:
            changed.append(f"{name} {value!r} → {wanted[name]!r}")
    if changed:
        raise ValueError(
            f"{run.path} was trained with other settings ({', '.join(changed)}): remove it"
        )
    rows = read_metrics(run.path)
    last = run.path / "last.pt"
    if not rows or "failure" in rows[-1]:
        return bool(rows)
    if rows[-1]["step"] < config.max_iters or "val_loss" not in rows[-1] or not last.exists():
        return False
    return last.stat().st_mtime >= (run.path / "metrics.jsonl").stat().st_mtime


def read_outcome(path: Path) -> Outcome:
    """The outcome of the run in this directory. It diverged if it was ended because gradients were
    not finite, or if its last validation loss is above the first. ValueError without any validation
    loss."""
    rows = read_metrics(path)
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    if not losses:
        raise ValueError(f"{path / 'metrics.jsonl'} has no validation loss: remove {path}")
    if "failure" in rows[-1] or losses[-1] is None or losses[-1] > losses[0]:
        return Outcome("diverged", None)
    return Outcome("finished", losses[-1])


def read_origin(path: Path) -> dict[str, str | None]:
    """The version of torch, the commit and the day of the training in a run directory."""
    record = read_record(path)
    return dict(
        torch=record["versions"]["torch"],
        git_commit=record["git_commit"],
        date=record["started"][:10],
    )


def read_inputs(path: Path) -> dict[str, Any]:
    """What the commit and the command of the run in this directory do not say. "changed": its
    Python files that differ from the commit, copied into its folder source; "data": the source of
    its dataset, and the sha256 of each split."""
    record = read_record(path)
    entries = record["git_changed_files"] or []
    meta = load_meta(record["train"]["dataset"], verify=False)
    checksums = {split: entry["sha256"] for split, entry in meta["splits"].items()}
    data = {"source": meta.get("source"), **checksums}
    return dict(changed=[entry[3:] for entry in entries if entry.endswith(".py")], data=data)


class Runner:
    """Trains runs, each once, `jobs` at a time; 0: one per CPU core, or one per GPU. `distributed`:
    one at a time, on all GPUs, by torchrun."""

    def __init__(self, jobs: int = 0, distributed: bool = False) -> None:
        if jobs < 0:
            raise ValueError(f"jobs={jobs} must not be negative (0 = chosen for the machine)")
        n = torch.cuda.device_count()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(gpus) < n:  # CUDA_VISIBLE_DEVICES is not set
            gpus = list(map(str, range(n)))
        self.processes = n if distributed else 1
        if not jobs:
            jobs = 1 if distributed else n or own_cores()
        self.jobs = jobs
        # A run must not join the process group that this process may have been started in.
        self.env = {name: value for name, value in os.environ.items() if name not in GROUP}
        if self.jobs > 1 and not n:
            self.env.setdefault("OMP_NUM_THREADS", "1")
            # this process measures while others train
            torch.set_num_threads(int(self.env["OMP_NUM_THREADS"]))
        self.slots = Queue()  # environment variables, one entry for each run at a time
        for i in range(jobs):
            one_gpu = n > 0 and not distributed
            self.slots.put({"CUDA_VISIBLE_DEVICES": gpus[i % n]} if one_gpu else {})
        self.children = set()  # processes of the runs being trained
        self.stopping = False
        self.progress = Progress()
        self.console = Console()
        self.failures = []  # one line for each call that failed
        self.locks = {}  # {a run's folder: its lock between threads}

    def stop(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Ask the runs to save and to end. Also a signal handler."""
        self.stopping = True
        self.ended_by = number
        for child in list(self.children):
            child.terminate()

    def call_all(
        self, function: Callable[..., object], tasks: dict[str, tuple]
    ) -> tuple[list[str], int]:
        """Call `function(*arguments)` for {name: arguments}, `jobs` at a time; returns the names of
        the calls that ended well, and the exit code. An error is printed, and the others go on. A
        signal ends the runs."""
        finished = []
        code = 0
        self.stopping = False
        handlers = {number: signal.signal(number, self.stop) for number in signals.heeded()}
        pool = ThreadPoolExecutor(self.jobs)
        if sys.stdout.isatty():  # a file has lines alone
            self.console.start()
        with self.console.show(self.progress):
            try:
                futures = {pool.submit(function, *tasks[name]): name for name in tasks}
                for future in as_completed(futures):
                    name = futures[future]
                    try:
                        future.result()
                        finished.append(name)
                    except Stopped:
                        self.console.print("stopped; the same command goes on from here")
                        return finished, 128 + self.ended_by
                    except (ValueError, OSError, ArithmeticError) as error:
                        self.failures.append(f"{name}: {error}")
                        with self.console.lock:
                            self.console.clear()
                            print(f"error: {name}: {error}", file=sys.stderr, flush=True)
                        code = 1
            finally:
                self.stop()
                pool.shutdown(cancel_futures=True)
                self.console.close()
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return finished, code

    def command(self, run: TrainingRun) -> str:
        """The command that trains the run, for a shell in the repository."""
        return shlex.join(["python", *self.launch(run)])

    def launch(self, run: TrainingRun) -> list[str]:
        """Python's arguments in the repository: train.py and its own, after torchrun's if several
        GPUs share the batch."""
        words = ["train.py", *run.args, "--init_from=auto", f"--out_dir={run.path}"]
        if self.processes <= 1:  # 0 on a machine without GPUs
            return words
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc_per_node={self.processes}", *words]

    def finish(self, run: TrainingRun) -> None:
        """Train `run` unless it is finished. ValueError if it fails; Stopped if the user ended the
        command."""
        self.progress.needed.add(run.path)
        with self.locks.setdefault(run.path, threading.Lock()):
            if is_finished(run):
                self.progress.ended.add(run.path)
                return
            self.train(run)
        word, loss = read_outcome(run.path)
        result = word if loss is None else f"loss {loss:.4f}"
        number = self.progress.end(run.path)
        self.console.print(f"run {number}: {run.name}: {result}{self.progress.left()}")

    def train(self, run: TrainingRun) -> None:
        """Start train.py on `run`, which goes on from its last checkpoint, and wait. ValueError if
        it fails, but not if the run diverged."""
        slot = self.slots.get()
        try:
            if self.stopping:
                raise Stopped
            run.path.mkdir(parents=True, exist_ok=True)
            with open(run.path / "train.log", "ab") as log:
                command = [sys.executable, *self.launch(run)]
                streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                child = subprocess.Popen(command, cwd=ROOT, env=self.env | slot, **streams)
            self.progress.training[run.path] = run.name
            self.children.add(child)
            if self.stopping:  # `stop` has not seen this child
                child.terminate()
            code = child.wait()
            self.children.remove(child)
        finally:
            self.progress.training.pop(run.path, None)
            self.slots.put(slot)
        if self.stopping:
            raise Stopped
        rows = read_metrics(run.path)
        if code and not (rows and "failure" in rows[-1]):
            log = run.path / "train.log"
            lines = log.read_text(errors="replace").splitlines() or [""]
            raise ValueError(f"a run ended with exit code {code} ({lines[-1]}): see {log}")
