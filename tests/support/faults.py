"""Faults that strike tiny runs of train.py, each in processes of its own, and what must hold then.

A `Trial` is one run that is struck again and again, and each time started again by the same
command, until it ends. After every fault it checks the exit codes, the output, the checkpoints and
the logged rows; at the end, that the run is bit by bit the one that nothing disturbed.
test_faults.py makes a few trials, soak.py hundreds.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

import nanodnt.files
from model import GPT
from nanodnt.data.windows import PreparedText
from nanodnt.run.checkpoints import load_latest
from support.processes import FORKSERVER, Forked, call_main
from support.runs import assert_same_run, bare, different, flags, load
from support.strikes import ALWAYS, at_call

FOR_GOOD = ExitStack()  # of patches, until the process ends


# -------------------------------------------------------------------------------- what is disturbed


class Command(NamedTuple):
    """A run: its flags and the number of processes."""

    flags: dict
    processes: int = 1


STEPS, EVAL, SAVE = 40, 10, 7
LONG = dict(max_iters=STEPS, eval_interval=EVAL, save_interval=SAVE, keep_every=2 * EVAL)
LONG |= dict(init_from="auto", timeout_s=15)
SHARDED = dict(parallel="fsdp", checkpoint_format="sharded")
COMMANDS = {
    "adamw, dropout": Command(dict(dropout=0.2, micro_batch_size=4)),
    "msgdw": Command(dict(optimizer="msgdw", learning_rate=0.5)),
    "muon, blockwise": Command(
        dict(optimizer="muon", dropout=0.1, blockwise_lr=True, learning_rate=5e-3)
    ),
    "adam_mini, wsd": Command(dict(optimizer="adam_mini", schedule="wsd", mlp="swiglu")),
    "two processes": Command(dict(dropout=0.2, micro_batch_size=2), processes=2),
    "two processes, shards": Command(dict(SHARDED, dropout=0.1), processes=2),
    "three processes, shards": Command(
        dict(SHARDED, batch_size=12, optimizer="msgdw", learning_rate=0.5), processes=3
    ),
}
# A process that has not ended by then hangs. Where another dies just as they connect, gloo waits 5
# times timeout_s.
LIMIT_S = 6 * LONG["timeout_s"]


# ---------------------------------------------------------------------------------- what goes wrong


class Fault(NamedTuple):
    """One thing that goes wrong."""

    what: str  # the name of a signal, or of an error of the system, with " once" if it comes once
    #   and not from then on
    place: str  # where: a key of PLACES, inside the process, or "clock", from outside
    moment: float  # when, as a fraction of the rest of the run: 0 at once, 1 at its end
    rank: int | None = 0  # the process that it strikes; None: all


# Inside a process: where a fault strikes, and about how often a run of STEPS comes there.
PLACES = {
    "forward": (GPT, "forward", 50),
    "backward": (torch.Tensor, "backward", 40),
    "update": (torch.amp.GradScaler, "update", 40),
    "evaluation": (PreparedText, "val_batch", 10),
    "fsync": (os, "fsync", 54),
    "link": (os, "link", 16),
    "rename": (os, "replace", 38),
    "checkpoint": (nanodnt.files, None, 2_700_000),  # bytes of all files that are written at once
}
KILLS = [("SIGKILL", place) for place in ("clock", "clock", *PLACES)]
STOPS = [
    (name, place)
    for name in ("SIGTERM", "SIGINT", "SIGHUP")
    for place in ("clock", "forward", "checkpoint")
]
ERRORS = [
    ("ENOSPC", "checkpoint"),
    ("ENOSPC once", "checkpoint"),
    ("EIO", "fsync"),
    ("EIO once", "fsync"),
]
ERRORS += [("EIO", "rename"), ("EIO once", "rename")]


def draw(random: Random, command: Command, kinds: list) -> Fault:
    """A fault of one of these kinds for this command: its moment, and the process that it
    strikes."""
    what, place = random.choice(kinds)
    everywhere = place in ("clock", "forward", "backward", "update")  # all ranks come there
    return Fault(
        what, place, random.random(), random.randrange(command.processes) if everywhere else 0
    )


def action(what: str):
    """A function that sends this process a signal, or raises an error of the system."""
    if what.startswith("SIG"):

        def send(*_):
            os.kill(os.getpid(), signal.Signals[what])
            time.sleep(0.2)  # the thread that answers gets a core before the run goes on

        return send
    code = getattr(errno, what.split()[0])

    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def break_writes(number: int, always: bool, act) -> None:
    """Do `act()` when the run has written `number` bytes to files; `always`: at each later write,
    too."""
    written = [0]

    def open_broken(*args, **kwargs):
        file = open(*args, **kwargs)
        real = file.write

        def write(data):
            room = number - written[0]
            written[0] += len(data)
            if room < 0 and always:
                act()
            if 0 <= room < len(data):
                real(data[:room])
                file.flush()
                act()
                real(data[room:])
            else:
                real(data)
            return len(data)

        file.write = write
        return file

    nanodnt.files.open = open_broken  # found before the builtin


def break_process(fault: Fault, left: float) -> None:
    """Prepare this process for `fault`. `left`: the rest of the run, as a fraction."""
    owner, name, passes = PLACES[fault.place]
    number, fraction = divmod(fault.moment * left * passes, 1)
    always = not fault.what.startswith("SIG") and not fault.what.endswith("once")
    if name is None:
        break_writes(int(number), always, action(fault.what))
    else:
        times = ALWAYS if always else 1
        after = fault.what.startswith("SIG") and fraction > 0.5
        FOR_GOOD.enter_context(
            at_call(owner, name, int(number) + 1, action(fault.what), times=times, after=after)
        )


def train_here(
    rank: int,
    command: Command,
    out: Path,
    dataset: Path,
    fault: Fault | None,
    left: float,
    port: int,
):
    """train.py in this forked process, one of `command.processes`."""
    time.sleep = lambda *_: None  # no pause before a write is retried
    if command.processes > 1:
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        here = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=command.processes) | where
        os.environ |= {name: str(value) for name, value in here.items()}
    if fault and fault.rank in (rank, None) and fault.place in PLACES:
        break_process(fault, left)
    call_main("train", *flags(out_dir=out, dataset=dataset, **LONG | command.flags))


# ------------------------------------------------------------------------------ what must hold then


def ended(started: list, seconds: float) -> tuple:
    """Exit codes of processes, None for one that still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    for process in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return tuple(process.poll() for process in started)


