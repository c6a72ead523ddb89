"""Faults that strike train.py in a process of its own: kills at random moments, and disks that
fail.

The short version of soak.py; tests/distributed/ has the faults of two processes.
"""

import signal
import subprocess
import sys
import time
from random import Random

import pytest

from support.faults import COMMANDS, ERRORS, KILLS, PLACES, STOPS, Fault, draw, strike_all
from support.runs import ROOT

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.deep)])
def test_killed_at_random_moments(kills, trial):
    """So many times, in the same run until it comes to its end, then in a new one."""
    seed = time.time_ns()
    print(f"seed {seed}")
    random, name = Random(seed), "muon, blockwise"
    strike_all(trial(name), [draw(random, COMMANDS[name], KILLS + STOPS) for _ in range(kills)])


@pytest.mark.parametrize(
    "places",
    [["rename", "checkpoint"], pytest.param([*PLACES], marks=pytest.mark.deep)],
    ids=["two", "all"],
)
def test_every_place_is_struck(places, trial):
    """In each of them SIGKILL ends the process: the places exist, and a fault comes at its
    moment."""
    codes = strike_all(trial("adamw, dropout"), [Fault("SIGKILL", place, 0.15) for place in places])
    assert codes == [(-signal.SIGKILL,)] * len(places)


@pytest.mark.parametrize(
    "errors", [ERRORS[:2], pytest.param(ERRORS[2:], marks=pytest.mark.deep)], ids=["full", "I/O"]
)
def test_a_disk_that_fails_ends_the_run_in_one_line(errors, trial):
    """And with exit code 1; it goes on once that is repaired. What fails once is tried again."""
    codes = strike_all(trial("adamw, dropout"), [Fault(what, place, 0.2) for what, place in errors])
    assert codes == [(0,) if what.endswith("once") else (1,) for what, _ in errors]


@pytest.mark.deep
def test_what_the_checks_see(trial):
    """A lost checkpoint, rows of another run, a message too many."""
    victim, stop = trial("adamw, dropout"), Fault("SIGTERM", "forward", 0.6)
    assert victim.strike(stop).wrong == []

    def found(floor=0):
        return victim.inspect(stop, (143,), floor)

    assert found() == [] and "checkpoint lost" in found(victim.saved_step() + 1)[0]
    path = victim.out / "metrics.jsonl"
    path.write_text(path.read_text().replace('"train_loss": 3.', '"train_loss": 4.', 1))
    assert "goes on differently" in found()[0]
    (victim.folder / f"{victim.out.name}.0.err").write_text("Traceback (most recent call last):\n")
    assert len(found()) == 2


@pytest.mark.deep
def test_a_short_soak():
    """One plan of soak.py: faults of every kind, on one process and several."""
    argv = [
        sys.executable,
        ROOT / "tests" / "soak.py",
        "--kills=30",
        "--seed=974644",
        "--minutes=8",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
