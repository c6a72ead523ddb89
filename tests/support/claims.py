"""reproduce.py on a made-up scale with tiny runs, and a runner for the real scales."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from nanodnt.run import directory
from nanodnt.run.metrics import read_metrics
from studies.claims.arms import ARMS, CURVES, SCALES, Arm, Scale
from studies.claims.claims import CLAIMS, GAPS, PAPERS, Claim, Number
from studies.claims.experiment import Experiment, ReproduceConfig
from studies.sweep import runner
from studies.sweep.runner import Runner
from support import runs

STEPS = 20  # of a made-up run
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=8, warmup_iters=5, max_iters=STEPS)
TINY |= dict(eval_interval=20, eval_tokens=512, log_interval=1, device="cpu", dtype="float32", compile=False)
NO_NORM = "--norm=none --pre_norm=none --weight_decay=0"  # a network that a large step makes infinite
MADE_UP_ARMS = {
    "fast": Arm("f", lr=1e-2, keep=True),
    "slow": Arm("f", lr=1e-4),
    "tuned": Arm("f", points=3, tries=("", "--beta2=0.5")),
    "wrong": Arm("f", "--micro_batch_size=3", lr=1e-2),
    "broken": Arm("f", NO_NORM, lr=1e15),
}


def claim(id: str, value: str, expect: str = "below", published=-0.5, *sides) -> Claim:
    """A made-up claim."""
    numbers, how = (Number(f"the value of {value}", value, published), *sides), dict(adequate=("mini",), smallest=0.25)
    return Claim(id, f"{id} is so", "ours", "It is made up.", "A note.", numbers, expect, **how)


MADE_UP = [
    claim("learns", "fast - slow", "below", -0.5, Number("slow | alone", "slow")),
    claim("tunes", "tuned - fast", "equal", 0.0),
    claim("fails", "wrong"),
    claim("breaks", "broken - fast", "above", 0.5),
]


def make_experiment(folder: Path, scale="mini", **changes) -> Experiment:
    """An Experiment whose runs and results are in `folder`."""
    return Experiment(ReproduceConfig(scale=scale, out=str(folder / "out"), results=str(folder / "results"), **changes))


def flag(run, name: str):
    """The value of a flag in the run's command, as text; None without."""
    return dict(arg[2:].split("=", 1) for arg in run.args if arg.startswith("--")).get(name)


def write_base(path: Path, dataset, **changes) -> Path:
    """The config file of the made-up family."""
    path.write_text("".join(f"{k} = {v!r}\n" for k, v in (TINY | {"dataset": str(dataset)} | changes).items()))
    return path


@contextmanager
def invented(base):
    """Inside, the made-up scale, arms and claims stand in place of the real ones."""
    scale, claims, gaps = Scale("a test", {"f": str(base)}, {"adamw": 2e-2}), list(CLAIMS), list(GAPS)
    arms, papers = patch.dict(ARMS, MADE_UP_ARMS, clear=True), dict(learns="A", tunes="B", fails="B", breaks="C")
    with arms, patch.dict(SCALES, mini=scale), patch.dict(CURVES, clear=True), patch.dict(PAPERS, papers):
        CLAIMS[:], GAPS[:] = MADE_UP, []
        try:
            yield
        finally:
            CLAIMS[:], GAPS[:] = claims, gaps


def call(base, folder: Path, *flags) -> int:
    """The exit code of reproduce.py, in this process, with the made-up claims."""
    import reproduce

    argv = [f"--out={folder / 'out'}", f"--results={folder / 'results'}", *flags]
    with invented(base), patch.dict("os.environ", OMP_NUM_THREADS="1"):
        return runs.call(reproduce.main, *argv)


def alone(command: str, base, *argv) -> None:
    """A command as a process of its own makes it, to be forked, with the made-up claims and on one thread."""
    from support.processes import call_main

    with invented(base), patch.dict("os.environ", OMP_NUM_THREADS="1"):
        call_main(command, *argv)


class SameThread(ThreadPoolExecutor):
    """It does its work at once, in this thread."""

    def submit(self, function, *args) -> Future:
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as e:
            future.set_exception(e)
        return future


def train_here(self, run, lock) -> None:
    """Runner.train without a process of its own, for runs that finish or diverge."""
    import train

    code = runs.call(train.main, *run.args, "--init_from=auto", f"--out_dir={run.path}")
    assert code == 0 or "failure" in read_metrics(run.path)[-1]


@contextmanager
def in_process():
    """Inside, runs are trained in this process and thread: quicker, since torch is imported already."""
    record = directory.run_record
    with runs.quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "run_record", record)  # the runner reads it
        patch.setattr(runner, "ThreadPoolExecutor", SameThread)
        patch.setattr(Runner, "train", train_here)
        yield
