"""Preparations of a command before it imports torch. Import this module first.

torch reads the settings of its GPU memory allocator when it is imported. And the import takes
seconds, in which Ctrl-C must not end in a traceback.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path

from nanodnt import require
from nanodnt.run import signals

ROOT = Path(__file__).resolve().parents[2]

require("torch")
if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
    settings = "expandable_segments:True"  # less memory lost to gaps between tensors
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 13):
        # larger pinned tensors are not rounded up to powers of two
        settings += ",pinned_max_round_threshold_mb:64"
    os.environ["PYTORCH_ALLOC_CONF"] = settings

# A test, a notebook or a script elsewhere that imports a command does not call `start_main`: its
# Ctrl-C stays Python's.
program = getattr(sys.modules["__main__"], "__file__", None)
if program and Path(program).resolve().parent == ROOT:
    signals.end_at_once_while_importing()
