"""What the tests protect: mistakes drawn at random, put into a copy of the tree one at a time, and
the tests that see them.

    python tests/mutants.py                # all, each with the test that caught it: half an hour
    python tests/mutants.py 3 17           # these
    python tests/mutants.py 3 -- tests/unit/test_loss.py    # with other tests

Exits with 1 if one is missed. Each has the `file`, its `old` text, the `new` one, and the test that
it is `caught_by`; where that is null, `why` says why no test can see it, or that none does. The
places were drawn by a seeded script from the syntax trees of model.py, layers/, nanodnt/optim/,
nanodnt/data/, engine, checkpoints and train.py: a comparison turned, + and - swapped, a constant
changed, an argument dropped, a line deleted, and so on. The last eight were chosen by hand.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.json"
LIMIT_S = 900  # a mutant that makes a test hang is caught, too
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "out", "*.bin", "*.png")


def apply(mutant: dict, root: Path) -> None:
    """Put a mutant into the tree at `root`. ValueError if its old text is not there exactly
    once."""
    path = root / mutant["file"]
    source = path.read_text(encoding="utf-8")
    if source.count(mutant["old"]) != 1:
        found = source.count(mutant["old"])
        raise ValueError(
            f"{mutant['file']} has this {found} times, not once: {mutant['old']!r}: mend the list"
        )
    path.write_text(source.replace(mutant["old"], mutant["new"]), encoding="utf-8")


def first_failure(root: Path, tests: list) -> str | None:
    """The first of these tests that fails in the tree at `root`, or None."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-rfE",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = os.environ | dict(PYTHONDONTWRITEBYTECODE="1")
    try:
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if run.returncode == 0:
        return None
    if run.returncode == 4 or "no tests ran" in run.stdout:
        raise ValueError(f"no such tests: {' '.join(tests)}: mend the list")
    failed = [
        line.split(" ", 1)[1]
        for line in run.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return failed[0].split(" - ")[0] if failed else f"exit code {run.returncode}"


def main(argv: list) -> int:
    numbers, _, tests = " ".join(argv).partition("--")
    mutants, missed = json.loads(MUTANTS.read_text(encoding="utf-8")), 0
    for number in [int(n) for n in numbers.split()] or range(len(mutants)):
        mutant = mutants[number]
        chosen = tests.split() or [mutant["caught_by"]]
        if chosen == [None]:
            print(f"{number}: skipped: {mutant['why']}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "tree"
            shutil.copytree(ROOT, root, ignore=LEFT_OUT)
            apply(mutant, root)
            failed = first_failure(root, chosen)
        missed += failed is None
        print(f"{number}: {mutant['file']}: {failed or 'MISSED'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
