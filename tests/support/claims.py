"""reproduce.py on a made-up claims file with tiny runs, and a runner for the real ones."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanodnt.run import directory
from nanodnt.run.metrics import read_metrics
from studies.claims import experiment
from studies.claims.experiment import Experiment, ReproduceConfig
from studies.claims.study import Claim, Number
from studies.sweep import runner
from studies.sweep.grid import SweepConfig, list_points, split_arguments
from studies.sweep.runner import ROOT, Runner
from support import runs

STEPS = 20  # of a made-up run
TINY = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=8, warmup_iters=5, max_iters=STEPS
)
TINY |= dict(
    eval_interval=20, eval_tokens=512, log_interval=1, device="cpu", dtype="float32", compile=False
)
TINY |= dict(learning_rate=2e-2)
# a network that a large step makes infinite
NO_NORM = "--norm=none --pre_norm=none --weight_decay=0"
MADE_UP = '''"""Made-up claims."""
from studies.claims.study import Arm, Claim, Number, Study

study = Study(
    "a test",
    bases={{"f": "{base}"}},
    arms={{
        "fast": Arm("f", lr=1e-2, keep=True),
        "slow": Arm("f", lr=1e-4),
        "tuned": Arm("f", tries=("", "--beta2=0.5")),
        "wrong": Arm("f", "--micro_batch_size=3", lr=1e-2),
        "broken": Arm("f", "{no_norm}", lr=1e15),
    }},
    claims=[
        Claim("learns", "fast is better", Number("fast minus slow", "fast - slow", -0.5),
              paper="A", note="A note.", sides=(Number("slow | alone", "slow"),),
              plain=dict(reproduced="A high rate learns")),
        Claim("tunes", "tuned is the same", Number("tuned minus fast", "tuned - fast", 0.0),
              "equal", 0.25, paper="B"),
        Claim("fails", "wrong is better", Number("wrong", "wrong"), smallest=0.25, paper="B"),
        Claim("breaks", "broken is worse", Number("broken minus fast", "broken - fast", 0.5),
              "above", paper="C"),
        Claim("waits", "it takes long", Number("slow", "slow"), smallest=1, cannot="it is short"),
    ],
)
'''


def claim(id: str, value: str, expect: str = "below", published=-0.5, **how) -> Claim:
    """A made-up claim of a paper."""
    number = Number(f"the value of {value}", value, published)
    return Claim(id, f"{id} is so", number, expect, **({"smallest": 0.25, "paper": "A"} | how))


def make_experiment(folder: Path, claims="studies/papers.py", **changes) -> Experiment:
    """An Experiment whose runs and results are in `folder`."""
    where = dict(out=str(folder / "out"), results=str(folder / "results"))
    return Experiment(ReproduceConfig(claims=str(claims), **where, **changes))


def flag(run, name: str):
    """The value of a flag in the run's command, as text; None without."""
    return dict(arg[2:].split("=", 1) for arg in run.args if arg.startswith("--")).get(name)


def write_base(path: Path, dataset, **changes) -> Path:
    """The config file of the made-up base."""
    path.write_text(
        "".join(f"{k} = {v!r}\n" for k, v in (TINY | {"dataset": str(dataset)} | changes).items()),
        encoding="utf-8",
    )
    return path


def write_claims(base: Path) -> Path:
    """The made-up claims file, beside its base."""
    path = base.parent / "made_up.py"
    path.write_text(MADE_UP.format(base=base, no_norm=NO_NORM))
    return path


def points_of(*argv, folder=ROOT / "out") -> list:
    """The points of this command line of sweep.py."""
    own, files, lists = split_arguments(list(map(str, argv)))
    config = SweepConfig(**{arg[2:].partition("=")[0]: arg.partition("=")[2] for arg in own})
    return list_points(config, files, lists, folder)


def argv(claims: Path, folder: Path, *flags) -> list:
    return [
        f"--claims={claims}",
        f"--out={folder / 'out'}",
        f"--results={folder / 'results'}",
        *flags,
    ]


def call(claims: Path, folder: Path, *flags) -> int:
    """The exit code of reproduce.py, in this process."""
    import reproduce

    return runs.call(reproduce.main, *argv(claims, folder, *flags))


def alone(command: str, *argv) -> None:
    """A command as a process of its own makes it, to be forked."""
    from support.processes import call_main

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


def train_here(self, run) -> None:
    """Runner.train without a process of its own, for runs that finish or diverge."""
    import train

    code = runs.call(train.main, *run.args, "--init_from=auto", f"--out_dir={run.path}")
    assert code == 0 or "failure" in read_metrics(run.path)[-1]


@contextmanager
def in_process():
    """Inside, runs are trained in this process and thread: quicker, since torch is imported
    already."""
    record = directory.run_record
    with runs.quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "run_record", record)  # the runner reads it
        for module in (runner, experiment):
            patch.setattr(module, "ThreadPoolExecutor", SameThread)
        patch.setattr(Runner, "train", train_here)
        yield