def rows(out: Path) -> list:
    """The complete rows of metrics.jsonl; a last one cut short is left out."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Outcome(NamedTuple):
    """What one fault did."""

    fault: Fault
    codes: tuple  # exit codes of the processes; all 0: it came too late, or the run survived it
    wrong: list  # what should not have happened


class Trial:
    """A run of `command` that is struck by faults. `reference`: the Trial of the same command that
    nothing disturbed; None for the reference itself."""

    def __init__(self, folder: Path, command: Command, dataset: Path, reference=None):
        self.folder = folder
        self.command = command
        self.dataset = dataset
        self.reference = reference
        self.ended_runs = 0
        folder.mkdir(parents=True)
        if not reference:
            FORKSERVER.Process(target=int).start()  # the server first
            begun = time.monotonic()
            codes = ended(self.start(None), 4 * LIMIT_S)
            self.life_s = time.monotonic() - begun
            assert set(codes) == {0}, (codes, self.output())

    @property
    def out(self) -> Path:
        """The run directory. A new one each time that the run has come to its end."""
        return self.folder / f"run{self.ended_runs}"

    def start(self, fault: Fault | None) -> list:
        """Start the run; its processes. What they printed before is gone."""
        for path in self.folder.glob(f"{self.out.name}.[0-9].*"):
            path.unlink()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]  # that nobody listens on now
        rest = self.command, self.out, self.dataset, fault, self.left(), port
        return [
            Forked(f"{self.out}.{rank}", train_here, rank, *rest)
            for rank in range(self.command.processes)
        ]

    def left(self) -> float:
        """The rest of the run, as a fraction."""
        return 1 - self.saved_step() / STEPS

    def saved_step(self) -> int:
        """The step that the next start will resume from, 0 without a checkpoint. ValueError where
        none can be read."""
        found = load_latest(self.out, lambda message: None)
        return found["step"] if found else 0

    def output(self) -> list:
        """[stdout, stderr] of all processes of the last start."""
        found = [
            sorted(self.folder.glob(f"{self.out.name}.[0-9].{name}")) for name in ("out", "err")
        ]
        return ["".join(path.read_text(encoding="utf-8") for path in paths) for paths in found]

    def strike(self, fault: Fault) -> Outcome:
        """Start the run, let `fault` happen, and check what it leaves. If the run comes to its end,
        the next start is a new run in a new folder."""
        floor = self.saved_step()
        started = self.start(fault)
        if fault.place == "clock":
            ended(started[:1], fault.moment * max(0.5, self.left()) * self.reference.life_s)
            for process in started if fault.rank is None else [started[fault.rank]]:
                if process.poll() is None:
                    os.kill(process.pid, signal.Signals[fault.what])
        codes = ended(started, LIMIT_S)
        wrong = self.inspect(fault, codes, floor)
        for process in started:
            process.kill()
        if set(codes) == {0}:
            wrong += self.compare()
            self.ended_runs += 1
        return Outcome(fault, codes, wrong)

    def inspect(self, fault: Fault, codes: tuple, floor: int) -> list:
        """What is wrong after a fault. `floor`: the step that the checkpoint must have reached."""
        wrong = self.inspect_end(fault, codes)
        try:
            step = self.saved_step()
        except ValueError as e:
            return [*wrong, f"checkpoint lost: {e}"]
        found = rows(self.out)
        floor = max(floor, self.due(found, codes))
        if step < floor:
            wrong.append(f"checkpoint lost: step {step} where {floor} was expected")
        if self.reference:
            expected = {row["step"]: bare(row) for row in rows(self.reference.out)}
            differ = [row["step"] for row in found if bare(row) != expected[row["step"]]]
            wrong += [f"goes on differently: rows {differ[:5]}"] * bool(differ)
        return wrong

    def inspect_end(self, fault: Fault, codes: tuple) -> list:
        """What is wrong with how the processes ended, and with their output."""
        out, err = self.output()
        if fault.what.startswith("SIG"):
            number = signal.Signals[fault.what]
            running = "\nstep " in out and "\ndone at " not in out
            handled = running and number != signal.SIGKILL
            allowed = {128 + number} if handled else {-number, 128 + number}
            if not out:  # before train.py began
                allowed.add(1)
            words = ""
        else:
            allowed = {0} if fault.what.endswith("once") else {1}
            words = os.strerror(getattr(errno, fault.what.split()[0]))
        wrong = []
        for rank, code in enumerate(codes):
            struck = fault.rank in (rank, None)
            alone = code in (1, 128 + signal.SIGTERM)  # lost the others, or stopped with them
            if code != 0 and not (code in allowed if struck else alone):
                wrong.append(f"exit code {code} of {rank}: {err[-500:]}")
        if out and "Traceback" in err:
            wrong.append(err[-500:])
        if 1 in codes and words not in err:
            wrong.append(f"without a word of {words}: {err[-500:]}")
        return wrong

    def due(self, found: list, codes: tuple) -> int:
        """The step that the checkpoint must have reached, given the rows of metrics.jsonl. The row
        of a step is written before its checkpoint is begun, and a checkpoint is begun when the one
        before is on disk. A run that is asked to stop saves where it stops, unless it has made no
        step: then the rows are those of a start before."""
        last = found[-1]["step"] if found else 0
        if (
            all(code in (0, 128 + signal.SIGTERM) for code in codes)
            and "nothing to save" not in self.output()[1]
        ):
            return last
        begun = [s for s in range(last) if s % EVAL == 0 or s % SAVE == 0]
        return begun[-2] if len(begun) > 1 else 0

    def compare(self) -> list:
        """What differs, at the end of the run, from the one that nothing disturbed."""
        try:
            assert_same_run(self.out, self.reference.out)
            ours, theirs = (
                {p.name for p in run.out.glob("*.pt")} for run in (self, self.reference)
            )
            assert ours == theirs, f"{ours} instead of {theirs}"
            # that is the last checkpoint but one, which a fault may have moved
            for name in ours - {"prev.pt"}:
                assert (
                    different(
                        load(self.out / name)["model"], load(self.reference.out / name)["model"]
                    )
                    == []
                ), name
        except AssertionError as e:
            return [f"goes on differently: {' '.join(str(e).split())[:300]}"]
        return []

    def finish(self) -> list:
        """Start once more, without a fault, to the end. What is wrong then."""
        codes = ended(self.start(None), 4 * LIMIT_S)
        if set(codes) != {0}:
            return [f"exit codes {codes}: {self.output()[1][-500:]}"]
        wrong = self.compare()
        self.ended_runs += 1
        return wrong


def strike_all(trial: Trial, todo: list) -> list:
    """The exit codes after each of these faults. Nothing is wrong after any of them, nor at the
    end."""
    outcomes = [trial.strike(fault) for fault in todo]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert trial.finish() == []
    return [outcome.codes for outcome in outcomes]
