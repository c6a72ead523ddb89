"""A `Study`, the claims of one scale as data, and the reader of the claims file that holds it.

A claim has one `Number` that decides, a sum of arms such as "A - B", each measured seed by seed:
arms of the same seed see the same data. The claim's protocol lists the paper's settings with their
sources; the study's own are looked up in the arms' configurations, and a difference must have a
reason.
"""

import math
import re
import runpy
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from model import GPTConfig
from nanodnt.settings import TrainConfig

# the classes of verdicts, which docs/claims.md explains
CLASSES = (
    "reproduced",
    "holds",
    "same direction",
    "smaller than matters",
    "opposite",
    "too early to say",
    "undecided",
    "cannot be judged",
)


class Arm(NamedTuple):
    """A configuration, and where its learning rate comes from."""

    base: str  # key of Study.bases
    files: str = ""  # config files and flags after the base's; a file of config/init/ takes the
    #   place of the base's
    lr: float | None = None  # a given learning rate; None: tuned, by factors of two from the rate
    #   in the files
    of: str = ""  # take the tuned learning rate of this arm
    times: float = 1.0  # multiply that rate by this
    floor: float = 0.1  # the learning rate ends at this share of itself; 0: at the config files'
    #   min_lr
    tries: tuple[str, ...] = ()  # further files or flags, "" for none: each is tuned, and the best
    #   is taken
    keep: bool = False  # keep ten checkpoints, for measures over training

    @property
    def rate_from(self) -> str:
        if self.of and self.times != 1:
            return f"{self.times:g} × that of {self.of}"
        if self.of:
            return f"that of {self.of}"
        return "tuned" if self.lr is None else "given"


class Number(NamedTuple):
    """A sum of arms, measured seed by seed."""

    says: str  # the number's name on the page
    value: str  # "arm", "arm - arm + arm …"
    published: float | None = None  # the paper's value
    measure: str = "loss"  # or a key of MEASURES in studies/claims/quantities.py
    steps: int = 0  # the step after which it is measured, in the figure of differences over steps;
    #   0: it is not drawn there
    seeds: int = 0  # of a side number: number of seeds; 0 = that of the claim, but at most 4


class Setting(NamedTuple):
    """One line of a protocol."""

    name: str  # a flag, or a share such as "min_lr / rate" of `settings_of`
    paper: object  # the paper's value
    source: str  # section, table or line of the paper with that value
    why: str = ""  # the reason, where the study has another value


class Claim(NamedTuple):
    id: str
    statement: str
    number: Number  # the primary number, which decides
    expect: str = "below"  # or "above" 0; or "equal": within ± the smallest effect; or "not above":
    #   below + the smallest effect
    smallest: float | None = None  # the smallest effect that matters; None: half of the published
    #   effect
    sides: tuple[Number, ...] = ()  # further numbers, which are shown and decide nothing
    paper: str = ""  # the paper's short name; "" for a claim of your own
    published: str = ""  # the paper's numbers, and where they are
    protocol: tuple[Setting, ...] = ()
    note: str = ""  # a paragraph for the reader of the page
    cannot: str = ""  # why this scale cannot judge the claim, written before the runs
    withheld: str = ""  # why the number, planned and run like the others, gets no verdict
    late: str = ""  # where the paper places the effect late in training, and what of that is our
    #   reading; a claim that the runs do not show is then too early to say
    seeds: int = 0  # number of seeds; 0 = as many as the spread over the tuning seeds asks for
    plain: dict[str, str] = {}  # {class of the verdict, of CLASSES: the finding in plain words}

    @property
    def numbers(self) -> tuple[Number, ...]:
        return self.number, *self.sides

    @property
    def toward(self) -> int:
        """The sign of the claimed effect."""
        return -1 if self.expect in ("below", "not above") else 1

    @property
    def effect(self) -> float:
        """The smallest effect that matters."""
        return abs(self.number.published) / 2 if self.smallest is None else self.smallest


