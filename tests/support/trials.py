"""Tiny runs in processes of their own, struck by faults at chosen or random moments, and what must hold then.

A `Trial` is one run that is struck again and again, and each time started again by the same command, until it ends.
After every fault it checks the exit codes, the output, the checkpoints and the logged rows; at the end, that the run is
bit by bit the one that nothing disturbed. test_faults.py makes a few trials, soak.py hundreds.

Processes are forked from one that has imported torch, and run train.py's main. Kinds of fault with "python" or
"torchrun" in their name start a new interpreter instead.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nanodnt.run.checkpoints import load_latest
from support.faults import DAMAGES, EVAL, KINDS, LONG, SAVE, STEPS, Command, Fault, rewrite, train_here
from support.processes import FORKSERVER, Forked, start, torchrun
from support.runs import assert_same_run, bare, different, load

# A process that has not ended by then hangs. Where another dies just as they connect, gloo waits 5 times timeout_s.
LIMIT_S = 6 * LONG["timeout_s"]


def ended(started: list, deadline: float) -> tuple:
    """Exit codes of processes, None for one that still runs at `deadline` (monotonic time)."""
    for p in started:
        with suppress(subprocess.TimeoutExpired):
            p.wait(max(0.0, deadline - time.monotonic()))
    return tuple(p.poll() for p in started)


def alive(started: list) -> list:
    """Ids of those processes that still run."""
    return [p.pid for p in started if p.poll() is None]


def pids_of(out: Path, rank: int | None = None) -> list:
    """Processes whose command line names this run directory; with `rank`, only that rank of torchrun's. Linux only."""
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
    """The complete rows of metrics.jsonl; a last one cut short is left out."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Outcome(NamedTuple):
    """What one fault did."""

    fault: Fault
    struck: bool  # whether it came before the end of the run
    codes: tuple  # exit codes of the processes
    wrong: tuple = ()  # what should not have happened: (one of COLUMNS, description)


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
NOTHING_TO_SAVE = "nothing to save"  # of a process that a signal ends before its first step


class Trial:
    """A run of `command` that is struck by faults. `reference`: the Trial of the same command that nothing disturbed;
    None for the reference itself."""

    def __init__(self, folder: Path, command: Command, dataset: Path, reference=None):
        self.folder, self.command, self.reference = folder, command, reference
        folder.mkdir(parents=True)
        self.dataset, self.ended_runs = shutil.copytree(dataset, folder / dataset.name), 0
        if not reference:
            self.measure()

    @property
    def out(self) -> Path:
        """The run directory. A new one each time that the run has come to its end."""
        return self.folder / f"run{self.ended_runs}"

    def measure(self) -> None:
        """Run to the end, and measure how long that takes."""
        FORKSERVER.Process(target=int).start()  # the server first
        begun, self.startup_s = time.monotonic(), 0.0
        started = self.start(None)
        while not (self.out / "metrics.jsonl").exists() and alive(started[:1]):
            assert time.monotonic() < begun + LIMIT_S, f"the run does not begin: {self.output()}"
            time.sleep(0.001)
        self.startup_s = time.monotonic() - begun
        codes = ended(started, begun + 4 * LIMIT_S)
        self.life_s = time.monotonic() - begun
        assert set(codes) == {0}, (codes, self.output())

    def start(self, fault: Fault | None) -> list:
        """Start the run; its processes, of which torchrun is one."""
        self.begun = self.out
        for path in self.folder.glob(f"{self.out.name}.[0-9].*"):
            path.unlink()
        launcher = KINDS[fault.kind].launcher if fault else "fork"
        if launcher != "fork":
            module = torchrun(self.command.processes) if launcher == "torchrun" else ()
            config = dict(out_dir=self.out, dataset=self.dataset, **LONG | self.command.flags)
            with (
                open(f"{self.out}.0.out", "w", encoding="utf-8") as out,
                open(f"{self.out}.0.err", "w", encoding="utf-8") as err,
            ):
                return [start(*module, out=out, err=err, **config)]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]  # that nobody listens on now
        rest = self.command, self.out, self.dataset, fault, self.left(), port
        return [Forked(f"{self.out}.{rank}", train_here, rank, *rest) for rank in self.ranks]

    @property
    def ranks(self) -> range:
        return range(self.command.processes)

    def left(self) -> float:
        """The rest of the run, as a fraction."""
        return 1 - self.saved_step() / STEPS

    def saved_step(self) -> int:
        """The step that the next start will resume from, 0 without a checkpoint. ValueError where none can be read."""
        found = load_latest(self.out, lambda message: None)
        return found["step"] if found else 0

    def output(self) -> tuple:
        """(stdout, stderr) of all processes of the last start, without torch's warnings to programmers."""
        out, err = (
            "".join(path.read_text() for path in sorted(self.folder.glob(f"{self.begun.name}.[0-9].{name}")))
            for name in ("out", "err")
        )
        return out, WARNING.sub("", err)

    def strike(self, fault: Fault) -> Outcome:
        """Start the run, let `fault` happen, and check what it leaves. If the run comes to its end, the next start is
        a new run in a new folder."""
        kind, data = KINDS[fault.kind], self.dataset / "train.bin"
        content, problems = data.read_bytes(), []
        floor = self.saved_step()
        if kind.place == "between":
            last, prev = self.out / "last.pt", self.out / "prev.pt"
            if not prev.exists() or prev.samefile(last):  # a second file is needed; there may be none after a kill
                problems += self.strike(Fault("SIGTERM, forward", 0.5)).wrong
                if last.parent != self.out:  # the run came to its end
                    return Outcome(fault, False, (), tuple(problems))
            floor = load(prev)["step"]
            target = data if kind.what.startswith("data") else last
            rewrite(target, partial(DAMAGES[kind.what], moment=fault.moment))
        begun = time.monotonic()
        started = self.start(fault)
        if kind.place in ("clock", "start-up", "seen"):
            self.strike_from_outside(fault, started, begun)
        codes = ended(started, time.monotonic() + LIMIT_S)
        if None in codes or self.left_behind(started):
            self.end(started)
            problems.append(("hang", f"exit codes {codes}, {self.output()[1]}"))
        data.write_bytes(content)
        if self.out.exists():
            self.out.chmod(0o755)
        problems += self.inspect(fault, codes, floor)
        struck = set(codes) != {0} or kind.what.endswith("once") or kind.place == "between"
        if set(codes) == {0}:
            problems += self.compare()
            self.ended_runs += 1
        return Outcome(fault, struck, codes, tuple(problems))

    def strike_from_outside(self, fault: Fault, started: list, begun: float) -> None:
        """Wait for the moment of `fault`, and send its signals or truncate the data."""
        kind, reference = KINDS[fault.kind], self.reference
        first = {"fork": 0.0, "python": 2.0, "torchrun": 3.0}[kind.launcher] + reference.startup_s
        last = first if kind.place == "start-up" else first + self.left() * (reference.life_s - reference.startup_s)
        if kind.place == "seen":
            self.wait_for_tmp(started, 1 + int(fault.moment * 40))
        else:
            wait_s = begun + fault.moment * last - time.monotonic()
            if wait_s > 0:
                ended(started[:1], time.monotonic() + wait_s)
        if kind.what == "data truncated":
            return rewrite(self.dataset / "train.bin", partial(DAMAGES[kind.what], moment=0))
        pids = alive(started)
        if kind.launcher == "torchrun" and kind.ranks != "launcher":
            pids = pids_of(self.out, None if kind.ranks == "all" else fault.rank)
        elif kind.ranks == "one" and kind.launcher == "fork":
            pids = alive(started[fault.rank : fault.rank + 1])
        for name in kind.what.split():
            kill(pids, signal.Signals[name])
            time.sleep(fault.moment * 0.01 if " " in kind.what else 0)  # between two signals

    def wait_for_tmp(self, started: list, times: int) -> None:
        """Return when a temporary file has been seen so many times in the run directory, or when the run has ended."""
        seen, deadline = 0, time.monotonic() + LIMIT_S
        while seen < times and alive(started[:1]) and time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                seen += any(name.endswith(".tmp") for name in os.listdir(self.out))
            time.sleep(0.0002)

    def left_behind(self, started: list, patience_s: float = 10.0) -> list:
        """Ids of this run's processes that have not ended after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while (left := alive(started) + pids_of(self.out)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def end(self, started: list) -> None:
        """Kill what does not end, after it has printed on stderr where it is."""
        if not isinstance(started[0], subprocess.Popen):
            kill(alive(started), signal.SIGQUIT)
            time.sleep(1)
        kill({*alive(started), *pids_of(self.out)}, signal.SIGKILL)
        ended(started, time.monotonic() + LIMIT_S)

    def inspect(self, fault: Fault, codes: tuple, floor: int) -> list:
        """What is wrong after a fault. `floor`: the step that the checkpoint must have reached."""
        wrong = [("ended badly", why) for why in self.inspect_end(fault, codes)]
        try:
            step = self.saved_step()
        except ValueError as e:
            return [*wrong, ("checkpoint lost", str(e))]
        found = rows(self.out)
        if KINDS[fault.kind].place != "between":
            floor = max(floor, self.due(found, codes))
        if step < floor:
            wrong.append(("checkpoint lost", f"step {step} where {floor} was expected"))
        if self.reference and not self.command.bad_batches:  # after a spike, steps are made again on other batches
            expected = {row["step"]: row for row in rows(self.reference.out)}
            differ = [row["step"] for row in found if bare(row) != bare(expected[row["step"]])]
            if differ:
                wrong.append(("goes on differently", f"rows {differ[:5]}"))
        return wrong

    def due(self, found: list, codes: tuple) -> int:
        """The step that the checkpoint must have reached, given the rows of metrics.jsonl. The row of a step is written
        before its checkpoint is begun, and a checkpoint is begun when the one before is on disk. A run that is asked to
        stop saves where it stops, unless it has made no step: then the rows are those of a start before."""
        last = found[-1]["step"] if found else 0
        if set(codes) <= {0, 128 + signal.SIGTERM} and NOTHING_TO_SAVE not in self.output()[1]:
            return last
        begun = [s for s in range(last) if s % EVAL == 0 or s % SAVE == 0]
        return begun[-2] if len(begun) > 1 else 0

    def inspect_end(self, fault: Fault, codes: tuple) -> list:
        """What is wrong with how the processes ended, and with their output."""
        kind, (out, err) = KINDS[fault.kind], self.output()
        if set(codes) == {0}:  # the fault came too late, or the run must survive it
            return [] if err == "" and kind.what != "data missing" else [f"exit code 0, {err!r}"]
        if kind.launcher == "torchrun":
            return [] if 0 not in codes else [f"exit codes {codes}: {err[-500:]}"]
        if not kind.what.startswith("SIG"):
            words = re.search(WORDS.get(kind.what, "no message was expected"), err)
            lines = re.fullmatch(f"({ONE_LINE}){{{codes.count(1)}}}", err)  # another process may have ended earlier
            return [] if {1} <= set(codes) <= {0, 1} and lines and words else [f"exit codes {codes}, {err[-500:]!r}"]
        signums = [signal.Signals[name] for name in kind.what.split()]
        allowed = {-s for s in signums} | {128 + s for s in signums if s != signal.SIGKILL}
        running = "\ncompile " in out and "\ndone at " not in out and "\nstopped at " not in out
        if running and signal.SIGKILL not in signums:  # the run itself handles the signal
            allowed = {128 + s for s in signums}
        if not out:  # before train.py began
            allowed |= {1}
        struck, others = codes[fault.rank], [code for r, code in enumerate(codes) if r != fault.rank]
        if kind.ranks == "all":
            return [] if set(codes) <= allowed else [f"exit codes {codes}"]
        wrong = [] if struck in allowed else [f"exit code {struck}, {err[-500:]!r}"]
        for code in others:  # stopped too, or at the end already, or left alone
            stopped = set() if signal.SIGKILL in signums else {143}  # of a rank that did not get the signal itself
            stops_together = running and stopped and NOTHING_TO_SAVE not in err
            alone = code == 1 and LOST in err and not stops_together
            if code not in {0} | stopped and not alone:
                wrong.append(f"another process's exit code {code}, {err[-500:]!r}")
        if "Traceback" in err and -signal.SIGINT not in codes:
            wrong.append(err[-500:])
        return wrong

    def compare(self) -> list:
        """What differs, at the end of the run, from the one that nothing disturbed."""
        if not self.reference:
            return []
        try:
            assert_same_run(self.out, self.reference.out)
            ours, theirs = ({p.name for p in run.out.glob("*.pt")} for run in (self, self.reference))
            assert ours == theirs, f"{ours} instead of {theirs}"
            for name in ours - {"prev.pt"}:  # that is the last checkpoint but one, which a fault may have moved
                assert different(load(self.out / name)["model"], load(self.reference.out / name)["model"]) == [], name
        except AssertionError as e:
            line = traceback.extract_tb(e.__traceback__)[-1].line
            return [("goes on differently", " ".join(f"{line}: {e}".split())[:300])]
        return []

    def finish(self) -> list:
        """Start once more, without a fault, to the end. What is wrong then."""
        started = self.start(None)
        codes = ended(started, time.monotonic() + 4 * LIMIT_S)
        if None in codes:
            self.end(started)
            return [("hang", f"exit codes {codes}")]
        wrong = [] if set(codes) == {0} else [("ended badly", f"exit codes {codes}, {self.output()[1][-500:]}")]
        wrong += wrong or self.compare()
        self.ended_runs += 1
        return wrong


def strike_all(trial: Trial, todo: list) -> list:
    """The outcomes of all faults. Nothing is wrong after any of them, nor at the end."""
    outcomes = [trial.strike(fault) for fault in todo]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert trial.finish() == []
    return outcomes
