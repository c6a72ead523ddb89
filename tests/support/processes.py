"""Processes for tests: `start` is train.py in a new interpreter, with python or torchrun before it.
The others are forked from one that has imported torch: `Forked` is one alone, `processes` are
several that talk over gloo. `play` is train.py on one of these, `left` reads what each left."""

import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, distribute_tensor

from layers.sharding import local_shard
from nanodnt.run import signals
from nanodnt.run.environment import Env
from nanodnt.run.errors import end_with
from support.runs import ROOT, column, flags, quick_runs, run
from support.strikes import ALWAYS, at_call, optimizers, patched
from support.tolerances import GRADIENTS, LOSS, roundings

FORKSERVER = multiprocessing.get_context("forkserver")
# Imported once, before the fork: every process would otherwise take longer for this than for its
# part of a test.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "train",
]
FORKSERVER.set_forkserver_preload(PRELOAD)
LIMIT_S = 600  # for a process that takes two minutes at most


def start(
    *launcher, script="train.py", cwd=ROOT, out=subprocess.PIPE, err=subprocess.PIPE, **changes
):
    """train.py in a process (and process group) of its own: a Popen, whose output goes to `out` and
    `err`. `launcher`: the arguments between python and the script."""
    command = [sys.executable, *launcher, str(ROOT / script), *flags(**changes)]
    env = (
        {"OMP_NUM_THREADS": "1"}
        | os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    )
    how = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True)
    # pytest may have been started so that Ctrl-C is ignored
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, cwd=cwd, env=env, preexec_fn=listen, **how)


class Forked(FORKSERVER.Process):
    """`function(*args)` in a process (and process group) of its own, started at once; used as a
    Popen is. It prints to the files OUT.out and OUT.err."""

    def __init__(self, out: Path, function, *args):
        super().__init__(target=alone, args=(out, function, *args))
        self.out = out
        self.start()

    returncode = property(lambda self: self.exitcode)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.out), timeout)

    def communicate(self, timeout: float | None = None) -> tuple:
        self.wait(timeout)
        return tuple(
            Path(f"{self.out}.{name}").read_text(encoding="utf-8") for name in ("out", "err")
        )


def alone(out: Path, function, *args) -> None:
    """A forked process as a new one, but that runs in it are quick."""
    os.setsid()
    for name in signals.NAMES:  # not what this process inherited
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    faulthandler.register(signal.SIGQUIT)
    with quick_runs():
        function(*args)


def train_forked(**changes) -> Forked:
    """train.py in a process of its own; it prints to files beside its run directory."""
    return Forked(changes["out_dir"], call_main, "train", *flags(**changes))


def torchrun_forked(script: Path, world: int, **changes) -> Forked:
    """torchrun's agent in a process of its own, and forked from it `world` processes of
    `script`."""
    how = ("--standalone", f"--nproc_per_node={world}", "--start-method=fork", "--run-path")
    return Forked(
        changes["out_dir"], call_main, "torch.distributed.run", *how, str(script), *flags(**changes)
    )


def call_main(module: str, *argv) -> None:
    """A program as python runs it: end with the exit code of its main."""
    sys.argv = [module, *argv]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with(importlib.import_module(module).main)


def give_up(process, why: str) -> None:
    """End a process that hangs, and fail. SIGTERM first, so that torchrun ends its workers, for
    which it allows 30 seconds: they would outlive a killed torchrun and keep the pipes open."""
    process.terminate()
    try:
        output = process.communicate(timeout=45)
    except subprocess.TimeoutExpired:
        process.kill()
        output = "and had to be killed"
    pytest.fail(f"{why}: {output}")


