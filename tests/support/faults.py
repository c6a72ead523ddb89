"""Faults: tiny runs in processes of their own, killed or broken at a chosen or random moment, and what must hold then.

A `Fault` says what strikes, where and when. A `Trial` is one run that is struck again and again, each time started anew
by the same command, until it ends; after every fault it checks the exit codes, what was said, the checkpoints and the
logged rows, and at the end that the run is bit by bit the one nobody disturbed. test_faults.py makes a few trials,
soak.py hundreds.

Processes are forked from one that has imported torch, and run train.py's main; kinds of fault with "python" or
"torchrun" in their name start those.
"""

import errno
import faulthandler
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from helpers import ROOT, assert_same_run, different, flags, load

import rundir
import runtime
import train
from loader import Dataset
from model import GPT

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])
LIMIT_S = 60  # a process that has not ended by then hangs
NOBODY = 65534  # a user that may write nothing


# --------------------------------------------------------------------------------------------------- what is run


class Command(NamedTuple):
    """A run: its flags, on how many processes, the steps (from 0) whose loss is made NaN, and the batches (from 0) that
    are made to spike."""

    flags: dict
    processes: int = 1
    bad_losses: tuple = ()
    bad_batches: tuple = ()


STEPS, EVAL, SAVE = 80, 20, 7
LONG = dict(max_iters=STEPS, eval_interval=EVAL, save_interval=SAVE, keep_every=2 * EVAL)
LONG |= dict(init_from="auto", timeout_s=15)
COMMANDS = {
    "adamw, dropout": Command(dict(dropout=0.2, micro_batch_size=4)),
    "msgdw, skipped steps": Command(dict(optimizer="msgdw", learning_rate=0.5), bad_losses=(30, 31, 57)),
    "muon, blockwise": Command(dict(optimizer="muon", dropout=0.1, blockwise_lr=True, learning_rate=5e-3)),
    "adam_mini, wsd": Command(dict(optimizer="adam_mini", schedule="wsd", mlp="swiglu")),
    "adamw, a spike": Command(dict(dropout=0.2, loss_spike=1.0), bad_batches=(50,)),
    "two processes": Command(dict(dropout=0.2, micro_batch_size=2), processes=2),
    "two processes, fsdp": Command(dict(parallel="fsdp", dropout=0.1), processes=2),
    "two processes, muon": Command(dict(optimizer="muon"), processes=2, bad_losses=(50,)),
}


# ------------------------------------------------------------------------------------------------ what strikes it


class Fault(NamedTuple):
    """One thing that goes wrong."""

    kind: str  # a row of KINDS
    moment: float  # when, as a share of what is left of the run: 0 at once, 1 at its end
    rank: int = 0  # the process that it strikes


class Kind(NamedTuple):
    """`what` strikes: the names of signals, an error's name with "once" or "always", or one of DAMAGES. `place`: a key
    of PLACES (inside the process), "clock" or "seen" (from outside), "start-up", or "between" two starts."""

    what: str
    place: str
    launcher: str = "fork"  # fork, python, torchrun
    ranks: str = "one"  # which processes it strikes: one, all, launcher
    weight: float = 1.0  # how often soak.py draws it


