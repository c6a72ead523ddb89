"""Faults that strike train.py in a process of its own: kills at random moments, damaged disks and data.

The short version of soak.py; tests/distributed/ has the faults of two processes.
"""

import re
import signal
import subprocess
import sys
import time
from random import Random

import pytest

from nanodnt.run.checkpoints import load_checkpoint
from support.faults import COMMANDS, KINDS, LONG, PLACES, Command, Fault, draw, flipped, rewrite
from support.runs import ROOT, different, load, metrics, run
from support.trials import LIMIT_S, Trial, ended, strike_all

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


def test_what_the_checks_see(trial, dataset):
    """A lost checkpoint, rows and parameters of another run, a message too many, a process that does not end."""
    victim = trial("adamw, dropout")
    stop = Fault("SIGTERM, forward", 0.6)
    assert victim.strike(stop).wrong == ()
    last = victim.saved_step()

    def columns(floor=0):
        return [column for column, _ in victim.inspect(stop, (143,), floor)]

    assert columns() == [] and columns(last + 1) == ["checkpoint lost"]
    path, text = victim.out / "metrics.jsonl", (victim.out / "metrics.jsonl").read_text()
    path.write_text(text.replace('"train_loss": 3.', '"train_loss": 4.', 1))
    assert columns() == ["goes on differently"]
    path.write_text(text)
    with open(f"{victim.out}.err0", "w") as f:
        f.write("Traceback (most recent call last):\n")
    assert columns() == ["ended badly"]
    rewrite(victim.out / "last.pt", lambda raw: raw[:-1])
    rewrite(victim.out / "prev.pt", lambda raw: raw[:-1])
    assert "checkpoint lost" in columns()
    config = dict(LONG | COMMANDS["adamw, dropout"].flags, seed=1)
    assert run(out_dir=victim.folder / "run1", dataset=dataset, **config) == 0
    victim.ended_runs = 1
    assert [column for column, _ in victim.compare()] == ["goes on differently"]
    sleeper = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--out_dir={victim.out}"])]
    assert victim.left_behind(sleeper, patience_s=0.1)
    victim.end(sleeper)
    assert victim.left_behind(sleeper) == []


# ---------------------------------------------------------------------------------------------------- bad disks


@pytest.mark.parametrize("bits", [40, pytest.param(300, marks=pytest.mark.deep)])
def test_a_flipped_bit_is_found_or_harmless(bits, first_20, tmp_path):
    """So many bits anywhere in a checkpoint, one at a time: it is refused in one line, or its content is the same."""
    seed = time.time_ns()
    print(f"seed {seed}")
    random, path, raw = Random(seed), tmp_path / "last.pt", (first_20 / "last.pt").read_bytes()
    expected, refused = load(first_20 / "last.pt"), 0
    for bit in random.sample(range(8 * len(raw)), bits):
        path.write_bytes(flipped(raw, bit))
        try:
            found = load_checkpoint(path)
        except ValueError as e:
            refused += 1
            assert "\n" not in str(e) and "last.pt" in str(e), bit
            continue
        assert different(found["model"], expected["model"]) == [], bit
        assert different(found["optimizer"]["state"], expected["optimizer"]["state"]) == [], bit
        plain = [key for key in expected if key not in ("model", "optimizer")]
        assert {key: found[key] for key in plain} == {key: expected[key] for key in plain}, bit
    assert refused > bits / 2


DAMAGES = ["last.pt, a bit flipped", "last.pt truncated", "last.pt, 4096 bytes zeroed"]


@pytest.mark.parametrize(
    "name, kinds",
    [
        pytest.param("adamw, dropout", DAMAGES[:1], id="one"),
        pytest.param("msgdw, skipped steps", DAMAGES, id="all", marks=pytest.mark.deep),
    ],
)
def test_a_damaged_last_goes_on_from_prev(name, kinds, trial):
    """A bit flipped in the middle of a tensor, a truncated file, a page of zeros: in place, as by a bad disk."""
    victim = trial(name)
    for kind in kinds:
        assert victim.strike(Fault("SIGTERM, forward", 0.3)).codes == (143,)
        prev = load(victim.out / "prev.pt")["step"]
        outcome = victim.strike(Fault(kind, 0.4))
        assert outcome.wrong == ()
        assert f"prev.pt, step {prev}" in victim.output()[0]


FAILURES = ["disk full for good, row", "folder becomes read-only", "data truncated in the run"]
FURTHER = ["disk full for good, checkpoint", "I/O error for good, rename", "data missing at the start"]
FURTHER += ["I/O error once, checkpoint", "I/O error once, rename"]


@pytest.mark.parametrize("kinds", [FAILURES, pytest.param(FURTHER, marks=pytest.mark.deep)], ids=["some", "others"])
def test_what_fails_says_so_and_goes_on_once_repaired(kinds, trial):
    """One line (trials.WORDS) and exit code 1; what fails once is tried again."""
    outcomes = strike_all(trial("adamw, dropout"), [Fault(kind, 0.2) for kind in kinds])
    assert [outcome.codes for outcome in outcomes] == [(0,) if "once" in kind else (1,) for kind in kinds]


# --------------------------------------------------------------------------------------------- losses not finite


@pytest.mark.deep
def test_losses_that_are_not_finite(dataset, tmp_path):
    """Two are skipped. The third in a row ends the run, which names the first bad tensor, and can be resumed."""
    bad = (30, 31, 60, 61, 62)
    command = Command(dict(COMMANDS["adamw, dropout"].flags), bad_losses=bad)
    reference = Trial(tmp_path / "reference", command, dataset)
    rows = {row["step"]: row for row in metrics(reference.out)}
    assert [step for step, row in rows.items() if row.get("train_loss", 0) is None] == [step + 1 for step in bad]
    assert rows[80]["skipped_steps"] == 5
    strict = Trial(tmp_path / "strict", command._replace(flags=command.flags | dict(max_skipped=3)), dataset, reference)
    started = strict.start(None)
    assert [ended(p, time.monotonic() + LIMIT_S) for p in started] == [1]
    err = strict.output()[1]
    assert re.fullmatch(
        r"error: 3 steps in a row, up to about step 63, [^\n]+ the gradient of wte\.weight\)[^\n]+\n", err
    )
    assert load(strict.out / "last.pt")["step"] == 63
    path = strict.out / "metrics.jsonl"
    path.write_text(re.sub(r', "failure": "[^"]+"', "", text := path.read_text()))
    assert path.read_text() != text  # the reference has no such field
    assert strict.finish() == []


@pytest.mark.deep
def test_killed_around_a_roll_back(trial):
    """The loss spikes at step 51. The run goes back to step 49 and skips batches 49 and 50, with kills as without."""
    spiking = trial("adamw, a spike")
    events = [row for row in metrics(spiking.reference.out) if "rolled_back_from" in row]
    assert [(row["step"], row["rolled_back_from"]) for row in events] == [(49, 51)]
    kills = [Fault("SIGKILL, forward", moment) for moment in (0.65, 0.1, 0.6)]
    outcomes = strike_all(spiking, kills)
    assert [outcome.codes for outcome in outcomes] == [(-signal.SIGKILL,)] * len(kills)


# --------------------------------------------------------------------------------------------------------- the soak


@pytest.mark.deep
def test_a_short_soak():
    """One plan of soak.py: faults of every kind, on one process and two, with torchrun and without."""
    argv = [sys.executable, ROOT / "tests" / "soak.py", "--kills=30", "--seed=974644", "--minutes=8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
