"""Faults that strike train.py in processes of their own: kills at random moments, damaged disks and data, lost ranks.

The short version of soak.py. What test_train.py, test_bad_input.py and test_dist.py hold already is not here.
"""

import re
import signal
import subprocess
import sys
import time
from random import Random

import faults
import pytest
from faults import COMMANDS, KINDS, LONG, PLACES, Command, Fault, Trial
from helpers import different, load, metrics, run

import rundir

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def references(tmp_path_factory, dataset):
    """{name of a command: the Trial that nothing disturbed}, made when first asked for."""
    folder = tmp_path_factory.mktemp("references")

    class References(dict):
        def __missing__(self, name):
            self[name] = Trial(folder / str(len(self)), COMMANDS[name], dataset)
            return self[name]

    return References()


@pytest.fixture
def trial(references, dataset, tmp_path):
    """trial(name of a command) → its Trial."""
    return lambda name: Trial(tmp_path / "trial", COMMANDS[name], dataset, references[name])


def strike_all(trial, todo) -> list:
    """The outcomes of all faults; nothing is wrong after any of them, nor at the end."""
    outcomes = [trial.strike(fault) for fault in todo]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert trial.finish() == []
    return outcomes


def test_killed_at_random_moments(trial):
    """Twelve times, the same run for as long as they leave anything of it to do."""
    seed = time.time_ns()
    print(f"seed {seed}")
    kinds = [kind for kind in KINDS if KINDS[kind].what.startswith("SIG") and KINDS[kind].launcher == "fork"]
    random, name = Random(seed), "muon, blockwise"
    strike_all(trial(name), [faults.draw(random, COMMANDS[name], kinds) for _ in range(12)])


def test_every_place_is_struck(trial):
    """In each of them SIGKILL ends the process: the places exist, and a fault comes when it should."""
    todo = [Fault(f"SIGKILL, {place}", 0.15) for place in PLACES]
    outcomes = strike_all(trial("adamw, dropout"), todo)
    assert [outcome.codes for outcome in outcomes] == [(-signal.SIGKILL,)] * len(PLACES)


def test_what_the_checks_see(trial, dataset):
    """They do find a lost checkpoint, rows and parameters of another run, a message too many, a process left behind."""
    victim = trial("adamw, dropout")
    stop = Fault("SIGTERM, forward", 0.6)
    assert victim.strike(stop).wrong == ()
    last = victim.saved_step()

    def columns(floor=0):
        return [column for column, _ in victim.look(stop, (143,), floor)]

    assert columns() == [] and columns(last + 1) == ["checkpoint lost"]
    path, text = victim.out / "metrics.jsonl", (victim.out / "metrics.jsonl").read_text()
    path.write_text(text.replace('"train_loss": 3.', '"train_loss": 4.', 1))
    assert columns() == ["goes on differently"]
    path.write_text(text)
    with open(f"{victim.out}.err0", "w") as f:
        f.write("Traceback (most recent call last):\n")
    assert columns() == ["ended badly"]
    faults.rewrite(victim.out / "last.pt", lambda raw: raw[:-1])
    faults.rewrite(victim.out / "prev.pt", lambda raw: raw[:-1])
    assert "checkpoint lost" in columns()
    config = dict(LONG | COMMANDS["adamw, dropout"].flags, seed=1)
    assert run(out_dir=victim.folder / "run1", dataset=dataset, **config) == 0
    victim.lap = 1
    assert [column for column, _ in victim.compare()] == ["goes on differently"]
    sleeper = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--out_dir={victim.out}"])]
    assert victim.left_behind(sleeper, patience_s=0.1)
    victim.end(sleeper)
    assert victim.left_behind(sleeper) == []


# ---------------------------------------------------------------------------------------------------- bad disks


@pytest.fixture(scope="module")
def begun(dataset, tmp_path_factory):
    """A run of 20 steps: prev.pt is of step 10, last.pt of step 20."""
    out = tmp_path_factory.mktemp("begun") / "run"
    assert run(out_dir=out, dataset=dataset) == 0
    return out


def test_a_flipped_bit_is_found_or_harmless(begun, tmp_path):
    """300 bits anywhere in a checkpoint: it is refused in one line, or holds what it held."""
    seed = time.time_ns()
    print(f"seed {seed}")
    random, path, raw = Random(seed), tmp_path / "last.pt", (begun / "last.pt").read_bytes()
    expected, refused = load(begun / "last.pt"), 0
    for bit in random.sample(range(8 * len(raw)), 300):
        path.write_bytes(faults.flipped(raw, bit))
        try:
            found = rundir.load_checkpoint(path)
        except ValueError as e:
            refused += 1
            assert "\n" not in str(e) and "last.pt" in str(e), bit
            continue
        assert different(found["model"], expected["model"]) == [], bit
        assert different(found["optimizer"]["state"], expected["optimizer"]["state"]) == [], bit
        plain = [key for key in expected if key not in ("model", "optimizer")]
        assert {key: found[key] for key in plain} == {key: expected[key] for key in plain}, bit
    assert refused > 200


