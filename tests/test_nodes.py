"""train.py on machines that come and go, with processes that die, hang, or are set up wrongly: the run ends as it would
have ended, or at once with a message. A machine is a torchrun agent with one worker; to lose it is to kill both.
"""

import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    assert_same_run,
    column,
    finish,
    load,
    make_dataset,
    metrics,
    run,
    some_step,
    start,
    wait_for_row,
)
from test_dist import TOLERANCES, assert_close, meeting, processes, torchrun

import rundir

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def own_store(monkeypatch):
    """Workers that are started again meet in a store of their own. In torchrun's they may find the addresses of those
    before them (torch 2.13; docs/scale.md)."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


CONFIG = dict(max_iters=60, eval_interval=30, save_interval=9, micro_batch_size=2, init_from="auto", timeout_s=60)
# train.py that leaves its process id, and waits after the row of a step for which there is a file hold.STEP.PROCESSES,
# until that is gone or the process is asked to stop
WORKER = """
import os, signal, sys, time
from pathlib import Path
import rundir, train

here, rank, world = Path(__file__).parent, os.environ["RANK"], os.environ["WORLD_SIZE"]
(here / f"{os.getpid()}.of.rank{rank}").touch()
stops, make, write = [], train.Stop, rundir.Metrics.write


def write_and_hold(self, row):
    write(self, row)
    while (here.parent / f"hold.{row['step']}.{world}").exists() and not stops[0].signal:
        time.sleep(0.01)


train.Stop = lambda env: stops.append(make(env)) or stops[0]
rundir.Metrics.write, rundir.draw_loss = write_and_hold, lambda *_: None
# here a test adds to it
sys.exit(train.main())
"""


def launch(folder, *launcher, addition="", **config):
    """torchrun of WORKER, which leaves process ids in `folder`; the run is in its parent."""
    folder.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(WORKER.replace("# here a test adds to it", addition))
    return start(*launcher, script=folder / "worker.py", out_dir=folder.parent / "run", **{**CONFIG, **config})


def hold(folder, step, world):
    """Make the run with `world` processes wait after the row of `step`, while the file returned exists."""
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
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()  # dead, but nobody has asked how it ended
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


def gone(folder, rank="*", within_s=20):
    """Check that the processes of `folder` end."""
    deadline = time.monotonic() + within_s
    while alive(folder, rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(folder, rank) == []


# ------------------------------------------------------------------------------------------------- several machines


def meeting_at(folder, nodes, dataset):
    """A function that starts the machine of a name; "a" hosts the meeting. `nodes`: how many, as torchrun takes it."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return partial(machine, folder, nodes, s.getsockname()[1], dataset)


def machine(folder, nodes, port, dataset, name):
    waits = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    agent = ("-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc_per_node=1", "--max_restarts=3")
    agent += ("--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=run", "--local_addr=localhost")
    agent += (f"--rdzv_conf=is_host={int(name == 'a')},{waits}",)
    return launch(folder / name, *agent, dataset=dataset)


def test_machines_come_and_go(dataset, tmp_path):
    """b dies: a goes on alone. b is back: both go on. a dies, where they meet: b ends, and both are started again.
    The run is that of one process all the same."""
    out, boot = tmp_path / "run", meeting_at(tmp_path, "1:2", dataset)
    first, second, third = some_step(2, 20), some_step(28, 38), some_step(42, 55)
    holds = [hold(tmp_path, step, world) for step, world in ((1, 1), (first, 2), (second, 1), (third, 2))]
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
    assert "2 processes × 2 accumulation × 2 sequences" in out_a + out_b
    for name in "ab":
        gone(tmp_path / name)

    assert run(out_dir=tmp_path / "one", dataset=dataset, **CONFIG) == 0
    assert [row["step"] for row in metrics(out)] == list(range(61))
    for name, rel in dict(TOLERANCES, train_loss=5e-5, val_loss=5e-5, grad_norm=5e-4).items():
        assert column(out, name) == pytest.approx(column(tmp_path / "one", name), rel=rel, abs=0), name
    assert_close(load(out / "last.pt")["model"], load(tmp_path / "one" / "last.pt")["model"], 1e-3)


# ------------------------------------------------------------------------------------------------------ one machine


def rank_of_two(rank, world, folder, mistake, config):
    """train.py as one of two processes without torchrun; leaves its exit code and what it said in `folder`."""
    torch.set_num_threads(1)
    said, (clumsy, prepare, _) = StringIO(), (MISTAKES | DIFFERENT).get(mistake, (None, None, None))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="file").items():
            patch.setenv(name, str(value))
        meet = meeting(rank, world, config["out_dir"])
        patch.setattr(dist, "init_process_group", partial(dist.init_process_group, **meet))
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        code = run(**config | (prepare(patch, config) if rank == clumsy else {}))
    (folder / f"{mistake}.{rank}.json").write_text(json.dumps((code, said.getvalue())))


