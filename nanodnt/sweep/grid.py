"""What a sweep trains: every combination of config files, values of flags, and seeds."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from configurator import read_knobs
from model import GPT, GPTConfig
from nanodnt.data import load_meta
from nanodnt.optim import fill_defaults
from nanodnt.settings import TrainConfig
from nanodnt.sweep.runner import ROOT, TrainingRun, make_run, resolve_configs

SET_HERE = {
    "out_dir": "--out",
    "init_from": "nothing",
    "overwrite": "nothing",
    "seed": "--seeds",
}  # what to use instead


@dataclass
class SweepConfig:
    # --- what ---
    files: str = ""  # config files to try after the others, separated by commas; a+b stands for both, one after another
    seeds: str = "1"  # seeds of every combination: a number n for 1, 2, … n, or a list such as 0,5 (of one: 7,)
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, 4 on a GPU
    out: str = ""  # folder of the runs, sweep.json, sweep.md and sweep.png; empty = out/sweep/NAME, of the first file
    print: bool = False  # print the commands, one a line, and run nothing

    def check(self):
        """ValueError for values that make no sense."""
        self.list_seeds()
        if self.jobs < 0:
            raise ValueError(f"jobs={self.jobs} must not be negative (0 = chosen for the machine)")

    def list_seeds(self) -> list:
        """The seeds. ValueError if the text names none, or one twice."""
        parts = [part.strip() for part in self.seeds.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
            raise ValueError(f"seeds={self.seeds} must be a number n, for 1 to n, or a list of different seeds: 0,5")
        seeds = list(map(int, parts)) if "," in self.seeds else list(range(1, int(parts[0]) + 1))
        if not 1 <= len(seeds) <= 100:
            raise ValueError(f"seeds={self.seeds}: between 1 and 100 seeds are possible")
        return seeds


class Point(NamedTuple):
    """One run of a sweep, and where it stands in it."""

    run: TrainingRun
    files: str  # its choice of --files
    flags: dict  # its values of the flags that have several
    seed: int


def split_arguments(argv: list) -> tuple:
    """(flags of SweepConfig, config files, {flag of train.py: its values}) of a command line. ValueError for a flag
    that is given twice, that has an empty value, or that a sweep sets itself."""
    own, files, lists = [], [], {}
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("-"):
            files.append(arg)
        elif name in SweepConfig.__dataclass_fields__ or not equals or not arg.startswith("--"):
            own.append(arg)  # configure() says what is wrong with it
        elif name in SET_HERE:
            raise ValueError(f"--{name} is set for each run by the sweep: use {SET_HERE[name]} instead")
        elif name in lists:
            raise ValueError(
                f"--{name} is given twice: write its values with commas, --{name}={lists[name][0]},{value}"
            )
        else:
            lists[name] = [part.strip() for part in value.split(",")]
            if len(set(lists[name])) < len(lists[name]) or "" in lists[name]:
                raise ValueError(f"--{name}={value}: values must differ and not be empty")
    unknown = [name for name in lists if name not in read_knobs(GPTConfig, TrainConfig)]
    own += [f"--{name}=" for name in unknown]  # configure() knows close names
    return own, files, lists


def list_points(config: SweepConfig, files: list, lists: dict, folder: Path) -> list:
    """Every `Point`, in the order of the command line; the seed changes first. ValueError for one that cannot be
    trained. Where learning_rate has several values, min_lr is a tenth of each, unless it is given."""
    choices = [choice.strip() for choice in config.files.split(",")]
    if len(set(choices)) < len(choices):
        raise ValueError(f"--files={config.files}: files must differ")
    swept = [name for name in lists if len(lists[name]) > 1]
    fixed = {name: values[0] for name, values in lists.items() if name not in swept}
    points, seeds = [], config.list_seeds()
    for choice, values in product(choices, product(*(lists[name] for name in swept))):
        flags = dict(zip(swept, values, strict=True))
        extra = {}
        if "learning_rate" in flags and "min_lr" not in lists:
            extra["min_lr"] = _tenth(flags["learning_rate"])
        chosen = [name.strip() for name in choice.split("+") if name.strip()]
        for seed in seeds:
            run = make_run(folder, [*files, *chosen], fixed | flags | extra | {"seed": seed})
            points.append(Point(run, choice, flags, seed))
    for point in points[:: len(seeds)]:
        check_trainable(point.run)
    return points


def _tenth(rate: str) -> str:
    try:
        return f"{float(rate) / 10:g}"
    except ValueError:
        raise ValueError(f"--learning_rate={rate} is not a number") from None


def check_trainable(run: TrainingRun) -> None:
    """ValueError, which names the run, unless its settings are allowed and its dataset is prepared."""
    flags, config = resolve_configs(run.args)
    try:
        config.check()
        fill_defaults(config)
        flags.vocab_size = flags.vocab_size or load_meta(config.dataset, verify=False)["vocab_size"]
        GPT.empty(flags)
    except ValueError as e:
        raise ValueError(f"{run.path.name}: {e}") from None


def default_folder(files: list) -> Path:
    return ROOT / "out" / "sweep" / (Path(files[0]).stem if files else "base")
