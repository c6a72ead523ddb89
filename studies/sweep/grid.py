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

SET_HERE = {"out_dir": "use --out instead", "seed": "use --seeds instead", "init_from": "leave it out"}
SET_HERE |= {"overwrite": "leave it out", "eval_only": "leave it out"}


@dataclass
class SweepConfig:
    # --- what ---
    files: str = ""  # config files to try, each put after the others, separated by commas; a+b is one choice of two
    #   files; an empty choice, as in "a,", is none
    tokens_per_param: float = 0.0  # max_iters follows the size, so that each run reads so many tokens a parameter, and
    #   warm-up is a tenth of it unless given; 0 = as configured
    seeds: str = "1"  # seeds of every combination: a number n for 1, 2, … n, or a list such as 0,5 (of one: 7,)
    # --- how ---
    jobs: int = 0  # runs at a time; 0 = one per CPU core, or one per GPU
    out: PathName = ""  # folder of the runs, sweep.json, sweep.md and sweep.png; empty = out/sweep/NAME of the first
    #   file
    print: bool = False  # print the commands, one a line, and run nothing
    collect: bool = False  # run nothing: write the results of the runs that are finished, and name the others
    # --- sizes: with several values of n_embd, or of n_layer ---
    coordinates: int = 0  # steps of a coordinate check in place of the runs: how outputs, and their changes in these
    #   steps, follow the size; 0 = none
    for_: str = ""  # config of a large model: print its command with each layout's tuned rate, at the end; a+b as above

    def __post_init__(self):
        modes = [name for name in ("print", "collect", "coordinates") if getattr(self, name)]
        together = "do not go together: print the commands, run them, then collect"
        for is_so, text in (
            (len(modes) > 1, f"{' and '.join(modes)} {together}"),
            (self.for_ and modes not in ([], ["collect"]), f"for and {''.join(modes)} {together}"),
            (self.out and Path(self.out).is_file(), f"out={self.out} is a file: name a folder"),
            (not 0 <= self.coordinates <= 10_000, f"coordinates={self.coordinates} must be 0, which is off, to 10000"),
            (not 0 <= self.tokens_per_param <= 1e6, f"tokens_per_param={self.tokens_per_param} must be from 0 to 1e6"),
        ):
            if is_so:
                raise ValueError(text)

    def list_seeds(self) -> list:
        """The seeds. ValueError if the text names none, or one twice."""
        parts = [part.strip() for part in self.seeds.split(",") if part.strip()]
        numbers = [int(part) for part in parts if part.isdecimal()]
        if not parts or len(set(numbers)) < len(parts):
            raise ValueError(f"seeds={self.seeds} must be a number n, for 1 to n, or a list of different seeds: 0,5")
        seeds = numbers if "," in self.seeds else list(range(1, min(numbers[0], 101) + 1))
        if not 1 <= len(seeds) <= 100:
            one = f"; for the one seed {numbers[0]} write --seeds={numbers[0]}," if len(numbers) == 1 else ""
            raise ValueError(f"seeds={self.seeds}: 1 to 100 are possible{one}")
        return seeds


class Point(NamedTuple):
    run: TrainingRun
    files: str  # its choice of --files
    flags: dict  # its values of the flags that have several
    seed: int


def split_arguments(argv: list) -> tuple:
    """(flags of SweepConfig, config files, {flag of train.py: its values}) of a command line. ValueError for a flag
    that is unknown, given twice or has no value, and for one that a sweep sets itself."""
    own, files, lists = [], [], {}
    train, ours = read_flags(GPTConfig, TrainConfig), read_flags(SweepConfig)
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg in ASKS or (name in ours and arg.startswith("--")):
            own.append(arg)  # configure() reads these, and says what is wrong with them
        elif not arg.startswith("-") and not (equals and name in train):
            files.append(locate(arg))
        elif name in SET_HERE:
            raise ValueError(f"--{name} is set for each run by the sweep: {SET_HERE[name]}")
        elif name in lists:
            raise ValueError(f"--{name} is given twice: write --{name}={','.join(lists[name])},{value}")
        else:
            values = [part.strip() for part in value.split(",")] if equals else ["True"]  # a bool needs no value
            if len(set(values)) < len(values) or "" in values:
                raise ValueError(f"--{name}={value}: values must differ and not be empty; no space after a comma")
            for word in [f"--{name}={text}" for text in values] if equals and arg.startswith("--") else [arg]:
                read_arguments([word], train | ours)  # says what is wrong
            lists[name] = [str(int(float(text))) for text in values] if train[name].hint is int else values  # 64.0
    if names := [read_path(name) for name in lists.get("dataset", ())]:
        # a path is meant from here; the runs start elsewhere
        paths = {name for name in names if "/" in name and (Path(name) / "meta.json").is_file()}
        lists["dataset"] = [str(Path(name).resolve()) if name in paths else name for name in names]
    return own, files, lists


