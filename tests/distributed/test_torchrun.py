"""train.py under torchrun itself: stopped and resumed, killed and restarted, on machines that come
and go.

The run ends as if nothing had happened, or at once with a message. A machine is a torchrun agent
with one worker; it is lost when both are killed.
"""

import os
import random
import re
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from support.parallel_runs import ONE_BAD, ONE_BAD_STEP, make_one_bad
from support.processes import (
    ENDS,
    RUN,
    TOLERANCES,
    assert_close,
    finish,
    play,
    processes,
    start,
    torchrun,
    torchrun_forked,
    wait_for_row,
)
from support.runs import ROOT, assert_same_run, column, different, load, metrics, run
from support.strikes import some_step


@pytest.fixture(autouse=True)
def own_store(monkeypatch):
    """Restarted workers meet in a store of their own. In torchrun's they may find the addresses of
    the workers before them (torch 2.13; docs/scale.md)."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


# ---------------------------------------------------------------------------------- stop and resume

# train.py with rank 1's gradient of one step spoilt; at its end each rank leaves its exit code and
# parameters
ONE_BAD_RUN = f"""
import os, sys
from math import nan
from pathlib import Path
import torch
import train
from support.strikes import optimizers, spoil_gradients

models, rank, step = [], int(os.environ["RANK"]), {ONE_BAD_STEP}
train.draw_loss = lambda *_: None
with optimizers(lambda model, optimizer: models.append(model)):
    with spoil_gradients(**step if rank == 1 else step | dict(bad_steps=())):
        code = train.main()
result = dict(code=code, model=models[0].state_dict())
torch.save(result, Path(__file__).with_name(f"rank{{rank}}.pt"))
sys.exit(code)
"""


def test_stopped_and_resumed(two, dataset, tmp_path):
    """SIGTERM to torchrun, as a cluster sends it: both ranks save and end, and the run goes on
    exactly, now with its gradients in buckets: two processes sum to the same bits."""
    (tmp_path / "script.py").write_text(ONE_BAD_RUN)
    config = RUN | ONE_BAD | dict(dataset=dataset, out_dir=tmp_path / "run")
    process = torchrun_forked(tmp_path / "script.py", 2, **config)
    wait_for_row(process, tmp_path / "run", step := some_step(2, 8))
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SIGTERM: saving, then exiting" in out
    saved = load(tmp_path / "run" / "last.pt")
    ranks = [load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert step <= saved["step"] < 20
    for rank in ranks:
        assert rank["code"] == 143 and different(saved["model"], rank["model"]) == []
    processes(
        2, partial(make_one_bad, init_from="resume", in_buckets=True), tmp_path / "run", dataset
    )
    assert_same_run(tmp_path / "run", two / "one bad, ddp2")


# ------------------------------------------------------------------------- workers that are watched

CONFIG = dict(
    max_iters=60,
    eval_interval=30,
    save_interval=9,
    micro_batch_size=2,
    init_from="auto",
    timeout_s=60,
)
# train.py that leaves its process id, and waits after the row of a step for which there is a file
# hold.STEP.PROCESSES, until that is gone or the process is asked to stop
WORKER = """
import os, signal, sys, time
from pathlib import Path
import train
from nanodnt.run.directory import RunDirectory
from support.strikes import ALWAYS, at_call

here, rank, world = Path(__file__).parent, os.environ["RANK"], os.environ["WORLD_SIZE"]
(here / f"{os.getpid()}.of.rank{rank}").touch()
stops, make = [], train.Stop


def hold(_, row):
    while (here.parent / f"hold.{row['step']}.{world}").exists() and not stops[0].signal:
        time.sleep(0.01)


train.Stop = lambda: stops.append(make()) or stops[0]
train.draw_loss = lambda *_: None
with at_call(RunDirectory, "write", 1, hold, times=ALWAYS, after=True):
    sys.exit(train.main())
