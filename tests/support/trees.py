"""A copy of the tree, in which commands are run: those of a page, or those of a fork that has deleted folders."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.runs import ROOT

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "out", "*.png", "*.bin", "*.marks", "meta.json")


def copy_tree(root: Path, without=()) -> Path:
    """The tree in the new folder `root`, without prepared data and without these paths."""

    def left_out(folder, names):
        paths = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
        return NOT_COPIED(folder, names) | {name for name, path in paths.items() if path in without}

    shutil.copytree(ROOT, root, ignore=left_out)
    return root


def call(root, line, code=0, **environment):
    """Run a command line of a page there; its stdout, or its stderr where it must fail."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    env |= dict(HF_HOME=str(root / "cache"), PATH=f"{os.path.dirname(sys.executable)}:{env['PATH']}", **environment)
    argv = line if isinstance(line, list) else ["bash", "-c", line]
    run = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == code, f"{line}\n{run.stdout}\n{run.stderr}"
    return run.stderr if code else run.stdout