def test_a_damaged_last_goes_on_from_prev(trial):
    """Truncated, a bit flipped in the middle of a tensor, a page of zeros: in place, as a disk does it."""
    kinds = ["last.pt truncated", "last.pt, a bit flipped", "last.pt, 4096 bytes zeroed"]
    victim = trial("msgdw, skipped steps")
    for kind in kinds:
        assert victim.strike(Fault("SIGTERM, forward", 0.3)).codes == (143,)
        prev = load(victim.out / "prev.pt")["step"]
        outcome = victim.strike(Fault(kind, 0.4))
        assert outcome.wrong == ()
        assert f"prev.pt, step {prev}" in victim.said()[0]


FAILURES = ["disk full for good, checkpoint", "disk full for good, row", "folder becomes read-only"]
FAILURES += ["I/O error for good, rename", "data truncated in the run", "data missing at the start"]
FAILURES += ["I/O error once, checkpoint", "I/O error once, rename"]


def test_what_fails_says_so_and_goes_on_once_repaired(trial):
    """One line and exit code 1 (`faults.WORDS`); what fails once is tried again."""
    outcomes = strike_all(trial("adamw, dropout"), [Fault(kind, 0.2) for kind in FAILURES])
    assert [outcome.codes for outcome in outcomes] == [(0,) if "once" in kind else (1,) for kind in FAILURES]


# --------------------------------------------------------------------------------------------- losses not finite


def test_losses_that_are_not_finite(dataset, tmp_path):
    """Two are skipped; the third in a row ends the run, which names the first bad tensor; the same command goes on."""
    bad = (30, 31, 60, 61, 62)
    command = Command(dict(COMMANDS["adamw, dropout"].flags), bad_losses=bad)
    reference = Trial(tmp_path / "reference", command, dataset)
    rows = {row["step"]: row for row in metrics(reference.out)}
    assert [step for step, row in rows.items() if row.get("train_loss", 0) is None] == [step + 1 for step in bad]
    assert rows[80]["skipped_steps"] == 5
    strict = Trial(tmp_path / "strict", command._replace(flags=command.flags | dict(max_skipped=3)), dataset, reference)
    started = strict.start(None)
    assert [faults.ended(p, time.monotonic() + faults.LIMIT_S) for p in started] == [1]
    err = strict.said()[1]
    assert re.fullmatch(
        r"error: 3 steps in a row, up to about step 63, [^\n]+ the gradient of wte\.weight\)[^\n]+\n", err
    )
    assert load(strict.out / "last.pt")["step"] == 63
    path = strict.out / "metrics.jsonl"
    path.write_text(re.sub(r', "failure": "[^"]+"', "", text := path.read_text()))
    assert path.read_text() != text  # which the other run has no reason to say
    assert strict.finish() == []


def test_killed_around_a_roll_back(trial):
    """The loss spikes at step 51, and the run goes back to step 49 and on past batches 49 and 50, kills or not."""
    spiking = trial("adamw, a spike")
    events = [row for row in metrics(spiking.reference.out) if "rolled_back_from" in row]
    assert [(row["step"], row["rolled_back_from"]) for row in events] == [(49, 51)]
    kills = [Fault("SIGKILL, forward", moment) for moment in (0.65, 0.1, 0.6)]
    outcomes = strike_all(spiking, kills)
    assert [outcome.codes for outcome in outcomes] == [(-signal.SIGKILL,)] * len(kills)


# -------------------------------------------------------------------------------------------------- two processes

ONE_DIES = [Fault("two processes: SIGKILL to one", 0.5, 1), Fault("two processes: SIGKILL to one", 0.5, 0)]
ONE_DIES += [Fault("SIGKILL, rename", 0.3, 0), Fault("two processes: SIGTERM to one", 0.5, 1)]


def test_one_of_two_processes_dies(trial):
    """The other ends by itself, with one line, and a start of both goes on."""
    outcomes = strike_all(trial("two processes"), ONE_DIES)
    for outcome in outcomes[:3]:
        codes = list(outcome.codes)
        assert codes.pop(outcome.fault.rank) == -signal.SIGKILL and codes == [1], outcome
