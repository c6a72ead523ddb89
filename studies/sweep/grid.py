"""The runs of a sweep: every combination of config files, values of flags, and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from configurator import ASKS, PathName, read_arguments, read_flags, read_path
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.engine import split_batch
from nanodnt.optim import make_optimizer
from nanodnt.run.metrics import read_formats
from nanodnt.settings import TrainConfig
from nanodnt.tasks import resolve, task_of
from studies.sweep.runner import (
    ROOT,
    Configs,
    TrainingRun,
    make_run,
    plain_number,
    rename_run,
    resolve_configs,
)

FLAGS = read_flags(GPTConfig, TrainConfig)
# flags that cannot be swept, and what to do instead
SET_HERE = {
    "out_dir": "use --out",
    "seed": "use --seeds",
    "init_from": "leave it out",
    "overwrite": "leave it out",
    "eval_only": "leave it out",
    "tokens_per_param": "sweep each size by itself, with its own --max_iters",
}


@dataclass
class SweepConfig:
    # --- what ---
    files: str = ""  # config files to try, separated by commas; each of them follows the other
    #   files. a+b is one choice of two files; an empty choice, as in "a,", adds no file
    seeds: str = "1"  # seeds of every combination: a number n for 1, 2, … n, or a list such as 0,5.
    #   A list of one seed ends with a comma: 7,
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU
    out: PathName = ""  # folder of the runs, sweep.json, sweep.md and sweep.png; empty =
    #   out/sweep/NAME of the first file
    format: str = "png"  # of the figure: png, pdf or svg, or several, such as png,pdf
    print: bool = False  # print the commands, one a line, and run nothing
    collect: bool = False  # run nothing: write the results of the runs that are finished, and name
    #   the others
    # --- sizes: with several values of n_embd, or of n_layer ---
    coordinates: int = 0  # steps of a coordinate check, which replaces the runs: it measures how
    #   outputs, and their changes in these steps, follow the size; 0 = no check
    for_: str = ""  # config of a large model; at the end its command is printed, with each layout's
    #   tuned learning rate; a+b as above

    def __post_init__(self) -> None:
        self.formats = read_formats(self.format)
        if self.print + self.collect + bool(self.coordinates) > 1:
            raise ValueError(
                "print, collect and coordinates do not go together: print the commands, run them, "
                "collect"
            )
        if self.coordinates < 0:
            raise ValueError(f"coordinates={self.coordinates} must not be negative")

    def list_seeds(self) -> list[int]:
        """The seeds. ValueError if the text names none, or one twice."""
        parts = [part.strip() for part in self.seeds.split(",") if part.strip()]
        numbers = [int(part) for part in parts if part.isdecimal()]
        if "," in self.seeds:
            seeds = numbers
        else:
            seeds = list(range(1, min(sum(numbers), 101) + 1))
        if len(numbers) < len(parts) or not 1 <= len(seeds) <= 100 or len(set(seeds)) < len(seeds):
            raise ValueError(
                f"seeds={self.seeds} must be a number n to 100, for seeds 1 to n, or a list of "
                "different seeds: 0,5 (of one: 7,)"
            )
        return seeds


class Point(NamedTuple):
    """One run of a sweep."""

    run: TrainingRun
    files: str  # the choice of --files
    flags: dict[str, str]  # the values of the flags that have several values in the sweep
    seed: int

    def name_without(self, axis: str | None) -> str:
        """The name of a curve over the flag `axis`: the point's files and its other flags."""
        words = [self.files.replace("config/", "").replace(".py", "")]
        words += [f"{name}={value}" for name, value in self.flags.items() if name != axis]
        return " ".join(filter(None, words)) or "the config"


class SweepArguments(NamedTuple):
    """The parts of a command line of sweep.py."""

    own: list[str]  # flags of SweepConfig
    files: list[str]  # config files
    lists: dict[str, list[str]]  # {flag of train.py: its values}


def split_arguments(argv: list[str]) -> SweepArguments:
    """The parts of a command line. ValueError for a flag that is unknown, given twice or has no
    value, and for one that a sweep sets itself."""
    own = []
    files = []
    lists = {}
    ours = read_flags(SweepConfig)
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg in ASKS or name in ours:
            own.append(arg)  # configure() reads these, and reports mistakes in them
        elif not arg.startswith("-"):
            files.append(locate(arg))
        elif name in SET_HERE:
            raise ValueError(f"--{name} cannot be swept: {SET_HERE[name]}")
        elif name in lists:
            raise ValueError(
                f"--{name} is given twice: write --{name}={','.join(lists[name])},{value}"
            )
        else:
            # keyword arguments have commas of their own
            values = [value] if name == "optimizer_args" else value.split(",")
            for text in values:
                read_arguments([arg.removesuffix(value) + text], FLAGS | ours)  # reports a mistake
            lists[name] = values if equals else ["True"]  # a bool needs no value
    return SweepArguments(own, files, lists)


