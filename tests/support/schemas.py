"""Two dataclasses as programs give them to configure(), and what a command line makes of them."""

from __future__ import annotations  # annotations as strings, as a schema may have them

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import pytest

from configurator import PathName, configure


@dataclass
class Model:
    # --- size ---------------
    n_layer: int = 12  # blocks
    # ------------------------
    n_head: int = 12  # attention heads
    # --- parts ---
    dropout: float = 0.0  # probability
    bias: bool = False  # biases in linear layers
    norm: Literal["rmsnorm", "none"] = "rmsnorm"  # function in a norm slot

    def size(self):  # a method's comment is nobody's help
        # --- nor is this a section ---
        return self.n_layer


@dataclass
class Train:
    # --- optimizer ---
    learning_rate: float | None = None  # peak LR; None = the optimizer's default
    # and this line continues it; a "#" stays: C#
    seed: int = 1337  # of everything

    # this remark stands alone and belongs to no flag
    lr_decay_iters: Optional[int] = None  # noqa: UP045 (the older spelling)
    # --- output ---
    out_dir: str = "out"  # run directory # with a second hash
    to: PathName = "exported"  # a folder
    start: str = "\n"  # prompt
    note: str | None = None  # free text
    compile: Literal["auto", True, False] = "auto"  # torch.compile the model
    level: Literal[1, 2] = 1  # a choice of integers
    either: float | None | Literal["none", "half"] = "half"  # the string none, None, or a number


def load(*argv):
    """{name: value} over both schemas, and `given`."""
    instances, where = configure(Model, Train, argv=list(argv))
    return {name: value for x in instances for name, value in vars(x).items()}, where


def refused(capsys, *argv, lines=1):
    """The message of a refused command line: `lines` lines on stderr, nothing on stdout, exit code
    2."""
    with pytest.raises(SystemExit) as stop:
        configure(Model, Train, argv=list(argv))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("error: ") and len(err.splitlines()) == lines and err.endswith("\n")
    return err[len("error: ") : -1]


def write_config(text, name="c.py"):
    """Write a config file into the working directory; its name."""
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name
