"""Faults: what can strike a tiny run, where and when, and how a process is prepared for it.

A `Fault` says what strikes, where and when; KINDS has all kinds. trials.py makes them strike, and checks what is left.
"""

import errno
import math
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

import nanodnt.files
import nanodnt.run.directory
from model import GPT
from nanodnt.data.windows import PreparedText
from support.processes import call_main
from support.runs import flags
from support.strikes import ALWAYS, at_call, steps_noted

NOBODY = 65534  # the id of a user that may write nothing
FOR_GOOD = ExitStack()  # of patches, until the process ends


# ------------------------------------------------------------------------------------------------ what is disturbed


class Command(NamedTuple):
    """A run: its flags, the number of processes, the steps (from 0) whose loss is made NaN, and the batches (from 0)
    whose loss is made to spike."""

    flags: dict
    processes: int = 1
    bad_losses: tuple = ()
    bad_batches: tuple = ()


STEPS, EVAL, SAVE = 40, 10, 7
LONG = dict(max_iters=STEPS, eval_interval=EVAL, save_interval=SAVE, keep_every=2 * EVAL)
LONG |= dict(init_from="auto", timeout_s=15)
SHARDED = dict(parallel="fsdp", checkpoint_format="sharded")
COMMANDS = {
    "adamw, dropout": Command(dict(dropout=0.2, micro_batch_size=4)),
    "msgdw, skipped steps": Command(dict(optimizer="msgdw", learning_rate=0.5), bad_losses=(15, 16, 28)),
    "muon, blockwise": Command(dict(optimizer="muon", dropout=0.1, blockwise_lr=True, learning_rate=5e-3)),
    "adam_mini, wsd": Command(dict(optimizer="adam_mini", schedule="wsd", mlp="swiglu")),
    "adamw, a spike": Command(dict(dropout=0.2, loss_spike=1.0), bad_batches=(22,)),
    "two processes": Command(dict(dropout=0.2, micro_batch_size=2), processes=2),
    "two processes, shards": Command(dict(SHARDED, dropout=0.1), processes=2),
    "three processes, shards": Command(dict(SHARDED, batch_size=12, optimizer="msgdw", learning_rate=0.5), processes=3),
    "two processes, muon": Command(dict(optimizer="muon"), processes=2, bad_losses=(25,)),
}


# ---------------------------------------------------------------------------------------------------- what goes wrong


class Fault(NamedTuple):
    """One thing that goes wrong."""

    kind: str  # a row of KINDS
    moment: float  # when, as a fraction of the rest of the run: 0 at once, 1 at its end
    rank: int = 0  # the process that it strikes


class Kind(NamedTuple):
    """What strikes, and where."""

    what: str  # names of signals, or an error's name with "once" or "always", or a key of DAMAGES
    place: str  # a key of PLACES (inside the process), "clock" or "seen" (from outside), "start-up", "between" (starts)
    launcher: str = "fork"  # fork, python, torchrun
    ranks: str = "one"  # which processes it strikes: one, all, launcher
    weight: float = 1.0  # how often soak.py draws it


