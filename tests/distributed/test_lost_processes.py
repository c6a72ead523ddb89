"""Two processes of which one dies, hangs, is slow, or is set up wrongly: both end, each with one
line that says why."""

import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import nanodnt.start
import train
from support.faults import COMMANDS, Fault, Trial, strike_all
from support.processes import left, play, processes
from support.runs import load, make_dataset, metrics, run
from support.strikes import ALWAYS, at_call, kill_me

CONFIG = dict(max_iters=60, eval_interval=30, save_interval=9, micro_batch_size=2, init_from="auto")

# ------------------------------------------------------------------------------------- one is wrong


NO_ROOM = dict(patches=[(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))])
# the process that makes it, the mistake (a function that returns arguments of `play`), its message
MISTAKES = {
    "no data": (
        1,
        lambda out: dict(dataset="/nowhere"),
        "[rank 1] error: dataset '/nowhere' is not prepared",
    ),
    "a full disk": (
        0,
        lambda out: NO_ROOM,
        "[rank 0] error: .* has 0.00 GB free, a checkpoint needs",
    ),
}
DIFFERENT = {
    "flags": (1, lambda out: dict(eval_interval=7, seed=3), "seed, eval_interval"),
    "data": (
        1,
        lambda out: dict(dataset=make_dataset(out.parent / "other", seed=1)),
        "contents of the dataset",
    ),
}


def make_mistake(rank, world, mistake, config):
    wrong, prepare, _ = (MISTAKES | DIFFERENT)[mistake]
    play(rank, world, last=True, **config | (prepare(config["out"]) if rank == wrong else {}))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_for_one_process_ends_all(mistake, dataset, tmp_path):
    """Each ends by itself, without torchrun and long before timeout_s: one says what is wrong, the
    other that it is alone."""
    processes(2, make_mistake, mistake, CONFIG | dict(out=tmp_path / "run", dataset=dataset))
    wrong, _, message = MISTAKES[mistake]
    outputs = [part["output"] for part in left(tmp_path / "run", 2, code=1)]
    for output in outputs:
        assert output.count("error: ") == 1 and "Traceback" not in output
    assert re.search(message.replace("[", r"\["), outputs[wrong]), outputs[wrong]
    assert f"[rank {1 - wrong}] error: lost or never met the other processes" in outputs[1 - wrong]
    assert "Timed out" not in outputs[1 - wrong]


@pytest.mark.parametrize("what", DIFFERENT)
def test_processes_that_were_started_differently_say_so(what, dataset, tmp_path):
    processes(2, make_mistake, what, CONFIG | dict(out=tmp_path / "run", dataset=dataset))
    for rank, part in enumerate(left(tmp_path / "run", 2, code=1)):
        assert part["output"].count("error: ") == 1
        assert (
            f"[rank {rank}] error: processes have different {DIFFERENT[what][2]}: start all"
            in part["output"]
        )
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------- one dies, or hangs


@pytest.fixture(scope="module")
def reference(dataset, tmp_path_factory):
    return Trial(tmp_path_factory.mktemp("reference") / "run", COMMANDS["two processes"], dataset)


FAULTS = [
    Fault("SIGKILL", "forward", 0.5, 1),
    Fault("SIGKILL", "rename", 0.3, 0),
    Fault("SIGKILL", "clock", 0.4, None),
]


@pytest.mark.parametrize(
    "faults", [FAULTS[:1], pytest.param(FAULTS[1:], marks=pytest.mark.deep)], ids=["one", "two"]
)
def test_one_of_two_processes_dies(faults, reference, tmp_path):
    """The other ends by itself, with one line. Both are started again and go on exactly."""
    trial = Trial(tmp_path / "trial", reference.command, reference.dataset, reference)
    for fault, codes in zip(faults, strike_all(trial, faults), strict=True):
        dead = [-signal.SIGKILL if fault.rank in (rank, None) else 1 for rank in (0, 1)]
        assert list(codes) == dead


def test_one_of_two_processes_is_stopped_before_its_first_step(reference, tmp_path):
    """It has nothing to save and ends at once. The other, which waits for it, ends with one
    line."""
    trial = Trial(tmp_path / "trial", reference.command, reference.dataset, reference)
    assert strike_all(trial, [Fault("SIGTERM", "evaluation", 0.0, 1)]) == [
        (1, 128 + signal.SIGTERM)
    ]


def hang_in_step_12(rank, world, config):
    """Rank 1 stops in its 13th step, as it would in the debugger."""
    stop = at_call(train, "training_step", 13, lambda *_: kill_me(signal.SIGSTOP))
    play(rank, world, within=stop if rank == 1 else None, last=True, **config)


def test_a_process_that_hangs_ends_the_other(dataset, tmp_path):
    """It gives up after timeout_s, and says so."""
    config = CONFIG | dict(out=tmp_path / "run", dataset=dataset, timeout_s=2)
    started = processes(2, hang_in_step_12, config, join=False).processes
    try:
        started[0].join(60)
    finally:
        started[1].kill()
    found = torch.load(f"{tmp_path / 'run'}.rank0", weights_only=False)
    assert found["code"] == 1
    assert re.search(
        r"\[rank 0\] error: lost or never met the other processes \(.*Timed out", found["output"]
    )
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(13))
    assert load(tmp_path / "run" / "last.pt")["step"] == 9


# ----------------------------------------------------------------------------------- shared folders


def start_slowly(rank, world, out, dataset, weights):
    """Rank 1 is slow to read the checkpoint whose folder the run overwrites."""

    slow = at_call(
        nanodnt.start, "load_checkpoint", 1, lambda *_: time.sleep(0.5 * rank), times=ALWAYS
    )
    play(
        rank,
        world,
        out,
        within=slow,
        dataset=dataset,
        init_from=weights,
        overwrite=True,
        max_iters=3,
    )


def test_overwriting_waits_until_every_rank_has_read(dataset, tmp_path):
    """A new run in the folder of the run whose weights it starts from."""
    assert run(out_dir=tmp_path / "run", dataset=dataset, max_iters=2) == 0
    processes(2, start_slowly, tmp_path / "run", dataset, tmp_path / "run" / "best.pt")
    left(tmp_path / "run", 2)
    assert load(tmp_path / "run" / "last.pt")["step"] == 3


def resume_in_own_folder(rank, world, folder, dataset):
    os.chdir(folder / str(rank))
    play(
        rank,
        world,
        "run",
        meet=folder / "meet",
        last=True,
        dataset=dataset,
        init_from="auto",
        max_iters=6,
    )


def test_processes_that_find_different_checkpoints_say_so(dataset, tmp_path):
    """As on two machines without a shared folder: rank 1 finds nothing to resume."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    assert run(out_dir=tmp_path / "0" / "run", dataset=dataset, max_iters=3) == 0
    processes(2, resume_in_own_folder, tmp_path, dataset)
    for rank in (0, 1):
        found = torch.load(tmp_path / str(rank) / f"run.rank{rank}", weights_only=False)
        assert found["code"] == 1
        assert "processes found different checkpoints" in found["output"]
    assert (
        load(tmp_path / "0" / "run" / "last.pt")["step"] == 3
        and not (tmp_path / "1" / "run").exists()
    )