class Trials(NamedTuple):
    """The tuning of the arms of a base, where all have equally many trials: each is trained once,
    with the first tuning seed, at each of these learning rates, and the lowest loss chooses."""

    rates: tuple[float, ...]
    flags: str = ""  # flags of these runs, after the arm's: fewer steps, for example


class Study(NamedTuple):
    title: str  # the scale: models, data, hardware
    bases: dict[str, str]  # {name: config files and flags that come first}
    arms: dict[str, Arm]
    claims: list[Claim]
    tuned: bool = True  # False: the config files' own rates, and runs are on all GPUs by torchrun,
    #   one at a time
    paired: bool = True  # plan seeds from the spread of the difference between the arms, and judge
    #   by this difference alone; False: the rule before 2026-11-28, see docs/claims.md
    trials: dict[str, Trials] = {}  # {base: the trials of its arms}, as many for each arm; {}: a
    #   grid of rates for each arm, which grows
    side_by_side: bool = False  # the page begins with one table of the numbers of all claims
    target: float = 0.0  # of a study with trials: a loss to be reached, (target − mean)·√n on the
    #   page
    records: tuple[str, ...] = ()  # further records, paths from the repository's root: runs that
    #   they have are not trained again
    digits: int = 3  # decimals of losses on the page
    note: str = ""  # paragraphs for the page, with an empty line between them
    others: dict[str, list[tuple]] = {}  # {paper: [(who and where, what they did and found, "+",
    #   "−" or "0")]}


class ProtocolRow(NamedTuple):
    """A setting of the paper beside the study's."""

    name: str
    paper: object
    source: str
    ours: list[object]  # different values of the claim's arms
    why: str


def split_value(value: str) -> list[tuple[int, str]]:
    """[(sign, arm)] of "A - B + C"."""
    words = re.findall(r"([+-]) (.+?)(?= [+-] |$)", f"+ {value}")
    return [(-1 if sign == "-" else 1, arm) for sign, arm in words]


def weights_of(value: str) -> Counter[str]:
    """{arm: its weight} in "A - B + C - B", where B has -2."""
    weights = Counter()
    for sign, arm in split_value(value):
        weights[arm] += sign
    return weights


def squared_weights(value: str) -> int:
    """The sum of the squares of the arms' weights: the variance of a number whose arms are
    independent and have variance 1."""
    return sum(weight**2 for weight in weights_of(value).values())


def arms_in(numbers: Iterable[Number]) -> list[str]:
    """The names of all arms in these numbers, each once."""
    names = {}
    for number in numbers:
        for _, name in split_value(number.value):
            names[name] = True
    return list(names)


def load_study(path: str, measures: set[str]) -> Study:
    """The `study` of a claims file, which is executed. ValueError, in one line with the place in
    the file, if it has none or if the study contradicts itself."""
    if not Path(path).exists():
        moved = path.replace("/config/studies/", "/studies/")
        advice = f": it is now {moved}" if Path(moved).exists() else ""
        raise ValueError(f"there is no claims file {path}{advice}")
    try:
        study = runpy.run_path(path).get("study")
    except (Exception, SystemExit) as error:  # anything in the user's file may fail
        raise ValueError(
            f"{path}:{line_of(error, path)}: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(study, Study):
        raise ValueError(f"{path} has no `study = Study(…)`: docs/claims.md shows one")
    try:
        problems = list(find_problems(study, measures))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path}: a field of the study has another type: {error}") from None
    for name, problem in problems:
        raise ValueError(f"{locate(path, name)}: {problem}")
    return study


