"""What a run prints: its lines, notes that come last, and what it is doing now.

In a terminal the last line shows the present activity, and is written anew twice a second. In a
file or a pipe there are lines alone; where ten seconds would pass without one, one shows the
activity.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
    part_s: float = 0.0  # seconds that each of the others will take; 0 = unknown
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """Such as "training, step 40/100: 0:01:20 so far, eta 0:02:00"."""
        text = f"{self.name} {self.done}/{self.total}" if self.total else self.name
        text += f": {duration(time.monotonic() - self.began)} so far"
        if self.part_s:
            text += f", eta {duration(self.part_s * (self.total - self.done))}"
        return text


class Console:
    """The standard output of a process. A thread, from `start` to `close`, shows the present
    activity; it computes nothing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while something is written
        self.activities: list[Activity] = []  # those that have begun; the last one is shown
        self.notes: list[str] = []  # lines that `print_notes` will print
        self.last_line = time.monotonic()  # time of the last line
        self.closed = threading.Event()

    def start(self) -> None:
        """Show activities from now on."""
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Print the notes that are left, and show no more activities."""
        self.print_notes()
        self.closed.set()

    def print(self, line: str) -> None:
        """Print a line."""
        with self.lock:
            self._write(f"{line}\n")
            self.last_line = time.monotonic()

    def print_notes(self) -> None:
        """Print the notes that were made since the last call."""
        while self.notes:
            self.print(self.notes.pop(0))

    def clear(self) -> None:
        """Empty the last line of a terminal."""
        self._write("")

    def doing(self, name: str, total: int = 0) -> AbstractContextManager[Activity]:
        """Context of a new activity: `show`."""
        return self.show(Activity(name, total))

    @contextmanager
    def show(self, activity: Activity) -> Iterator[Activity]:
        """Show the activity in this context, except while another one inside it is shown."""
        self.activities.append(activity)
        try:
            yield activity
        finally:
            with self.lock:
                self.activities.pop()
                if not self.activities:
                    self.clear()

    def _watch(self) -> None:
        while not self.closed.wait(TICK_S):
            with self.lock:
                if self.activities:
                    self._update(str(self.activities[-1]))

    def _update(self, text: str) -> None:
        if sys.stdout.isatty():
            # then the cursor goes back, so that a line of somebody else begins where it should
            self._write(text[: shutil.get_terminal_size().columns - 1] + "\r")
        elif time.monotonic() - self.last_line > QUIET_S:
            self.print(text)

    def _write(self, text: str) -> None:
        """Write in one piece, even if stdout is unbuffered; in a terminal, over its last line. If
        stdout is closed (the terminal is gone, or `| head`), the process continues silently."""
        try:
            clear = CLEAR if sys.stdout.isatty() else ""
            print(clear + text, end="", flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # until the process ends