def test_a_killed_process_is_replaced(dataset, tmp_path):
    """torchrun starts all processes again, and the run equals one that nothing happened to, bit by bit."""
    config = dict(dataset=dataset, dropout=0.1)
    held = hold(tmp_path, some_step(2, 50), 2)
    process = launch(tmp_path / "a", *torchrun(2), "--max_restarts=2", **config)
    processes(2, rank_of_two, tmp_path, "none", CONFIG | config | dict(out_dir=tmp_path / "whole"))
    wait_for_row(process, tmp_path / "run", int(held.name.split(".")[1]))
    held.unlink()
    rank = random.choice((0, 1))
    (victim,) = alive(tmp_path / "a", rank)
    os.kill(victim, signal.SIGKILL)
    out, err = finish(process, 0)
    assert f"failed (exitcode: -9) local_rank: {rank}" in err
    assert out.count("2 processes × 2 accumulation") == 2
    gone(tmp_path / "a")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


STOPPED = """
step = train.training_step
calls = iter(range(99))
def step_or_hang(*args):
    if rank == "1" and next(calls) == 12:
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(*args)
train.training_step = step_or_hang
"""


def test_a_process_that_hangs_ends_the_job(dataset, tmp_path):
    """The other gives up after timeout_s. torchrun allows the one that hangs 30 seconds, which are not waited for."""
    process = launch(tmp_path / "a", *torchrun(2), addition=STOPPED, dataset=dataset, timeout_s=3)
    wait_for_row(process, tmp_path / "run", 12)
    (hung,) = alive(tmp_path / "a", rank=1)
    gone(tmp_path / "a", rank=0)
    os.kill(hung, signal.SIGKILL)
    _, err = finish(process, 1)
    assert re.search(r"\[rank 0\] error: lost or never met the other processes \(.*Timed out", err), err
    gone(tmp_path / "a")
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(13))
    assert load(tmp_path / "run" / "last.pt")["step"] == 9


def test_a_wrong_flag_on_one_machine_ends_the_job(dataset, tmp_path):
    """Before the processes have met: torchrun ends those that wait."""
    wrong = 'sys.argv += ["--optimiser=adamw"] * (rank == "1")'
    process = launch(tmp_path / "a", *torchrun(2), addition=wrong, dataset=dataset)
    _, err = finish(process, 1)
    assert "[rank 1] error: unknown flag --optimiser (did you mean --optimizer?)" in err and "SystemExit" not in err
    assert "exitcode  : 2" in err
    assert "Timed out" not in err
    gone(tmp_path / "a")
    assert not (tmp_path / "run").exists()


def no_data(patch, config):
    return dict(dataset="/nowhere")


def no_room(patch, config):
    patch.setattr(rundir.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    return {}


def no_room_left(patch, config):
    sync = os.fsync

    def full(file):
        if (config["out_dir"] / "prev.pt").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return sync(file)

    patch.setattr(os, "fsync", full)
    return {}


MISTAKES = {  # whose it is, what is wrong there, what that process says
    "no data": (1, no_data, "[rank 1] error: dataset '/nowhere' is not prepared"),
    "a full disk": (0, no_room, "[rank 0] error: .* has 0.00 GB free, a checkpoint needs"),
    "a disk that fills up": (0, no_room_left, "[rank 0] error: cannot write .*No space left on device"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_for_one_process_ends_all(mistake, dataset, tmp_path):
    """Each by itself, without torchrun and long before timeout_s: one says what is wrong, the other that it is gone."""
    config = CONFIG | dict(out_dir=tmp_path / "run", dataset=dataset)
    processes(2, rank_of_two, tmp_path, mistake, config)
    (clumsy, _, message), said = MISTAKES[mistake], {}
    for rank in (0, 1):
        code, said[rank] = json.loads((tmp_path / f"{mistake}.{rank}.json").read_text())
        assert code == 1, (rank, said)
        assert said[rank].count("error: ") == 1 and "Traceback" not in said[rank]
    assert re.search(message.replace("[", r"\["), said[clumsy]), said[clumsy]
    assert f"[rank {1 - clumsy}] error: lost or never met the other processes" in said[1 - clumsy]
    assert "Timed out" not in said[1 - clumsy]


def test_workers_that_torchrun_left_behind_save_and_end(dataset, tmp_path):
    """SIGKILL to torchrun alone."""
    process = launch(tmp_path / "a", *torchrun(2), dataset=dataset, max_iters=100_000, save_interval=0)
    wait_for_row(process, tmp_path / "run", 5)
    process.kill()
    out, _ = process.communicate(timeout=60)  # the workers have its pipe: it closes when they end
    gone(tmp_path / "a")
    assert "SIGTERM: saving, then exiting" in out
    assert load(tmp_path / "run" / "last.pt")["step"] == metrics(tmp_path / "run")[-1]["step"] > 4


def another_flag(patch, config):
    return dict(eval_interval=7, seed=3)


def another_dataset(patch, config):
    return dict(dataset=make_dataset(config["out_dir"].parent / "other", seed=1))


DIFFERENT = {
    "flags": (1, another_flag, "seed, eval_interval"),
    "data": (1, another_dataset, "contents of the dataset"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_processes_that_were_started_differently_say_so(what, dataset, tmp_path):
    config = CONFIG | dict(out_dir=tmp_path / "run", dataset=dataset)
    processes(2, rank_of_two, tmp_path, what, config)
    for rank in (0, 1):
        code, said = json.loads((tmp_path / f"{what}.{rank}.json").read_text())
        assert code == 1 and said.count("error: ") == 1
        assert f"[rank {rank}] error: processes have different {DIFFERENT[what][2]}: start all" in said
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- the page


def test_the_sbatch_script_is_bash(tmp_path):
    page = (ROOT / "docs" / "scale.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.S)
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
