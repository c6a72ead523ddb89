"""How far a command with many runs has come: for the line of each run that has ended and, on a
terminal, for one more line, which is rewritten every second."""

import shutil
import threading
import time
from pathlib import Path

from tqdm import tqdm


class Progress:
    def __init__(self) -> None:
        self.needed = set()  # folders of the runs that are known to be needed
        self.waiting = set()  # what may need more: ids of claims
        self.ended = set()  # folders
        self.training = {}  # {folder: the run in words}
        self.begun = time.monotonic()
        self.trained = 0  # number of runs trained since then

    def size(self) -> str:
        """The number of runs that are needed, as far as known."""
        return f"{'at least ' if self.waiting else ''}{len(self.needed)}"

    def left(self) -> str:
        """The time that the known runs still take, in words; "" while nothing tells."""
        n = len(self.needed - self.ended)
        if not self.trained or not n:
            return ""
        seconds = (time.monotonic() - self.begun) / self.trained * n
        return f"; {'at least' if self.waiting else 'about'} {tqdm.format_interval(seconds)} left"

    def end(self, folder: Path) -> str:
        """Count a run that was trained; returns how far that is."""
        self.ended.add(folder)
        self.trained += 1
        return f"{len(self.ended)} of {self.size()}"

    def status(self) -> str:
        """How far it is, and what is trained now."""
        passed = tqdm.format_interval(time.monotonic() - self.begun)
        now = " | ".join(list(self.training.values()))
        return f"{passed}: {len(self.ended)} of {self.size()} runs{self.left()}; now {now}"

    def show(self) -> None:
        """Show the status until `hide`, if stderr is a terminal."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.keep_showing, daemon=True)
        self.thread.start()

    def hide(self) -> None:
        self.over.set()
        self.thread.join()

    def keep_showing(self) -> None:
        with tqdm(bar_format="{desc}", leave=False, disable=None) as bar:  # None: on a terminal
            while not self.over.wait(1):
                width = shutil.get_terminal_size().columns - 1
                bar.set_description_str(self.status()[:width])