# Inside a process: where a fault strikes, and about how often a run of STEPS comes there.
PLACES = {
    "forward": (GPT, "forward", 50),
    "backward": (torch.Tensor, "backward", 40),
    "update": (torch.amp.GradScaler, "update", 40),
    "evaluation": (PreparedText, "val_batch", 10),
    "fsync": (os, "fsync", 54),
    "link": (os, "link", 16),
    "rename": (os, "replace", 38),
    "checkpoint": ("wb", None, 2_700_000),  # bytes of all files that are written at once
    "row": ("ab", None, 18_000),  # bytes appended to metrics.jsonl
}
KINDS = {
    "SIGKILL, any moment": Kind("SIGKILL", "clock", weight=6),
    "SIGTERM, any moment": Kind("SIGTERM", "clock", weight=3),
    "SIGINT, any moment": Kind("SIGINT", "clock", weight=3),
    "SIGINT twice, any moment": Kind("SIGINT SIGINT", "clock", weight=2),
    "SIGHUP, any moment": Kind("SIGHUP", "clock"),
    "SIGUSR1, any moment": Kind("SIGUSR1", "clock"),
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
    """Whether a kind of fault is for this command. A spike sends the run back to its last checkpoint. So that this is
    the same one as in the run that nothing disturbed, only faults that save none are for a command with spikes."""
    if command.bad_batches and KINDS[kind].what != "SIGKILL":
        return False
    if kind.startswith(("two processes", "torchrun")):
        return command.processes == 2 and not (kind.startswith("torchrun") and command.bad_losses)
    needs_fork = command.bad_losses or command.bad_batches
    return not (kind.startswith("python") and (command.processes > 1 or needs_fork))


def draw(random: Random, command: Command, kinds=None) -> Fault:
    """A fault for this command: its kind (one of `kinds`), its moment, and the process that it strikes."""
    allowed = [kind for kind in kinds or KINDS if suits(kind, command)]
    kind = random.choices(allowed, [KINDS[kind].weight for kind in allowed])[0]
    everywhere = KINDS[kind].place in ("clock", "start-up", "forward", "backward", "update")  # all ranks come there
    return Fault(kind, random.random(), random.randrange(command.processes) if everywhere else 0)


def rewrite(path: Path, change) -> None:
    """Change the bytes of a file in place, as a bad disk would: hard links of it change too."""
    raw = change(path.read_bytes())
    with open(path, "r+b") as f:
        f.truncate(len(raw))
        f.write(raw)


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


# {damage: the content of the damaged file}; `moment` says where in the file
DAMAGES = {
    "truncated": lambda raw, moment: raw[: int(moment * len(raw))],
    "flipped": lambda raw, moment: flipped(raw, int(moment * len(raw) * 8)),
    "zeroed": lambda raw, moment: raw[: (at := int(moment * len(raw)))] + bytes(4096) + raw[at + 4096 :],
    "data truncated": lambda raw, moment: raw[: len(raw) // 4],
    "data missing": lambda raw, moment: b"",
}


# -------------------------------------------------------------------------------------------- inside the process


def action(what: str):
    """A function that sends this process signals, or raises an error of the system."""
    if what.startswith("SIG"):
        return lambda: [os.kill(os.getpid(), signal.Signals[name]) for name in what.split()]
    code = getattr(errno, what.split()[0])

    def fail():
        raise OSError(code, os.strerror(code))

    return fail


def break_writes(mode: str, number: int, always: bool, act) -> None:
    """Do `act()` when the run has written `number` bytes to files opened with `mode`; `always`: at each later write."""
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

    for module in (nanodnt.files, nanodnt.run.directory):
        module.open = open_broken  # found before the builtin


def make_read_only(out: Path) -> None:
    """Nothing in `out` can be written any more, as on a file system that is mounted read-only."""
    out.mkdir(exist_ok=True)  # validation batches are read before the run makes it
    out.chmod(0o555)
    if os.geteuid() == 0:  # root may write anywhere
        os.seteuid(NOBODY)


def break_process(fault: Fault, left: float, out: Path) -> None:
    """Prepare this process for `fault`. `left`: the rest of the run, as a fraction."""
    kind = KINDS[fault.kind]
    owner, name, passes = PLACES[kind.place]
    number, fraction = divmod(fault.moment * left * passes, 1)
    act = partial(make_read_only, out) if kind.what == "read-only" else action(kind.what)
    always = kind.what.endswith("always")
    if name is None:
        break_writes(owner, int(number), always, act)
    else:
        how = dict(times=ALWAYS if always else 1, after=kind.what.startswith("SIG") and fraction > 0.5)
        FOR_GOOD.enter_context(at_call(owner, name, int(number) + 1, lambda *_: act(), **how))


def spoil_losses(steps: tuple) -> None:
    """Make the training loss of these steps NaN."""
    forward, now = GPT.forward, []

    def forward_or_nan(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        return logits, loss * math.nan if self.training and now[0] in steps else loss

    GPT.forward = forward_or_nan
    FOR_GOOD.enter_context(steps_noted(now))


def spoil_batches(steps: tuple) -> None:
    """Give these batches wrong targets."""
    batch = PreparedText.batch

    def batch_or_wrong(self, step, *args):
        x, y = batch(self, step, *args)
        return x, (7 * y + 3) % self.meta["vocab_size"] if step in steps else y

    PreparedText.batch = batch_or_wrong


def train_here(rank: int, command: Command, out: Path, dataset: Path, fault: Fault | None, left: float, port: int):
    """train.py in this forked process, one of `command.processes`."""
    time.sleep = lambda *_: None  # no pause before a write is retried
    if command.processes > 1:
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        here = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=command.processes) | where
        os.environ |= {name: str(value) for name, value in here.items()}
    if command.bad_losses:
        spoil_losses(command.bad_losses)
    spoil_batches(command.bad_batches)
    if fault and fault.rank == rank and KINDS[fault.kind].place in PLACES:
        break_process(fault, left, out)
    call_main("train", *flags(out_dir=out, dataset=dataset, **LONG | command.flags))
