"""The files of the repository; and copies of the tree, in which commands are run: those of a page,
or of a fork."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.runs import ROOT

# not for a pytest that is started in a copy
HIDDEN = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "NANODNT_DEEP")
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "out", "*.png", "*.bin", "*.marks", "meta.json"
)


def repository_files(root: Path = ROOT) -> list[Path]:
    """The files below `root` that git tracks and that are there. In a tree that git does not know,
    all files."""
    done = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True)
    if done.returncode:
        paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        names = [
            path
            for path in paths
            if not any(part.startswith((".", "__pycache__")) for part in path.parts)
        ]
    else:
        names = [Path(name) for name in done.stdout.split("\0") if name and (root / name).exists()]
    return [root / name for name in sorted(names)]


def copy_tree(root: Path, without=()) -> Path:
    """The tree in the new folder `root`, without prepared data and without these paths."""

    def left_out(folder, names):
        paths = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
        return NOT_COPIED(folder, names) | {name for name, path in paths.items() if path in without}

    shutil.copytree(ROOT, root, ignore=left_out)
    return root


def apply_readme(root: Path) -> None:
    """Make the changes of README's "Change it" in the tree at `root`: each hunk of a diff begins
    with `--- FILE`. A Python block of docs/optimizers.md after a line that ends in "the whole of
    `FILE`:" is a new file."""
    readme = (ROOT / "README.md").read_text()
    for block in re.findall(r"```diff\n(.*?)```", readme, re.DOTALL):
        for hunk in re.split("^--- ", block, flags=re.MULTILINE)[1:]:
            name, *lines = hunk.rstrip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if line[0] in " -")
            new = "\n".join(line[1:] for line in lines if line[0] in " +")
            source = (root / name).read_text()
            assert source.count(old) == 1, f"README: the hunk for {name} does not apply:\n{old}"
            (root / name).write_text(source.replace(old, new))
    optimizers = (ROOT / "docs" / "optimizers.md").read_text()
    new_files = re.findall(
        r"the whole of `([\w/]+\.py)`:\n\n```python\n(.*?)```", optimizers, re.DOTALL
    )
    assert [name for name, _ in new_files] == ["nanodnt/optim/lion.py"]
    for name, source in new_files:
        assert not (root / name).exists()
        (root / name).write_text(source)


def call(root, line, code=0, timeout_s=300, **environment):
    """Run a command line of a page there; its stdout, or its stderr where it must fail."""
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    env |= dict(
        HF_HOME=str(root / "cache"),
        PATH=f"{os.path.dirname(sys.executable)}:{env['PATH']}",
        **environment,
    )
    argv = line if isinstance(line, list) else ["bash", "-c", line]
    run = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert run.returncode == code, f"{line}\n{run.stdout}\n{run.stderr}"
    return run.stderr if code else run.stdout