# inside a process: where a fault strikes, and about how often a run of 80 steps passes there
PLACES = {
    "forward": (GPT, "forward", 90),
    "backward": (torch.Tensor, "backward", 80),
    "update": (torch.amp.GradScaler, "update", 80),
    "evaluation": (Dataset, "val_batch", 10),
    "fsync": (os, "fsync", 84),
    "link": (os, "link", 24),
    "rename": (os, "replace", 58),
    "checkpoint": ("wb", None, 4_300_000),  # bytes of all files that are written whole
    "row": ("ab", None, 36_000),  # bytes appended to metrics.jsonl
}
KINDS = {
    "SIGKILL, any moment": Kind("SIGKILL", "clock", weight=6),
    "SIGTERM, any moment": Kind("SIGTERM", "clock", weight=3),
    "SIGINT, any moment": Kind("SIGINT", "clock", weight=3),
    "SIGINT twice, any moment": Kind("SIGINT SIGINT", "clock", weight=2),
    "SIGTERM, then SIGKILL": Kind("SIGTERM SIGKILL", "clock", weight=2),
    "SIGKILL at start-up": Kind("SIGKILL", "start-up", weight=2),
    "SIGTERM at start-up": Kind("SIGTERM", "start-up"),
    "SIGINT at start-up": Kind("SIGINT", "start-up"),
    **{f"SIGKILL, {place}": Kind("SIGKILL", place) for place in PLACES},
    "SIGKILL, checkpoint": Kind("SIGKILL", "checkpoint", weight=3),
    "SIGKILL, rename": Kind("SIGKILL", "rename", weight=4),
    "SIGKILL, a .tmp file is seen": Kind("SIGKILL", "seen", weight=3),
    "SIGTERM, forward": Kind("SIGTERM", "forward"),
    "SIGTERM, evaluation": Kind("SIGTERM", "evaluation"),
    "SIGTERM, checkpoint": Kind("SIGTERM", "checkpoint"),
    "SIGINT, rename": Kind("SIGINT", "rename"),
    "SIGINT twice, checkpoint": Kind("SIGINT SIGINT", "checkpoint"),
    "disk full for good, checkpoint": Kind("ENOSPC always", "checkpoint"),
    "disk full for good, row": Kind("ENOSPC always", "row"),
    "I/O error once, checkpoint": Kind("EIO once", "checkpoint"),
    "I/O error once, fsync": Kind("EIO once", "fsync"),
    "I/O error once, rename": Kind("EIO once", "rename"),
    "I/O error for good, fsync": Kind("EIO always", "fsync"),
    "I/O error for good, rename": Kind("EIO always", "rename"),
    "folder becomes read-only": Kind("read-only", "evaluation"),
    "last.pt truncated": Kind("truncated", "between"),
    "last.pt, a bit flipped": Kind("flipped", "between"),
    "last.pt, 4096 bytes zeroed": Kind("zeroed", "between"),
    "data truncated in the run": Kind("data truncated", "clock"),
    "data missing at the start": Kind("data missing", "between"),
    "two processes: SIGKILL to one": Kind("SIGKILL", "clock", weight=2),
    "two processes: SIGKILL to both": Kind("SIGKILL", "clock", ranks="all"),
    "two processes: SIGTERM to one": Kind("SIGTERM", "clock"),
    "python: SIGKILL, any moment": Kind("SIGKILL", "clock", "python"),
    "python: SIGTERM, any moment": Kind("SIGTERM", "clock", "python"),
    "python: SIGINT, any moment": Kind("SIGINT", "clock", "python"),
    "torchrun: SIGKILL to a rank": Kind("SIGKILL", "clock", "torchrun"),
    "torchrun: SIGKILL to all": Kind("SIGKILL", "clock", "torchrun", "all"),
    "torchrun: SIGTERM to torchrun": Kind("SIGTERM", "clock", "torchrun", "launcher"),
}


def suits(kind: str, command: Command) -> bool:
    """Whether a kind of fault is for this command. Where a spike sends a run back depends on the last checkpoint, so
    that only what makes none of its own leaves the same run."""
    if command.bad_batches and KINDS[kind].what != "SIGKILL":
        return False
    if kind.startswith(("two processes", "torchrun")):
        return command.processes == 2 and not (kind.startswith("torchrun") and command.bad_losses)
    spoilt = command.bad_losses or command.bad_batches  # which needs a forked process
    return not (kind.startswith("python") and (command.processes > 1 or spoilt))


def draw(random: Random, command: Command, kinds=None) -> Fault:
    """A fault for this command: which kind (one of `kinds`), when, and to which process."""
    allowed = [kind for kind in kinds or KINDS if suits(kind, command)]
    kind = random.choices(allowed, [KINDS[kind].weight for kind in allowed])[0]
    alike = KINDS[kind].place in ("clock", "start-up", "forward", "backward", "update")  # where all ranks pass
    return Fault(kind, random.random(), random.randrange(command.processes) if alike else 0)


# -------------------------------------------------------------------------------------------- inside the process


def action(what: str):
    """A function that does it to this process: signals, or an error of the system."""
    if what.startswith("SIG"):
        return lambda: [os.kill(os.getpid(), signal.Signals[name]) for name in what.split()]
    code = getattr(errno, what.split()[0])

    def fail():
        raise OSError(code, os.strerror(code))

    return fail


def break_calls(owner, name: str, number: int, after: bool, always: bool, act) -> None:
    """Make call `number` (from 0) of a function, `always` also those after, do `act()` before or after its work."""
    real, calls = getattr(owner, name), itertools.count()

    def broken(*args, **kwargs):
        call = next(calls)
        now = call == number or (always and call > number)
        if now and not after:
            act()
        result = real(*args, **kwargs)
        if now and after:
            act()
        return result

    setattr(owner, name, broken)