def wait_for_row(process, out_dir: Path, step: int, timeout_s: float = 120) -> None:
    """Return as soon as metrics.jsonl of the running `process` has a row of `step`."""
    path, deadline = out_dir / "metrics.jsonl", time.monotonic() + timeout_s
    while not (path.exists() and f'{{"step": {step}, ' in path.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            give_up(process, f"no row of step {step} in {path}")
        time.sleep(0.002)


def finish(process, code: int, timeout_s: float = 120) -> tuple:
    """(stdout, stderr) of a process that is expected to end with this exit code (-n: killed by
    signal n)."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        give_up(process, "did not end by itself")
    assert process.returncode == code, (
        f"exit code {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    )
    return out, err


def torchrun(processes: int) -> tuple:
    """The launcher for `start`."""
    return "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"


def processes(world: int, function, *args, join: bool = True):
    """function(rank, world, *args) on each of `world` processes; what one of them raises is raised
    here. One that hangs says where, and ends with an error. Without `join` they still run: the
    result has them as `processes`."""
    how = dict(nprocs=world, start_method="forkserver", join=join)
    return mp.start_processes(within_limit, (function, world, *args), **how)


def within_limit(rank: int, function, *args) -> None:
    # until the process ends: its last act may hang, too
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    gc.disable()  # it would free at some moment what a run has to free by itself
    function(rank, *args)


def meeting(rank: int, world: int, path) -> dict:
    """Arguments of init_process_group: the processes find each other in a file, a new one each
    time. (A port might still be taken when the next run begins.)"""
    return dict(init_method=f"file://{path}.meeting", rank=rank, world_size=world)


def join_as(patch, rank: int, world: int, path) -> None:
    """Make a command in this process one of `world` of torchrun's, which meet in a file at
    `path`."""
    group = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="file", MASTER_PORT=0)
    for name, value in group.items():
        patch.setenv(name, str(value))
    patch.setattr(
        dist, "init_process_group", partial(dist.init_process_group, **meeting(rank, world, path))
    )


@contextmanager
def joined(rank: int, world: int, path, dtype=torch.float32, limit_s: int = 60, **env):
    """The Env of this process, one of `world` that meet in a file at `path`. For one alone there is
    no process group. `env`: further fields of the Env."""
    limit = timedelta(seconds=limit_s)
    if world > 1:
        dist.init_process_group("gloo", timeout=limit, **meeting(rank, world, path))
    yield Env(rank, world, torch.device("cpu"), dtype, world > 1, limit, **env)
    gc.collect()  # DDP before its group, as in a run
    if world > 1:
        dist.destroy_process_group()


def sharded_like(p, full: torch.Tensor) -> torch.Tensor:
    """A full tensor that every process has, split as the parameter p is."""
    if not isinstance(p, DTensor):
        return full
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)


# ------------------------------------------------------------------------------------- the same run

# Sums in another order, which twenty steps of training make ten times larger
# (tests/runs/test_golden.py measures it).
LOSSES, NORMS = 10 * LOSS, 2 * GRADIENTS
TOLERANCES = dict(
    train_loss=LOSSES, val_loss=LOSSES, grad_norm=NORMS, lr=0, tokens=0, skipped_steps=0
)

# Of weights next to their paths, and of moments: Adam divides each entry of a gradient by its own
# size, so that small ones show the rounding of large ones.
ENDS = roundings(4000)


def assert_same_values(got, expected, **tolerances) -> None:
    """metrics.jsonl of two run directories is the same, to rounding. `tolerances`: other than
    TOLERANCES."""
    for name, rel in (TOLERANCES | tolerances).items():
        assert column(got, name) == pytest.approx(column(expected, name), rel=rel, abs=0), name


def assert_close(got: dict, expected: dict, rel: float, start: dict | None = None) -> None:
    """The difference is small next to the tensor, or next to its distance from where it started."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = (tensor - start[name] if start else tensor).norm()
        assert (got[name] - tensor).norm() <= rel * scale, (
            name,
            (got[name] - tensor).norm() / scale,
        )


# -------------------------------------------------------------------------------------- one process

STEPS, BAD = 6, 5  # of each run, and the one whose gradient is made bad
RUN = dict(
    batch_size=12,
    block_size=16,
    max_iters=STEPS,
    lr_decay_iters=STEPS,
    eval_interval=STEPS,
    eval_tokens=15 * 16,
)
RUN |= dict(timeout_s=60)
# the parameter in whose gradient `Watch` puts a NaN, or its stack of experts
SPOILT = "blocks.1.mlp.f.up.weight"
turn = count()  # of the runs of this process: all processes make the same


def shards(params) -> dict:
    """A copy of what this process has of each parameter."""
    return {name: local_shard(p.detach()).clone() for name, p in params}


class Watch:
    """A run's model and optimizer as one process sees them. `spoils`: steps, from 1, in which the
    last entry of its part of a gradient is made NaN, after DDP has averaged. `stop_in`: the step
    after which it sends itself SIGTERM."""

    def __init__(self, spoils, stop_in: int):
        self.spoils, self.stop_in, self.step = spoils, stop_in, 0
        self.seen, self.ddp = {"frozen": [], "gain": set(), "meta": []}, lambda: None

    @contextmanager
    def watching(self):
        """Runs meanwhile are watched."""
        from nanodnt.run import parallel

        def note_ddp(data_parallel):
            def wrap(model, env):
                call = data_parallel(model, env)
                self.ddp = weakref.ref(call)
                return call

            return wrap

        def note_meta(model, *_):
            self.seen["meta"] += [p.is_meta for p in model.parameters()]

        def note_end():
            self.seen["DDP outlives its group"] = bool(self.ddp())

        with (
            pytest.MonkeyPatch.context() as patch,
            optimizers(self.begin),
            at_call(torch.nn.utils, "get_total_norm", 1, self.spoil, times=ALWAYS),
            at_call(parallel, "shard_model", 1, note_meta, times=ALWAYS),
            at_call(parallel, "shard_model", 1, note_meta, times=ALWAYS, after=True),
            at_call(dist, "destroy_process_group", 1, note_end, times=ALWAYS),
            patched(parallel, "data_parallel", note_ddp),
        ):
            yield patch

    def begin(self, model, optimizer) -> None:
        """Note where the run starts."""
        self.model, self.optimizer = model, optimizer
        self.seen["start"] = shards(model.named_parameters())
        self.seen["bytes"] = {
            name: local_shard(p).untyped_storage().nbytes() for name, p in model.named_parameters()
        }
        self.seen["sharded"] = {
            name for name, p in model.named_parameters() if isinstance(p, DTensor)
        }
        sharded = ((name, p) for name, p in model.named_parameters() if isinstance(p, DTensor))
        self.seen["dims"] = {name: p.placements[-1].dim for name, p in sharded}
        self.seen["state_sizes"] = [t.numel() for t in self.state()]
        self.optimizer.register_step_pre_hook(self.before)
        self.optimizer.register_step_post_hook(self.after)
        if model.final_norm.gain is not None:
            model.final_norm.register_forward_pre_hook(
                lambda slot, x: self.seen["gain"].add(slot.gain.dtype)
            )

    def spoil(self, *_) -> None:
        self.step += 1
        named = dict(self.model.named_parameters())
        if self.step in self.spoils:
            spoilt = named.get(SPOILT, named.get(SPOILT.replace("up", "experts.up")))
            local_shard(spoilt.grad).view(-1)[-1] = torch.nan
        self.seen["grads"] = {name: (p.dtype, p.grad.dtype) for name, p in named.items()}

    def before(self, *_):
        self.old = [
            *shards(self.model.named_parameters()).values(),
            *map(torch.clone, self.state()),
        ]

    def after(self, *_):
        new = [*shards(self.model.named_parameters()).values(), *self.state()]
        if all(
            a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(self.old, new, strict=True)
        ):
            self.seen["frozen"].append(self.step)
        if self.step == self.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def state(self) -> list:
        return [local_shard(t) for state in self.optimizer.state.values() for t in state.values()]


def play(
    rank,
    world,
    out,
    spoils=(),
    stop_in=0,
    torchrun=None,
    patches=(),
    within=None,
    meet=None,
    last=False,
    **config,
) -> None:
    """train.py with the flags of RUN and `config` on this process, one of `world`. Leaves exit
    code, output, and what `Watch` saw in a file next to `out`.

    spoils     see `Watch`
    stop_in    the step after which the last process sends itself SIGTERM
    torchrun   whether to set torchrun's environment variables; None: for more than one process
    patches    arguments of setattr
    within     a context manager for the run
    meet       a path for the file where the processes meet, if not next to `out`
    last       whether this is the last run of the process: then an error may leave its process
               group as it is
    """
    output, torchrun = io.StringIO(), world > 1 if torchrun is None else torchrun
    watch = Watch(spoils, stop_in if rank == world - 1 else 0)
    with within or nullcontext(), quick_runs(), watch.watching() as patch:
        for args in patches:
            patch.setattr(*args)
        if torchrun:
            join_as(patch, rank, world, f"{meet or out}.{world}.{next(turn)}")
        with redirect_stdout(output), redirect_stderr(output):
            code = run(out_dir=out, **RUN | config)
    if dist.is_initialized() and not last:  # after an error
        dist.destroy_process_group()
    found = dict(watch.seen, code=code, output=output.getvalue())
    if "start" in found:
        found["end"] = shards(watch.model.named_parameters())
    torch.save(found, f"{out}.rank{rank}")


def left(out, world: int, code: int = 0) -> list:
    """What each process left of a run that was to end with this exit code."""
    found = [torch.load(f"{out}.rank{rank}", weights_only=False) for rank in range(world)]
    assert [f["code"] for f in found] == [code] * world, found[0]["output"][-3000:]
    return found


def join_rows(parts: list, end: str) -> dict:
    """Full parameters from the rows that each process has at the "start" or "end", in the order of
    the processes."""
    dims = parts[0]["dims"]
    return {
        name: torch.cat([part[end][name] for part in parts], dims[name]) for name in parts[0][end]
    }
