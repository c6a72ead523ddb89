"""Hundreds of faults of every kind, at random moments of tiny runs. Exit code 1 if one of them did lasting harm.

python tests/soak.py --kills=300 --seed=1      # the same seed is the same plan of faults
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configurator import configure
from nanodnt.run.errors import reports_errors
from support.faults import COMMANDS, KINDS, Fault, draw, suits
from support.runs import make_dataset
from support.trials import COLUMNS, Trial

FAULTS = 8  # of one trial
UNDISTURBED = "then undisturbed, to the end"


@dataclass
class SoakConfig:
    kills: int = 300  # how many faults
    seed: int = 0  # of the plan; 0 = from the clock
    minutes: float = 60.0  # begin no further trial after this time
    only: str = ""  # runs whose name has this word: shards, ddp, …; empty = all


def plan(kills: int, seed: int) -> list:
    """(name of a command, faults) of every trial: `kills` faults in all, of every kind in turn."""
    random, faults, trials = Random(seed), [], {name: [] for name in COMMANDS}
    while len(faults) < kills:
        deck = [kind for kind in KINDS for _ in range(int(KINDS[kind].weight))]
        faults += random.sample(deck, len(deck))
    done = []
    for kind in faults[:kills]:
        name = random.choice([name for name in COMMANDS if suits(kind, COMMANDS[name])])
        trials[name].append(draw(random, COMMANDS[name], [kind]))
        if len(trials[name]) == FAULTS:
            done.append((name, trials.pop(name)))
            trials[name] = []
    return done + [(name, rest) for name, rest in trials.items() if rest]


def strike(trial: Trial, fault: Fault) -> list:
    """Outcomes of a fault. If the run ended before the fault struck, it is tried again, earlier in a new run."""
    outcomes = [trial.strike(fault)]
    while not outcomes[-1].struck and len(outcomes) < 4:
        fault = fault._replace(moment=0.7 * fault.moment)
        outcomes.append(trial.strike(fault))
    return outcomes


def table(counts: dict) -> str:
    """A Markdown table: kind of fault × (times, ended as it should, …)."""
    head = ("fault", "times", "ended as it should", *COLUMNS[1:])
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    total = sum((c for kind, c in counts.items() if kind in KINDS), Counter())
    for kind, c in [*counts.items(), ("all faults", total)]:
        cells = c["times"], c["times"] - c[COLUMNS[0]], *(c[column] for column in COLUMNS[1:])
        lines.append(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def soak(config: SoakConfig, folder: Path) -> int:
    """Make the plan's trials in `folder`, and print what went wrong. Returns the exit code."""
    if not any(config.only in name for name in COMMANDS):
        raise ValueError(f"only={config.only} is in none of the names: {'; '.join(COMMANDS)}")
    for name in [name for name in COMMANDS if config.only not in name]:
        del COMMANDS[name]
    for kind in [kind for kind in KINDS if not any(suits(kind, command) for command in COMMANDS.values())]:
        del KINDS[kind]
    begun, todo, counts, failures = time.time(), plan(config.kills, config.seed), {}, 0
    dataset = make_dataset(folder / "walk")
    reference = cache(lambda name: Trial(folder / f"reference of {name}", COMMANDS[name], dataset))
    for number, (name, faults) in enumerate(todo):
        if time.time() - begun > 60 * config.minutes:
            print(f"time is over: {len(todo) - number} of {len(todo)} trials are left out")
            break
        trial = Trial(folder / str(number), COMMANDS[name], dataset, reference(name))
        for fault in faults:
            for outcome in strike(trial, fault):
                counts.setdefault(fault.kind, Counter())["times"] += outcome.struck
                failures += note(counts[fault.kind], outcome.wrong, f"trial {number} ({name}), {outcome}")
        counts.setdefault(UNDISTURBED, Counter())["times"] += 1
        failures += note(counts[UNDISTURBED], trial.finish(), f"trial {number} ({name}), the end; {faults}")
        struck = sum(c["times"] for kind, c in counts.items() if kind != UNDISTURBED)
        minutes, seconds = divmod(int(time.time() - begun), 60)
        print(
            f"trial {number + 1}/{len(todo)}  {struck} faults  {failures} failures  {minutes}:{seconds:02d}", flush=True
        )
        shutil.rmtree(trial.folder, ignore_errors=True)
    never = [kind for kind in KINDS if not counts.get(kind, {"times": 0})["times"]]
    order = [*KINDS, UNDISTURBED]
    print(f"seed {config.seed}", table(dict(sorted(counts.items(), key=lambda item: order.index(item[0])))), sep="\n\n")
    print(f"\n{failures} failures; kinds that never struck: {', '.join(never) or 'none'}")
    return int(failures > 0)


def note(counter: Counter, wrong: tuple, what: str) -> int:
    """Count what went wrong, once in each column, and print it. Returns 1 if anything did, else 0."""
    counter.update({column for column, _ in wrong})
    if wrong:
        print(f"FAILURE: {what}: {wrong}", flush=True)
    return int(bool(wrong))


@reports_errors
def main() -> int:
    (config,), _ = configure(SoakConfig, description=__doc__)
    config.seed = config.seed or int(time.time())
    print(f"seed {config.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        return soak(config, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
