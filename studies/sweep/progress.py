"""How far a command with many runs has come: for the line of each run that has ended, and for the
last line of a terminal."""

import time
from pathlib import Path

from nanodnt.run.console import Activity
from nanodnt.tables import duration


class Progress(Activity):
    """The training of runs, which the console shows."""

    def __init__(self) -> None:
        super().__init__("training")
        self.needed = set()  # folders of the runs that are known to be needed
        self.waiting = set()  # what may need more: ids of claims
        self.ended = set()  # folders of those of them that have ended
        self.training = {}  # {folder: the run in words}
        self.trained = 0  # number of runs trained since the beginning

    def size(self) -> str:
        """The number of runs that are needed, as far as known."""
        return f"{'at least ' if self.waiting else ''}{len(self.needed)}"

    def left(self) -> str:
        """The time that the known runs still take, in words; "" while nothing tells."""
        n = len(self.needed) - len(self.ended)
        if not self.trained or not n:
            return ""
        seconds = (time.monotonic() - self.began) / self.trained * n
        return f"; {'at least' if self.waiting else 'about'} {duration(seconds)} left"

    def end(self, folder: Path) -> str:
        """Count a run that was trained; returns how far that is."""
        self.ended.add(folder)
        self.trained += 1
        return f"{len(self.ended)} of {self.size()}"

    def __str__(self) -> str:
        """How far it is, and what is trained now."""
        runs = f"{len(self.ended)} of {self.size()} runs{self.left()}"
        return " | ".join([runs, *self.training.values()])
