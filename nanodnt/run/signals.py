"""The signals that ask a process to end soon. It imports neither torch nor NumPy."""

import os
import signal
from contextlib import suppress
from types import FrameType

from configurator import rank_tag
from nanodnt.run.console import CLEAR

# In this order: Ctrl-C; kill and schedulers; a closed terminal; SLURM's --signal; the same; a CPU
# time limit. Not every system has all of them.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
IMPORTING: list[signal.Signals] = []  # signals with the handler `end_at_once` while a command
#   imports its modules


def heeded() -> list[signal.Signals]:
    """The signals of NAMES, without those that this process was started to ignore, by nohup for
    one, and those that are handled by code that is not Python."""
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def say(text: str, file: int) -> None:
    """Write a line to a file descriptor: unlike print, this can interrupt another print."""
    with suppress(OSError):  # the reader has closed it
        if os.isatty(1):  # its last line may show what the run is doing
            os.write(1, CLEAR.encode())
        os.write(file, f"{rank_tag()}{text}\n".encode())


def end_at_once(number: int, frame: FrameType | None = None) -> None:
    """End this process, which has nothing to save. Also a signal handler."""
    say(f"{signal.Signals(number).name}: nothing to save, exiting", file=2)
    os._exit(128 + number)


def end_at_once_while_importing() -> None:
    """Make `end_at_once` the handler of all heeded signals, until `start_main`."""
    IMPORTING[:] = heeded()
    for number in IMPORTING:
        signal.signal(number, end_at_once)


def start_main() -> None:
    """Give signals back to Python: Ctrl-C raises KeyboardInterrupt, the others end the process."""
    for number in IMPORTING:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)
