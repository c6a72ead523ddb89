"""A copy of the tree, in which the commands of a page are run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.runs import ROOT


def copy_tree(root: Path) -> Path:
    """The code, configs and pages in the new folder `root`, without prepared data."""
    root.mkdir()
    for name in ("layers", "nanodnt", "config", "docs", "data"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.bin", "*.marks", "*.jsonl", "meta.json")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for path in [*ROOT.glob("*.py"), ROOT / "README.md", ROOT / "requirements.txt"]:
        shutil.copy(path, root)
    return root


def call(root, line, code=0, **environment):
    """Run a command line of a page there; its stdout, or its stderr where it must fail."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    env |= dict(HF_HOME=str(root / "cache"), PATH=f"{os.path.dirname(sys.executable)}:{env['PATH']}", **environment)
    argv = line if isinstance(line, list) else ["bash", "-c", line]
    run = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == code, f"{line}\n{run.stdout}\n{run.stderr}"
    return run.stderr if code else run.stdout