def locate(file: str) -> str:
    """The path of a config file in the current folder, or else in the repository; relative to the
    repository if the file lies in it. ValueError if there is no such file."""
    file = read_path(file)
    for path in (Path(file).resolve(), (ROOT / file).resolve()):
        if path.is_file():
            return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    raise ValueError(f"there is no config file {file!r}")


def list_points(
    config: SweepConfig, files: list[str], lists: dict[str, list[str]], folder: Path
) -> list[Point]:
    """Every point, in the order of the command line; the seed changes first. ValueError for one
    that cannot be trained."""
    if not files and not lists and not config.files:
        raise ValueError(
            "there is nothing to sweep: name a config file, and flags with several values"
        )
    swept = [name for name in lists if len(lists[name]) > 1]
    choices = []
    for text in config.files.split(","):
        choices.append(text.strip().split("+") if text.strip() else [])
    points = []
    for names, values in product(choices, product(*lists.values())):
        chosen = [locate(name.strip()) for name in names]
        flags = dict(zip(lists, values, strict=True))
        swept_flags = {name: flags[name] for name in swept}
        varies = []
        if len(choices) > 1:  # with the folder: several have a file of the same name
            varies = [f"{Path(file).parent.name}/{Path(file).stem}" for file in chosen]
        varies += [f"{name}{plain_number(value)}" for name, value in swept_flags.items()]
        all_flags = follow([*files, *chosen], flags, swept) | flags
        for i, seed in enumerate(config.list_seeds()):
            run = make_run(folder, [*files, *chosen], all_flags | {"seed": seed})
            run = rename_run(run, [*varies, f"seed{seed}"])
            if i == 0:  # all seeds pass the same checks
                check_trainable(run)
            if any(run == point.run for point in points):
                raise ValueError(f"{run.path.name} is there twice: give each value and file once")
            points.append(Point(run, "+".join(chosen), swept_flags, seed))
    return points


def follow(
    files: list[str], flags: dict[str, str], swept: Sequence[str] = ()
) -> dict[str, str | int]:
    """The flags that follow from these, unless they are given too.

    min_lr is a tenth of learning_rate. Where n_embd is `swept`, FFNs grow with it, and so does the
    number of heads, which keep their size. The base of a swept size is the size of the files.
    ValueError where a number of heads would not be whole."""
    more = {}
    if "learning_rate" in flags:
        more["min_lr"] = f"{float(flags['learning_rate']) / 10:g}"
    base = resolve_configs(files)[0]
    if "n_embd" in swept:
        n_embd = int(flags["n_embd"])
        for name in ("n_head", "n_kv_head", "n_ff"):
            count, remainder = divmod(getattr(base, name) * n_embd, base.n_embd)
            if remainder and name not in flags:
                raise ValueError(
                    f"{name} of n_embd={base.n_embd} does not grow to a whole number at "
                    f"n_embd={n_embd}: choose a multiple, or give {name} too"
                )
            if count:
                more[name] = count
    if flags.get("parametrization", base.parametrization) != "standard":
        for name in ("n_embd", "n_layer"):
            if name in swept and not getattr(base, f"base_{name}"):
                more[f"base_{name}"] = getattr(base, name)
    return more


def check_trainable(run: TrainingRun, with_data: bool = True) -> Configs:
    """The run's configurations. ValueError, which names the run, unless they are allowed and the
    dataset is prepared (`with_data=False`: a dataset need not be there)."""
    try:
        configs = resolve_configs(run.args)
        model_config, config = configs
        meta, left_open = task_of(model_config).placeholder_meta(model_config)
        if left_open and with_data:
            meta = load_meta(config.dataset, verify=False)
        _, model = resolve(model_config, config, meta)
        make_optimizer(model, config)
        split_batch(config.batch_size, config.micro_batch_size, 1)
    except ValueError as e:
        raise ValueError(f"{run.path.name}: {e}") from None
    return configs