def break_writes(mode: str, number: int, always: bool, act) -> None:
    """Do `act()` when rundir has written `number` bytes to files opened with `mode`; `always`: at each write after."""
    written, over = [0], []

    def open_broken(path, how="r", **kwargs):
        file = open(path, how, **kwargs)
        if how == mode:
            real = file.write

            def write(data):
                room = number - written[0]
                written[0] += len(data)
                if over and always:
                    act()
                if over or len(data) <= room:
                    return real(data)
                over.append(True)
                real(data[:room])
                file.flush()
                act()
                real(data[room:])
                return len(data)

            file.write = write
        return file

    rundir.open = open_broken  # found before the builtin


def make_read_only(out: Path) -> None:
    """What a file system does to a run when it is mounted read-only: nothing in `out` can be written any more."""
    out.chmod(0o555)
    if os.geteuid() == 0:  # who may write anywhere
        os.seteuid(NOBODY)


def break_process(fault: Fault, left: float, out: Path) -> None:
    """Arrange that `fault` will strike this process; `left`: how much of the run is still to do, as a share."""
    kind = KINDS[fault.kind]
    owner, name, passes = PLACES[kind.place]
    number, share = divmod(fault.moment * left * passes, 1)
    act = partial(make_read_only, out) if kind.what == "read-only" else action(kind.what)
    always = kind.what.endswith("always")
    if name is None:
        break_writes(owner, int(number), always, act)
    else:
        break_calls(owner, name, int(number), kind.what.startswith("SIG") and share > 0.5, always, act)


def spoil_losses(steps: tuple) -> None:
    """Make the training loss of these steps NaN."""
    lr_at, forward, now = train.lr_at, GPT.forward, []

    def lr_at_and_note(step, *args):
        now[:] = [step]
        return lr_at(step, *args)

    def forward_or_nan(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        return logits, loss * math.nan if self.training and now[0] in steps else loss

    train.lr_at, GPT.forward = lr_at_and_note, forward_or_nan


def spoil_batches(steps: tuple) -> None:
    """Give these batches wrong targets."""
    batch = Dataset.batch

    def batch_or_wrong(self, step, *args):
        x, y = batch(self, step, *args)
        return x, (7 * y + 3) % self.meta["vocab_size"] if step in steps else y

    Dataset.batch = batch_or_wrong


def process(rank: int, command: Command, out: Path, dataset: Path, fault: Fault | None, left: float, port: int):
    """train.py in this forked process, which is one of `command.processes`."""
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM):  # whatever this process inherited
        signal.signal(signum, signal.SIG_DFL)
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    torch.set_num_threads(1)
    rundir.draw_loss = time.sleep = lambda *_: None  # no waiting for a picture, nor before a second attempt to write
    sys.argv = ["train.py", *flags(out_dir=out, dataset=dataset, **LONG | command.flags)]
    if command.processes > 1:
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        here = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=command.processes) | where
        os.environ |= {name: str(value) for name, value in here.items()}
    if command.bad_losses:
        spoil_losses(command.bad_losses)
    spoil_batches(command.bad_batches)
    if fault and fault.rank == rank and KINDS[fault.kind].place in PLACES:
        break_process(fault, left, out)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runtime.end_with(train.main)


# --------------------------------------------------------------------------------------------------- from outside