def line_of(error: BaseException, path: str) -> int | str:
    """The line of this file at which it raised the error, or could not be parsed."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return lines[-1] if lines else getattr(error, "lineno", "?")


def locate(path: str, name: str) -> str:
    """FILE:LINE of the first place in a claims file where a string is `name`; without the line
    where there is none."""
    before, found, _ = Path(path).read_text(encoding="utf-8").partition(f'"{name}"')
    return f"{path}:{before.count(chr(10)) + 1}" if found else path


def find_problems(study: Study, measures: set[str]) -> Iterator[tuple[str, str]]:
    """The contradictions in a study: the name of an arm or claim, and what is wrong with it."""
    names = []  # (arm or claim, where a name is used, the name, the names allowed there)
    n_trials = {}  # {arm: number of its trials}
    for name, arm in study.arms.items():
        names.append((name, f"base of arm {name!r}", arm.base, study.bases))
        if arm.of:
            names.append((name, f"of of arm {name!r}", arm.of, study.arms))
        elif study.trials and arm.lr is None:
            rates = study.trials.get(arm.base, Trials(())).rates
            n_trials[name] = len(rates) * len(arm.tries or ("",))
    numbers = {n: name for name, n in n_trials.items()}
    if len(numbers) > 1 or 0 in numbers:
        problem = "arms must have as many trials each, at least one: rates of the base times tries"
        yield numbers[min(numbers)], f"{problem} are {numbers}"
    if (study.trials and not study.tuned) or (study.target and not study.trials):
        yield "trials", "trials needs tuned=True, and target needs trials"
    signs = ("below", "above", "equal", "not above")
    for claim in study.claims:
        where = f"claim {claim.id}"
        has_effect = claim.number.published or claim.smallest is not None
        if not has_effect or claim.effect <= 0:
            problem = "smallest, the smallest effect that matters, must be a number above 0"
            yield claim.id, f"{where}: {problem}"
        if study.trials and not claim.seeds and not claim.cannot:
            problem = "trials has one tuning seed, which shows no spread: give the claim its seeds"
            yield claim.id, f"{where}: {problem}"
        names.append((claim.id, f"expect of {where}", claim.expect, signs))
        for name in arms_in(claim.numbers):
            names.append((claim.id, f"an arm of {where}", name, study.arms))
        for word in claim.plain:
            names.append((claim.id, f"a class in plain of {where}", word, CLASSES))
        for number in claim.numbers:
            names.append((claim.id, f"a measure of {where}", number.measure, measures))
    for owner, where, name, allowed in names:
        if name not in allowed:
            yield owner, f"{where}: {name!r} is not one of {', '.join(sorted(allowed))}"
    for name, count in Counter(claim.id for claim in study.claims).items():
        if count > 1:
            yield name, f"two claims have one id, {name!r}"


def settings_of(model_config: GPTConfig, config: TrainConfig) -> dict[str, object]:
    """{name in a protocol: value}: the flags, and shares of another flag, which a shorter run can
    have in common with the paper's."""
    settings = asdict(model_config) | asdict(config)
    settings["tokens a step"] = config.batch_size * model_config.block_size
    settings["warm-up / steps"] = config.warmup_iters / config.max_iters
    settings["min_lr / rate"] = config.min_lr / config.learning_rate
    settings["FFN width / width"] = model_config.ffn_width / model_config.n_embd
    return settings


def compare_protocol(claim: Claim, settings: list[dict[str, object]]) -> list[ProtocolRow]:
    """The paper's settings beside those of the claim's arms; of a claim of your own, those that
    its protocol fixes. ValueError where an arm has another value and no reason is given."""
    owner = "paper" if claim.paper else "protocol"
    rows = []
    for name, paper, source, why in claim.protocol:
        values = [arm.get(name) for arm in settings]
        others = [value for value in values if not is_same(value, paper)]
        if others and not why:
            raise ValueError(
                f"claim {claim.id}: {name} is {others[0]!r}, and {paper!r} in the {owner} "
                f"({source}): give the arms the {owner}'s value, or the setting a reason"
            )
        rows.append(ProtocolRow(name, paper, source, list(dict.fromkeys(values)), why))
    return rows


def is_same(a: object, b: object) -> bool:
    """Whether two settings are equal; two numbers, up to rounding."""
    try:
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    except TypeError:
        return a == b
