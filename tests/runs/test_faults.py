"""Faults that strike train.py in a process of its own: kills at random moments, damaged disks and data.

The short version of soak.py; tests/distributed/ has the faults of two processes.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from support.faults import COMMANDS, KINDS, PLACES, Fault, draw
from support.runs import ROOT, metrics
from support.trials import strike_all

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.deep)])
def test_killed_at_random_moments(kills, trial):
    """So many times, in the same run until it comes to its end, then in a new one."""
    seed = time.time_ns()
    print(f"seed {seed}")
    kinds = [kind for kind in KINDS if KINDS[kind].what.startswith("SIG") and KINDS[kind].launcher == "fork"]
    random, name = Random(seed), "muon, blockwise"
    strike_all(trial(name), [draw(random, COMMANDS[name], kinds) for _ in range(kills)])


@pytest.mark.parametrize(
    "places", [["rename", "checkpoint", "row"], pytest.param([*PLACES], marks=pytest.mark.deep)], ids=["three", "all"]
)
def test_every_place_is_struck(places, trial):
    """In each of them SIGKILL ends the process: the places exist, and a fault comes at its moment."""
    outcomes = strike_all(trial("adamw, dropout"), [Fault(f"SIGKILL, {place}", 0.15) for place in places])
    assert [outcome.codes for outcome in outcomes] == [(-signal.SIGKILL,)] * len(places)


@pytest.mark.deep
def test_what_the_checks_see(trial):
    """A lost checkpoint, rows of another run, a message too many, a process that does not end."""
    victim, stop = trial("adamw, dropout"), Fault("SIGTERM, forward", 0.6)
    assert victim.strike(stop).wrong == ()

    def columns(floor=0):
        return [column for column, _ in victim.inspect(stop, (143,), floor)]

    assert columns() == [] and columns(victim.saved_step() + 1) == ["checkpoint lost"]
    path, text = victim.out / "metrics.jsonl", (victim.out / "metrics.jsonl").read_text()
    path.write_text(text.replace('"train_loss": 3.', '"train_loss": 4.', 1))
    assert columns() == ["goes on differently"]
    path.write_text(text)
    Path(f"{victim.out}.0.err").write_text("Traceback (most recent call last):\n", encoding="utf-8")
    assert columns() == ["ended badly"]
    sleeper = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--out_dir={victim.out}"])]
    assert victim.left_behind(sleeper, patience_s=0.1)
    victim.end(sleeper)
    assert victim.left_behind(sleeper) == []


# ---------------------------------------------------------------------------------------------------- bad disks


@pytest.mark.deep
def test_a_damaged_last_goes_on_from_prev(trial):
    """A bit flipped in the middle of a tensor, a truncated file, a page of zeros: in place, as by a bad disk."""
    kinds = ["last.pt, a bit flipped", "last.pt truncated", "last.pt, 4096 bytes zeroed"]
    strike_all(trial("msgdw, skipped steps"), [Fault(kind, 0.4) for kind in kinds])


FAILURES = ["disk full for good, row", "folder becomes read-only", "data truncated in the run"]
FURTHER = ["disk full for good, checkpoint", "I/O error for good, rename", "data missing at the start"]
FURTHER += ["I/O error once, checkpoint", "I/O error once, rename"]


@pytest.mark.parametrize("kinds", [FAILURES, pytest.param(FURTHER, marks=pytest.mark.deep)], ids=["some", "others"])
def test_what_fails_says_so_and_goes_on_once_repaired(kinds, trial):
    """One line (trials.WORDS) and exit code 1; what fails once is tried again."""
    outcomes = strike_all(trial("adamw, dropout"), [Fault(kind, 0.2) for kind in kinds])
    assert [outcome.codes for outcome in outcomes] == [(0,) if "once" in kind else (1,) for kind in kinds]


@pytest.mark.deep
def test_killed_around_a_roll_back(trial):
    """The loss spikes at step 23. The run goes back to step 21 and skips batches 21 and 22, with kills as without."""
    spiking = trial("adamw, a spike")
    events = [row for row in metrics(spiking.reference.out) if "rolled_back_from" in row]
    assert [(row["step"], row["rolled_back_from"]) for row in events] == [(21, 23)]
    kills = [Fault("SIGKILL, forward", moment) for moment in (0.65, 0.1, 0.6)]
    outcomes = strike_all(spiking, kills)
    assert [outcome.codes for outcome in outcomes] == [(-signal.SIGKILL,)] * len(kills)


@pytest.mark.deep
def test_a_short_soak():
    """One plan of soak.py: faults of every kind, on one process and two, with torchrun and without."""
    argv = [sys.executable, ROOT / "tests" / "soak.py", "--kills=30", "--seed=974644", "--minutes=8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
