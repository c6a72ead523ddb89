"""What a run prints: its lines, notes that come last, and what it is doing now.

In a terminal the last line names the present activity, and is drawn again twice a second. In a file
or a pipe there are lines alone, and one names the activity where ten seconds would pass without a
line.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanodnt.tables import duration

TICK_S = 0.5  # seconds between two looks at the present activity
QUIET_S = 9.5  # seconds without a line after which a file gets one: with TICK_S, ten at most
CLEAR = "\r\033[K"  # empties the last line of a terminal


@dataclass
class Activity:
    """Work that takes time."""

    name: str  # "compiling", or with a total "training, step"
    total: int = 0  # number of its parts; 0 = unknown
    done: int = 0  # number of parts that are done
    remark: str = ""  # shown in a terminal, behind the bar; empty = the time since the beginning
    began: float = field(default_factory=time.monotonic)

    @property
    def label(self) -> str:
        return f"{self.name} {self.done}/{self.total}" if self.total else self.name

    @property
    def elapsed(self) -> str:
        seconds = time.monotonic() - self.began
        return f"{seconds:.0f} s" if seconds < 1000 else duration(seconds)


class Console:
    """The standard output of a process. A thread, from `start` until `closed` is set, shows the
    present activity; it computes nothing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while something is written
        self.activities: list[Activity] = []  # those that have begun; the last one is shown
        self.notes: list[str] = []  # lines that `print_notes` will print
        self.is_drawn = False  # whether the last line of the terminal shows an activity
        self.last_line = time.monotonic()  # time of the last line
        self.closed = threading.Event()

    def start(self) -> None:
        """Show activities from now on."""
        threading.Thread(target=self._watch, daemon=True).start()

    def print(self, line: str) -> None:
        """Print a line, in a terminal above the activity."""
        with self.lock:
            clear = CLEAR if self.is_drawn else ""
            self._write(f"{clear}{line}\n")
            self.last_line = time.monotonic()
            if self.is_drawn:
                self._draw(self.activities[-1])

    def print_notes(self) -> None:
        """Print the notes that were made since the last call."""
        for note in self.notes:
            self.print(note)
        self.notes = []

    @contextmanager
    def doing(self, name: str, total: int = 0) -> Iterator[Activity]:
        """Context of an activity. It is shown, except while another one inside it is."""
        activity = Activity(name, total)
        self.activities.append(activity)
        try:
            yield activity
        finally:
            with self.lock:
                self.activities.pop()
                if self.is_drawn and not self.activities:
                    self._write(CLEAR)
                    self.is_drawn = False

    def _watch(self) -> None:
        while not self.closed.wait(TICK_S):
            with self.lock:
                if self.activities:
                    self._show(self.activities[-1])

    def _show(self, activity: Activity) -> None:
        if sys.stdout.isatty():
            self._draw(activity)
        elif time.monotonic() - self.last_line > QUIET_S:
            self.print(f"{activity.label}: {activity.elapsed} so far")

    def _draw(self, activity: Activity) -> None:
        """Let the last line of the terminal be this activity."""
        width = shutil.get_terminal_size().columns - 1
        text = f"{activity.label} {activity.elapsed}"[:width]
        if activity.total:
            from tqdm import tqdm  # few runs have a terminal

            layout = f"{activity.label} |{{bar}}| {activity.remark or activity.elapsed}"
            text = tqdm.format_meter(
                activity.done, activity.total, 0, width, ascii=" =", bar_format=layout
            )
        self._write(f"{CLEAR}{text}")
        self.is_drawn = True

    def _write(self, text: str) -> None:
        """Write in one piece, even if stdout is unbuffered. If stdout is closed (the terminal is
        gone, or `| head`), the process continues silently."""
        try:
            print(text, end="", flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # until the process ends
