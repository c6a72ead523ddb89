"""Hundreds of faults of every kind, at random moments of tiny runs. Exit code 1 if one of them did
lasting harm.

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
from support.faults import COMMANDS, ERRORS, KILLS, STOPS, Trial, draw
from support.runs import make_dataset

FAULTS = 8  # of one trial


@dataclass
class SoakConfig:
    kills: int = 300  # how many faults
    seed: int = 0  # of the plan; 0 = from the clock
    minutes: float = 60.0  # begin no further trial after this time
    only: str = ""  # runs whose name has this word: shards, muon, …; empty = all


def plan(kills: int, random: Random, names: list) -> list:
    """(name of a command, faults) of every trial: `kills` faults in all."""
    trials = []
    for left in range(kills, 0, -FAULTS):
        name = random.choice(names)
        kinds = 3 * KILLS + 2 * STOPS + ERRORS
        trials.append(
            (name, [draw(random, COMMANDS[name], kinds) for _ in range(min(left, FAULTS))])
        )
    return trials


def soak(config: SoakConfig, folder: Path) -> int:
    """Make the plan's trials in `folder`, and print what went wrong. Returns the exit code."""
    names = [name for name in COMMANDS if config.only in name]
    if not names:
        raise ValueError(f"only={config.only} is in none of the names: {'; '.join(COMMANDS)}")
    dataset, begun, failures, counts = make_dataset(folder / "walk"), time.time(), 0, Counter()
    reference = cache(lambda name: Trial(folder / f"reference of {name}", COMMANDS[name], dataset))
    todo = plan(config.kills, Random(config.seed), names)
    for number, (name, faults) in enumerate(todo, 1):
        minutes = (time.time() - begun) / 60
        if minutes > config.minutes:
            print(f"time is over: {len(todo) - number + 1} of {len(todo)} trials are left out")
            break
        trial = Trial(folder / str(number), COMMANDS[name], dataset, reference(name))
        found = []
        for fault in faults:
            outcome = trial.strike(fault)
            counts[f"{fault.what}, {fault.place}"] += set(outcome.codes) != {
                0
            } or fault.what.endswith("once")
            found += [f"{outcome}"] * bool(outcome.wrong)
        found += [f"at the end: {wrong}" for wrong in trial.finish()]
        failures += len(found)
        for wrong in found:
            print(f"FAILURE: trial {number} ({name}): {wrong}")
        progress = f"trial {number}/{len(todo)}  {counts.total()} faults  {failures} failures"
        print(f"{progress}  {minutes:.1f} min", flush=True)
        shutil.rmtree(trial.folder, ignore_errors=True)
    print("", *(f"{times} × {kind}" for kind, times in sorted(counts.items())), sep="\n")
    return int(failures > 0)


@reports_errors
def main() -> int:
    (config,), _ = configure(SoakConfig, description=__doc__)
    config.seed = config.seed or int(time.time())
    print(f"seed {config.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        return soak(config, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