"""


def launch(folder, *launcher, **config):
    """torchrun of WORKER, which leaves process ids in `folder`; the run is in its parent."""
    folder.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(WORKER)
    return start(
        *launcher,
        script=folder / "worker.py",
        out_dir=folder.parent / "run",
        **{**CONFIG, **config},
    )


def hold(folder, step, world):
    """Make the run with `world` processes wait after the row of `step`, while the file returned
    exists."""
    path = folder / f"hold.{step}.{world}"
    path.touch()
    return path


def alive(folder, rank="*"):
    """Ids of the processes of WORKER in `folder` that have not ended."""
    found = [int(path.name.split(".")[0]) for path in folder.glob(f"*.of.rank{rank}")]
    return [pid for pid in found if is_alive(pid)]


def is_alive(pid):
    try:
        os.kill(pid, 0)
        # Z: ended, but nobody has asked how
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # another system than Linux
        return True


def lose(machine, folder):
    """A machine is gone from one moment to the next."""
    machine.kill()
    for pid in alive(folder):  # each has a session of its own, and would go on without its agent
        os.kill(pid, signal.SIGKILL)
    finish(machine, -signal.SIGKILL)


def assert_gone(folder):
    """The processes of `folder` end."""
    deadline = time.monotonic() + 20
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(folder) == []


@pytest.mark.deep
def test_a_killed_process_is_replaced(dataset, tmp_path):
    """torchrun starts all processes again, and the run equals one that nothing happened to, bit by
    bit."""
    config = (
        RUN
        | CONFIG
        | dict(dataset=dataset, dropout=0.1, max_iters=30, lr_decay_iters=30, eval_interval=15)
    )
    held = hold(tmp_path, some_step(2, 20), 2)
    process = launch(tmp_path / "a", *torchrun(2), "--max_restarts=2", **config)
    processes(2, partial(play, **config), tmp_path / "whole")
    wait_for_row(process, tmp_path / "run", int(held.name.split(".")[1]))
    held.unlink()
    rank = random.choice((0, 1))
    (victim,) = alive(tmp_path / "a", rank)
    os.kill(victim, signal.SIGKILL)
    out, err = finish(process, 0)
    assert f"failed (exitcode: -9) local_rank: {rank}" in err
    assert out.count("2 processes × 3 accumulation") == 2
    assert_gone(tmp_path / "a")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.deep
def test_workers_that_torchrun_left_behind_save_and_end(dataset, tmp_path):
    """SIGKILL to torchrun alone."""
    process = launch(
        tmp_path / "a", *torchrun(2), dataset=dataset, max_iters=100_000, save_interval=0
    )
    wait_for_row(process, tmp_path / "run", 5)
    process.kill()
    out, _ = process.communicate(timeout=60)  # the workers have its pipe: it closes when they end
    assert_gone(tmp_path / "a")
    assert "SIGTERM: saving, then exiting" in out
    assert load(tmp_path / "run" / "last.pt")["step"] == metrics(tmp_path / "run")[-1]["step"] > 4


# --------------------------------------------------------------------------------- several machines


def meeting_at(folder, nodes, dataset):
    """A function that starts the machine of a name. Machine "a" hosts the meeting. `nodes`:
    torchrun's --nnodes."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return partial(machine, folder, nodes, s.getsockname()[1], dataset)


def machine(folder, nodes, port, dataset, name):
    waits = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    agent = (
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        "--nproc_per_node=1",
        "--max_restarts=3",
    )
    agent += (
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=localhost:{port}",
        "--rdzv_id=run",
        "--local_addr=localhost",
    )
    agent += (f"--rdzv_conf=is_host={int(name == 'a')},{waits}",)
    return launch(folder / name, *agent, dataset=dataset)


@pytest.mark.deep
def test_machines_come_and_go(dataset, tmp_path):
    """b dies: a goes on alone. b is back: both go on. a, which hosts the meeting, dies: b ends, and
    both are started again. The run is that of one process all the same."""
    out, boot = tmp_path / "run", meeting_at(tmp_path, "1:2", dataset)
    first, second, third = some_step(2, 20), some_step(28, 38), some_step(42, 55)
    holds = [
        hold(tmp_path, step, world) for step, world in ((1, 1), (first, 2), (second, 1), (third, 2))
    ]
    a, b = boot("a"), boot("b")
    wait_for_row(a, out, first)
    lose(b, tmp_path / "b")
    for path in holds[:2]:
        path.unlink()
    wait_for_row(a, out, second)
    assert len(alive(tmp_path / "a")) == 1 and alive(tmp_path / "b") == []
    b = boot("b")
    wait_for_row(b, out, third)
    lose(a, tmp_path / "a")
    _, err = finish(b, 1)
    assert re.search(r"\[rank [01]\] error: lost or never met the other processes", err), err
    assert "RendezvousConnectionError" in err
    for path in holds[2:]:
        path.unlink()
    boot = meeting_at(tmp_path, "2", dataset)
    b = boot("b")
    a = boot("a")
    out_a, _ = finish(a, 0)
    out_b, _ = finish(b, 0)
    assert "2 processes × 2 accumulation steps × 2 sequences" in out_a + out_b
    for name in "ab":
        assert_gone(tmp_path / name)

    assert run(out_dir=tmp_path / "one", dataset=dataset, **CONFIG) == 0
    assert [row["step"] for row in metrics(out)] == list(range(61))
    for name, rel in TOLERANCES.items():  # 60 steps, not 20
        assert column(out, name) == pytest.approx(
            column(tmp_path / "one", name), rel=3 * rel, abs=0
        ), name
    assert_close(load(out / "last.pt")["model"], load(tmp_path / "one" / "last.pt")["model"], ENDS)


@pytest.mark.house
def test_the_sbatch_script_is_bash(tmp_path):
    page = (ROOT / "docs" / "scale.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.S)
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