def locate(file: str) -> str:
    """A config file, from the current folder or else the repository, as the runs name it: relative to the repository
    where it lies in it. ValueError if it is not there."""
    file = read_path(file)
    if not (found := next((path.resolve() for path in (Path(file), ROOT / file) if path.is_file()), None)):
        raise ValueError(f"there is no config file {file!r}")
    return found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) else str(found)


def list_points(config: SweepConfig, files: list, lists: dict, folder: Path) -> list:
    """Every `Point`, in the order of the command line; the seed changes first. ValueError for one that cannot be
    trained, and for two that are the same. min_lr is a tenth of a given learning_rate, unless it is given too."""
    if not files and not lists and not config.files:
        raise ValueError("there is nothing to sweep: name a config file, and flags with several values")
    swept = [name for name in lists if len(lists[name]) > 1]
    choices = [text.strip().split("+") if text.strip() else [] for text in config.files.split(",")]
    points, seen, seeds = [], [], config.list_seeds()
    first = [*swept, "seed"]
    for names, values in product(choices, product(*lists.values())):
        chosen = [locate(name.strip()) for name in names]
        flags = dict(zip(lists, values, strict=True))
        every = follow([*files, *chosen], flags, swept, config.tokens_per_param) | flags
        runs = {s: make_run(folder, [*files, *chosen], every | {"seed": s}, first=first) for s in seeds}
        run, settings = runs[seeds[0]], check_trainable(runs[seeds[0]])
        if same := [name for name, others in seen if others == settings]:
            raise ValueError(f"{same[0]} and {run.path.name} have the same settings: leave one out")
        seen.append((run.path.name, settings))
        values = {name: flags[name] for name in swept}
        points += [Point(run, "+".join(chosen), values, seed) for seed, run in runs.items()]
    return points


def follow(files: list, flags: dict, swept=(), tokens_per_param: float = 0.0) -> dict:
    """What follows these flags unless it is given too: min_lr, a tenth of learning_rate; where n_embd is `swept`, FFNs,
    and the number of heads, which keep their size; the base of what is swept, which is that of the files; with
    `tokens_per_param` the steps. ValueError for half heads."""
    found = {"min_lr": f"{float(flags['learning_rate']) / 10:g}"} if "learning_rate" in flags else {}
    base = resolve_configs(files)[0]
    for name in ("n_head", "n_kv_head", "n_ff") if "n_embd" in swept else ():
        count, rest = divmod(getattr(base, name) * int(flags["n_embd"]), base.n_embd)
        if rest and name not in flags:
            what = f"{name} of n_embd={base.n_embd} does not grow to a whole number at n_embd={flags['n_embd']}"
            raise ValueError(f"{what}: choose a multiple, or give {name} too")
        found |= {name: count} if count else {}
    for name in ("n_embd", "n_layer") if flags.get("parametrization", base.parametrization) != "standard" else ():
        found |= {f"base_{name}": getattr(base, name)} if name in swept and not getattr(base, f"base_{name}") else {}
    if tokens_per_param:
        model_config, config = resolve_configs([*files, *(f"--{name}={x}" for name, x in (found | flags).items())])
        _, model = resolve(model_config, config, load_meta(config.dataset, verify=False))
        tokens = tokens_per_param * model.num_params(positions=False)
        steps = max(1, round(tokens / (config.batch_size * model_config.block_size)))
        found |= dict(max_iters=steps, lr_decay_iters=steps, warmup_iters=steps // 10, eval_interval=steps)
    return found


def check_trainable(run: TrainingRun, with_data: bool = True) -> tuple:
    """(GPTConfig, TrainConfig). ValueError, which names the run, unless they are allowed and the dataset prepared; not
    `with_data`, a dataset need not be there."""
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
