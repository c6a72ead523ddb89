"""A terminal as standard output."""

import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

WIDTH = 46  # too narrow for a step with its eta


@contextmanager
def terminal() -> Iterator[list[bytes]]:
    """Inside, stdout is a real one. The list gets what is written to it."""
    master, slave = pty.openpty()
    written = []

    def read() -> None:
        with suppress(OSError):  # as soon as the other end is closed
            while chunk := os.read(master, 4096):
                written.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, open(slave, "w", encoding="utf-8") as stdout:
        patch.setattr(sys, "stdout", stdout)
        patch.setenv("COLUMNS", str(WIDTH))
        yield written
    reader.join()
    os.close(master)


def text_of(written: list[bytes]) -> str:
    return b"".join(written).decode(errors="ignore").replace("\r\n", "\n")