def ended(started, deadline: float) -> int | None:
    """Exit code of a process, or None if it still runs at `deadline` (monotonic time)."""
    wait_s = max(0.0, deadline - time.monotonic())
    if isinstance(started, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            started.wait(wait_s)
        return started.poll()
    started.join(wait_s)
    return started.exitcode


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pids_of(out: Path, rank: int | None = None) -> list:
    """Processes whose command line names this run directory; with `rank`, only that rank of torchrun's. Linux."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            mine = f"--out_dir={out}\0".encode() in (folder / "cmdline").read_bytes()
            if mine and (rank is None or f"\0RANK={rank}\0".encode() in (folder / "environ").read_bytes()):
                found.append(int(folder.name))
    return found


def kill(pids, signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def rows(out: Path) -> list:
    """The whole rows of metrics.jsonl, which may end in a part of one."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rewrite(path: Path, change) -> None:
    """Change the bytes of a file in place, as a bad disk would: hard links of it change too."""
    raw = change(path.read_bytes())
    with open(path, "r+b") as f:
        f.truncate(len(raw))
        f.write(raw)


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


# what a damaged file holds; `moment` says where
DAMAGES = {
    "truncated": lambda raw, moment: raw[: int(moment * len(raw))],
    "flipped": lambda raw, moment: flipped(raw, int(moment * len(raw) * 8)),
    "zeroed": lambda raw, moment: raw[: (at := int(moment * len(raw)))] + bytes(4096) + raw[at + 4096 :],
    "data truncated": lambda raw, moment: raw[: len(raw) // 4],
    "data missing": lambda raw, moment: b"",
}


# --------------------------------------------------------------------------------------------------- what must hold


class Outcome(NamedTuple):
    """What one fault did. `struck`: whether it came before the run's end; a list of what should not have been."""

    fault: Fault
    struck: bool
    codes: tuple
    wrong: tuple = ()  # (column of the table, what)


COLUMNS = ("ended badly", "checkpoint lost", "goes on differently", "hang")
ONE_LINE = r"(\[rank \d\] )?error: [^\n]+\n"  # a process's message
WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(  .*\n)?", re.MULTILINE)
WORDS = {  # of the message, where a fault has one
    "ENOSPC always": "No space left",
    "EIO always": "Input/output error",
    "read-only": "Permission denied",
    "data truncated": r"became shorter|has 10000 bytes",
    "data missing": "train.bin has 0 bytes",
}
LOST = "lost or never met the other processes"


class Trial:
    """A run of `command` that gets through faults. `reference`: the Trial of the same command that nothing disturbed;
    None for that one itself."""

    def __init__(self, folder: Path, command: Command, dataset: Path, reference=None):
        self.folder, self.command, self.reference = folder, command, reference
        folder.mkdir(parents=True)
        self.dataset, self.lap = shutil.copytree(dataset, folder / dataset.name), 0
        if not reference:
            self.measure()

    @property
    def out(self) -> Path:
        """The run directory: a new one after each time that the run came to its end."""
        return self.folder / f"run{self.lap}"

    def measure(self) -> None:
        """Run to the end, noting how long that takes."""
        FORKSERVER.Process(target=int).start()  # the server first
        begun, self.startup_s = time.monotonic(), 0.0
        started = self.start(None)
        while not (self.out / "metrics.jsonl").exists() and started[0].is_alive():
            time.sleep(0.001)
        self.startup_s = time.monotonic() - begun
        codes = [ended(p, begun + 4 * LIMIT_S) for p in started]
        self.life_s = time.monotonic() - begun
        assert set(codes) == {0}, (codes, self.said())

    def start(self, fault: Fault | None) -> list:
        """The processes of one start; torchrun is one."""
        self.begun = self.out
        for said in itertools.product(("out", "err"), self.ranks):
            Path("{}.{}{}".format(self.out, *said)).unlink(missing_ok=True)
        launcher = KINDS[fault.kind].launcher if fault else "fork"
        if launcher != "fork":
            n = self.command.processes
            module = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
            argv = [sys.executable, *(module if launcher == "torchrun" else []), str(ROOT / "train.py")]
            argv += flags(out_dir=self.out, dataset=self.dataset, **LONG | self.command.flags)
            with open(f"{self.out}.out0", "w") as out, open(f"{self.out}.err0", "w") as err:
                env = os.environ | {"OMP_NUM_THREADS": "1"}
                how = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, cwd=ROOT)
                # what it inherited may be to ignore Ctrl-C
                restore = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
                return [subprocess.Popen(argv, env=env, preexec_fn=restore, **how)]
        port = free_port()
        args = [(r, self.command, self.out, self.dataset, fault, self.left(), port) for r in self.ranks]
        started = [FORKSERVER.Process(target=process, args=a) for a in args]
        for p in started:
            p.start()
        return started

    @property
    def ranks(self) -> range:
        return range(self.command.processes)

    def left(self) -> float:
        """How much of the run is still to do, as a share."""
        return 1 - self.saved_step() / STEPS

    def saved_step(self) -> int:
        """The step of the checkpoint that a start would go on from, 0 without one. ValueError from load_latest."""
        found = rundir.load_latest(self.out, lambda message: None)
        return found["step"] if found else 0

    def said(self) -> tuple:
        """(stdout, stderr) of all processes of the last start, without warnings of torch to programmers."""
        out, err = (
            "".join(p.read_text() for r in self.ranks if (p := Path(f"{self.begun}.{name}{r}")).exists())
            for name in ("out", "err")
        )
        return out, WARNING.sub("", err)

    # ------------------------------------------------------------------------------------------------- one fault

    def strike(self, fault: Fault) -> Outcome:
        """Start the run, let `fault` happen, and look at what is left. Where the run came to its end, the next start
        is another lap in a new folder."""
        kind, data = KINDS[fault.kind], self.dataset / "train.bin"
        whole, problems = data.read_bytes(), []
        floor = self.saved_step()
        if kind.place == "between":
            last, prev = self.out / "last.pt", self.out / "prev.pt"
            if not prev.exists() or prev.samefile(last):  # no second file yet, or none after a kill between renames
                problems += self.strike(Fault("SIGTERM, forward", 0.5)).wrong
                if last.parent != self.out:  # it came to its end
                    return Outcome(fault, False, (), tuple(problems))
            floor = load(prev)["step"]
            target = data if kind.what.startswith("data") else last
            rewrite(target, partial(DAMAGES[kind.what], moment=fault.moment))
        begun = time.monotonic()
        started = self.start(fault)
        if kind.place in ("clock", "start-up", "seen"):
            self.strike_from_outside(fault, started, begun)
        deadline = time.monotonic() + LIMIT_S
        codes = tuple(ended(p, deadline) for p in started)
        if None in codes or self.left_behind(started):
            self.end(started)
            problems.append(("hang", f"exit codes {codes}, {self.said()[1]}"))
        data.write_bytes(whole)
        if self.out.exists():
            self.out.chmod(0o755)
        problems += self.look(fault, codes, floor)
        struck = set(codes) != {0} or kind.what.endswith("once") or kind.place == "between"
        if set(codes) == {0}:
            problems += self.compare()
            self.lap += 1
        return Outcome(fault, struck, codes, tuple(problems))

    def strike_from_outside(self, fault: Fault, started: list, begun: float) -> None:
        kind, reference = KINDS[fault.kind], self.reference
        first = {"fork": 0.0, "python": 2.0, "torchrun": 3.0}[kind.launcher] + reference.startup_s
        last = first if kind.place == "start-up" else first + self.left() * (reference.life_s - reference.startup_s)
        if kind.place == "seen":
            self.wait_for_tmp(started, 1 + int(fault.moment * 40))
        else:
            wait_s = begun + fault.moment * last - time.monotonic()
            if wait_s > 0:
                ended(started[0], time.monotonic() + wait_s)
        if kind.what == "data truncated":
            return rewrite(self.dataset / "train.bin", partial(DAMAGES[kind.what], moment=0))
        pids = [p.pid for p in started if ended(p, 0) is None]
        if kind.launcher == "torchrun" and kind.ranks != "launcher":
            pids = pids_of(self.out, None if kind.ranks == "all" else fault.rank)
        elif kind.ranks == "one" and kind.launcher == "fork":
            pids = [p.pid for p in started[fault.rank : fault.rank + 1] if ended(p, 0) is None]
        for name in kind.what.split():
            kill(pids, signal.Signals[name])
            time.sleep(fault.moment * 0.01 if " " in kind.what else 0)  # between two

    def wait_for_tmp(self, started: list, times: int) -> None:
        """Return when a temporary file has been seen so many times in the run directory, or at the run's end."""
        seen = 0
        while seen < times and started[0].is_alive():
            with suppress(FileNotFoundError):
                seen += any(name.endswith(".tmp") for name in os.listdir(self.out))
            time.sleep(0.0002)

    def left_behind(self, started: list, patience_s: float = 10.0) -> list:
        """Processes of this run that are still there."""
        deadline = time.monotonic() + patience_s
        while (alive := [p.pid for p in started if ended(p, 0) is None] + pids_of(self.out)) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return alive

    def end(self, started: list) -> None:
        """Kill what does not end, after it has said on stderr where it is."""
        if not isinstance(started[0], subprocess.Popen):
            kill([p.pid for p in started if ended(p, 0) is None], signal.SIGUSR1)
            time.sleep(1)
        kill({*(p.pid for p in started if ended(p, 0) is None), *pids_of(self.out)}, signal.SIGKILL)
        for p in started:
            ended(p, time.monotonic() + LIMIT_S)

    # ------------------------------------------------------------------------------------------------- what is left

    def look(self, fault: Fault, codes: tuple, floor: int) -> list:
        """What is wrong after a fault."""
        wrong = [("ended badly", why) for why in self.look_at_end(fault, codes)]
        try:
            step = self.saved_step()
        except ValueError as e:
            return [*wrong, ("checkpoint lost", str(e))]
        found = rows(self.out)
        if KINDS[fault.kind].place != "between":
            floor = max(floor, self.due(found, codes))
        if step < floor:
            wrong.append(("checkpoint lost", f"step {step} where {floor} was expected"))
        if self.reference and not self.command.bad_batches:  # or a row may be of a step that is made again
            expected = {row["step"]: row for row in rows(self.reference.out)}
            differ = [row["step"] for row in found if bare(row) != bare(expected[row["step"]])]
            if differ:
                wrong.append(("goes on differently", f"rows {differ[:5]}"))
        return wrong

    def due(self, found: list, codes: tuple) -> int:
        """The step of which there must be a checkpoint, given the rows of metrics.jsonl: a row is written before the
        checkpoint of its step is begun, and that only when the one before is on the disk. A run that was asked to stop
        saves where it stops."""
        last = found[-1]["step"] if found else 0
        if set(codes) <= {0, 128 + signal.SIGTERM}:
            return last
        begun = [s for s in range(last) if s % EVAL == 0 or s % SAVE == 0]
        return begun[-2] if len(begun) > 1 else 0

    def look_at_end(self, fault: Fault, codes: tuple) -> list:
        """Whether the processes ended as they should, with what they said."""
        kind, (out, err) = KINDS[fault.kind], self.said()
        if set(codes) == {0}:  # it came too late, or was to be survived
            return [] if err == "" and kind.what != "data missing" else [f"exit code 0, {err!r}"]
        if kind.launcher == "torchrun":
            return [] if 0 not in codes else [f"exit codes {codes}: {err[-500:]}"]
        if not kind.what.startswith("SIG"):
            words = re.search(WORDS.get(kind.what, "no message was expected"), err)
            lines = re.fullmatch(f"({ONE_LINE}){{{codes.count(1)}}}", err)  # another process may have ended before
            return [] if {1} <= set(codes) <= {0, 1} and lines and words else [f"exit codes {codes}, {err[-500:]!r}"]
        signums = [signal.Signals[name] for name in kind.what.split()]
        allowed = {-s for s in signums} | {128 + s for s in signums if s != signal.SIGKILL}
        running = "\ncompile " in out and "\ndone at " not in out and "\nstopped at " not in out
        if running and signal.SIGKILL not in signums:  # where the run itself answers
            allowed = {128 + s for s in signums}
        if not out:  # before train.py began
            allowed |= {1}
        struck, others = codes[fault.rank], [code for r, code in enumerate(codes) if r != fault.rank]
        if kind.ranks == "all":
            return [] if set(codes) <= allowed else [f"exit codes {codes}"]
        wrong = [] if struck in allowed else [f"exit code {struck}, {err[-500:]!r}"]
        for code in others:  # stopped too, or at the end already, or alone
            stopped = set() if signal.SIGKILL in signums else {143}  # says a rank that was not asked itself
            alone = code == 1 and LOST in err and not (running and stopped)
            if code not in {0} | stopped and not alone:
                wrong.append(f"the other's exit code {code}, {err[-500:]!r}")
        if "Traceback" in err and -signal.SIGINT not in codes:
            wrong.append(err[-500:])
        return wrong

    def compare(self) -> list:
        """After the end of the run: whether it is the one that nothing disturbed."""
        if not self.reference:
            return []
        try:
            assert_same_run(self.out, self.reference.out)
            ours, theirs = ({p.name for p in run.out.glob("*.pt")} for run in (self, self.reference))
            assert ours == theirs, f"{ours} instead of {theirs}"
            for name in ours - {"prev.pt"}:  # which holds the last but one, wherever that was made
                assert different(load(self.out / name)["model"], load(self.reference.out / name)["model"]) == [], name
        except AssertionError as e:
            line = traceback.extract_tb(e.__traceback__)[-1].line
            return [("goes on differently", " ".join(f"{line}: {e}".split())[:300])]
        return []

    def finish(self) -> list:
        """Start once more without a fault, to the end; what is wrong then."""
        started = self.start(None)
        codes = tuple(ended(p, time.monotonic() + 4 * LIMIT_S) for p in started)
        if None in codes:
            self.end(started)
            return [("hang", f"exit codes {codes}")]
        wrong = [] if set(codes) == {0} else [("ended badly", f"exit codes {codes}, {self.said()[1][-500:]}")]
        wrong += wrong or self.compare()
        self.lap += 1
        return wrong


def bare(row: dict) -> dict:
    """A row without what depends on the machine."""
    return {k: v for k, v in row.items() if k not in ("tokens_per_s", "peak_mem_bytes", "mfu")}
