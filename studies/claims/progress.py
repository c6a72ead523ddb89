"""What `reproduce.py` prints while it trains: a line for each run that ends, and on a terminal one
more line, which is rewritten every second and says what is trained now."""

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from studies.sweep.runner import Outcome, Runner, TrainingRun, resolve_configs

TAIL = 4096  # bytes at the end of metrics.jsonl that are read for the last step


class Start(NamedTuple):
    """When a run was started, and from which step."""

    time: float  # in seconds, of time.monotonic
    step: int


class WatchedRunner(Runner):
    """A `Runner` that knows which runs are still needed. `describe` names a run in words."""

    def __init__(
        self, describe: Callable[[Path], str], jobs: int = 0, distributed: bool = False
    ) -> None:
        super().__init__(jobs, distributed)
        self.describe = describe
        self.steps = {}  # {folder: steps} of all runs that are known to be needed
        self.unplanned = set()  # ids of the claims that will need more
        self.ended = set()  # folders
        self.running = {}  # {folder: its Start}
        self.diverged = []  # runs in words
        self.trained_steps = 0  # of runs that have ended, and the seconds that these took
        self.trained_seconds = 0.0

    def expect(self, runs: Iterable[TrainingRun]) -> None:
        """Count these runs among those that are needed."""
        for run in runs:
            if run.path not in self.steps:
                self.steps[run.path] = resolve_configs(run.args).train.max_iters

    def finish(self, run: TrainingRun) -> None:
        super().finish(run)
        self.ended.add(run.path)  # also where it had been trained before

    def began(self, run: TrainingRun) -> None:
        self.running[run.path] = Start(time.monotonic(), last_step(run.path))

    def report(self, run: TrainingRun, outcome: Outcome) -> None:
        """Print a run's result, its number among the runs needed, and the time that is left."""
        self.ended.add(run.path)
        took = ""
        if start := self.running.pop(run.path, None):
            seconds = time.monotonic() - start.time
            self.trained_seconds += seconds
            self.trained_steps += last_step(run.path) - start.step
            took = f" in {format_seconds(seconds)}"
        if outcome.loss is None:
            self.diverged.append(self.describe(run.path))
            result = outcome.word
        else:
            result = f"loss {outcome.loss:.4f}"
        text = f"run {self.count()}  {self.describe(run.path)}: {result}{took}{self.time_left()}"
        self.say(text)

    def say(self, line: str, error: bool = False) -> None:
        tqdm.write(line, file=sys.stderr if error else sys.stdout)  # above the line of `watching`
        sys.stdout.flush()

    def size(self) -> str:
        """The number of runs that are needed, as far as known."""
        bound = "at least " if self.unplanned else ""
        return f"{bound}{len(self.steps)}"

    def count(self) -> str:
        return f"{len(self.ended)} of {self.size()}"

    def time_left(self) -> str:
        """The words on the time until all known runs have ended, from the steps so far; "" before
        any."""
        steps = self.trained_steps
        seconds = self.trained_seconds
        left = sum(n for path, n in self.steps.items() if path not in self.ended)
        for path, start in list(self.running.items()):
            step = last_step(path)
            steps += step - start.step
            seconds += time.monotonic() - start.time
            left -= step
        n_runs = len(self.steps.keys() - self.ended)
        if steps <= 0 or not n_runs:
            return ""
        bound = "at least" if self.unplanned else "about"
        jobs = min(self.jobs, n_runs)
        return f"; {bound} {format_seconds(left * seconds / steps / jobs)} left"

    def status(self) -> str:
        """What is trained now: "" if nothing is."""
        now = []
        for path in list(self.running):
            now.append(f"{self.describe(path)}, step {last_step(path)}/{self.steps[path]}")
        if not now:
            return "measuring" if self.ended else "starting"
        return f"{self.count()} done{self.time_left()}; now {' | '.join(now)}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the status is shown, if stderr is a terminal."""
        over = threading.Event()
        # disable=None: shown only on a terminal
        with tqdm(bar_format="{desc}", leave=False, disable=None) as bar:

            def show() -> None:
                while not over.wait(1):
                    width = shutil.get_terminal_size().columns
                    bar.set_description_str(self.status()[: width - 1])

            thread = threading.Thread(target=show, daemon=True)
            if not bar.disable:
                thread.start()
            try:
                yield
            finally:
                over.set()
                if not bar.disable:
                    thread.join()


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl; 0 without one."""
    tail = b""
    with suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL))
        tail = file.read()
    steps = re.findall(rb'"step": (\d+)', tail)
    return int(steps[-1]) if steps else 0


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} hours"
