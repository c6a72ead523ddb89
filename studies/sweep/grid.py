"""What a sweep trains: every combination of config files, values of flags, and seeds."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from configurator import ASKS, PathName, read_arguments, read_flags, read_path
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.engine import split_batch
from nanodnt.optim import make_optimizer
from nanodnt.settings import TrainConfig
from nanodnt.tasks import resolve, task_of
from studies.sweep.runner import ROOT, TrainingRun, make_run, resolve_configs

FLAGS = read_flags(GPTConfig, TrainConfig)
# flags that cannot be swept, and what to do instead
SET_HERE = {"out_dir": "use --out", "seed": "use --seeds"}
SET_HERE |= dict.fromkeys(("init_from", "overwrite", "eval_only"), "leave it out")
SET_HERE["tokens_per_param"] = "sweep each size by itself, with its own --max_iters"


@dataclass
class SweepConfig:
    # --- what ---
    files: str = ""  # config files to try, each put after the others, separated by commas; a+b is
    #   one choice of two files; an empty choice, as in "a,", is none
    seeds: str = "1"  # seeds of every combination: a number n for 1, 2, … n, or a list such as 0,5
    #   (of one: 7,)
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU
    out: PathName = ""  # folder of the runs, sweep.json, sweep.md and sweep.png; empty =
    #   out/sweep/NAME of the first file
    print: bool = False  # print the commands, one a line, and run nothing
    collect: bool = False  # run nothing: write the results of the runs that are finished, and name
    #   the others
    # --- sizes: with several values of n_embd, or of n_layer ---
    coordinates: int = 0  # steps of a coordinate check in place of the runs: how outputs, and their
    #   changes in these steps, follow the size; 0 = none
    for_: str = ""  # config of a large model: print its command with each layout's tuned rate, at
    #   the end; a+b as above

    def __post_init__(self):
        if self.print + self.collect + bool(self.coordinates) > 1:
            raise ValueError(
                "print, collect and coordinates do not go together: print the commands, run them, collect"
            )
        if self.coordinates < 0:
            raise ValueError(f"coordinates={self.coordinates} must not be negative")

    def list_seeds(self) -> list:
        """The seeds. ValueError if the text names none, or one twice."""
        parts = [part.strip() for part in self.seeds.split(",") if part.strip()]
        numbers = [int(part) for part in parts if part.isdecimal()]
        seeds = numbers if "," in self.seeds else range(1, min(sum(numbers), 101) + 1)
        if len(numbers) < len(parts) or not 1 <= len(seeds) <= 100 or len(set(seeds)) < len(seeds):
            allowed = "a number n to 100, for seeds 1 to n, or a list of different seeds: 0,5 (of one: 7,)"
            raise ValueError(f"seeds={self.seeds} must be {allowed}")
        return list(seeds)


class Point(NamedTuple):
    run: TrainingRun
    files: str  # its choice of --files
    flags: dict  # its values of the flags that have several
    seed: int

    def name_without(self, axis: str | None) -> str:
        """Files and flags, but for one flag: what a curve over that flag is called."""
        words = [self.files.replace("config/", "").replace(".py", "")]
        words += [f"{name}={value}" for name, value in self.flags.items() if name != axis]
        return " ".join(filter(None, words)) or "the config"


def split_arguments(argv: list) -> tuple:
    """(flags of SweepConfig, config files, {flag of train.py: its values}) of a command line.
    ValueError for a flag that is unknown, given twice or has no value, and for one that a sweep
    sets itself."""
    own, files, lists = [], [], {}
    ours = read_flags(SweepConfig)
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg in ASKS or name in ours:
            own.append(arg)  # configure() reads these, and says what is wrong with them
        elif not arg.startswith("-"):
            files.append(locate(arg))
        elif name in SET_HERE:
            raise ValueError(f"--{name} cannot be swept: {SET_HERE[name]}")
        elif name in lists:
            raise ValueError(
                f"--{name} is given twice: write --{name}={','.join(lists[name])},{value}"
            )
        else:
            values = value.split(",")
            for text in values:
                read_arguments([arg.removesuffix(value) + text], FLAGS | ours)  # says what is wrong
            lists[name] = values if equals else ["True"]  # a bool needs no value
    return own, files, lists


def locate(file: str) -> str:
    """A config file, from the current folder or else the repository, as the runs name it: relative
    to the repository where it lies in it. ValueError if it is not there."""
    file = read_path(file)
    if not (
        found := next(
            (path.resolve() for path in (Path(file), ROOT / file) if path.is_file()), None
        )
    ):
        raise ValueError(f"there is no config file {file!r}")
    return found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) else str(found)


def list_points(config: SweepConfig, files: list, lists: dict, folder: Path) -> list:
    """Every `Point`, in the order of the command line; the seed changes first. ValueError for one
    that cannot be trained."""
    if not files and not lists and not config.files:
        raise ValueError(
            "there is nothing to sweep: name a config file, and flags with several values"
        )
    swept = [name for name in lists if len(lists[name]) > 1]
    choices = [text.strip().split("+") if text.strip() else [] for text in config.files.split(",")]
    points = []
    for names, values in product(choices, product(*lists.values())):
        chosen = [locate(name.strip()) for name in names]
        flags = dict(zip(lists, values, strict=True))
        every = follow([*files, *chosen], flags, swept) | flags
        runs = {
            seed: make_run(folder, [*files, *chosen], every | {"seed": seed})
            for seed in config.list_seeds()
        }
        check_trainable(next(iter(runs.values())))
        several = {name: flags[name] for name in swept}
        points += [Point(run, "+".join(chosen), several, seed) for seed, run in runs.items()]
    return points


def follow(files: list, flags: dict, swept=()) -> dict:
    """What follows these flags unless it is given too: min_lr, a tenth of learning_rate; where
    n_embd is `swept`, FFNs, and the number of heads, which keep their size; the base of what is
    swept, which is that of the files. ValueError for half heads."""
    more = {}
    if "learning_rate" in flags:
        more["min_lr"] = f"{float(flags['learning_rate']) / 10:g}"
    base = resolve_configs(files)[0]
    for name in ("n_head", "n_kv_head", "n_ff") if "n_embd" in swept else ():
        count, rest = divmod(getattr(base, name) * int(flags["n_embd"]), base.n_embd)
        if rest and name not in flags:
            problem = f"{name} of n_embd={base.n_embd} does not grow to a whole number at n_embd={flags['n_embd']}"
            raise ValueError(f"{problem}: choose a multiple, or give {name} too")
        if count:
            more[name] = count
    if flags.get("parametrization", base.parametrization) != "standard":
        for name in ("n_embd", "n_layer"):
            if name in swept and not getattr(base, f"base_{name}"):
                more[f"base_{name}"] = getattr(base, name)
    return more


def check_trainable(run: TrainingRun, with_data: bool = True) -> tuple:
    """(GPTConfig, TrainConfig). ValueError, which names the run, unless they are allowed and the
    dataset prepared; not `with_data`, a dataset need not be there."""
    try:
        model_config, config = resolve_configs(run.args)
        meta, left_open = task_of(model_config).placeholder_meta(model_config)
        if left_open and with_data:
            meta = load_meta(config.dataset, verify=False)
        _, model = resolve(model_config, config, meta)
        make_optimizer(model, config)
        split_batch(config.batch_size, config.micro_batch_size, 1)
    except ValueError as e:
        raise ValueError(f"{run.path.name}: {e}") from None
    return model_config, config
