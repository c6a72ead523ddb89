"""What a claims file holds: a `Study`, the claims of one scale as data, and how such a file is
read.

A claim has one `Number` that decides, a sum of arms such as "A - B", each measured seed by seed:
arms of the same seed see the same data. Its protocol says, setting by setting, what the paper has
and where it says so; what a study has in its place is looked up in the arms' own configurations,
and a difference must have a reason.
"""

import math
import re
import runpy
import traceback
from collections import Counter
from dataclasses import asdict
from typing import NamedTuple


class Arm(NamedTuple):
    base: str  # of Study.bases
    files: str = ""  # config files and flags after the base's; a file of config/init/ takes the
    #   place of the base's
    lr: float | None = None  # a given learning rate; None: tuned, by factors of two from that of
    #   the files
    of: str = ""  # take the tuned learning rate of this arm
    times: float = 1.0  # multiply it by this
    floor: float = 0.1  # the learning rate ends at this share of itself; 0: where the config files
    #   say
    tries: tuple = ()  # further files or flags, "" for none: each is tuned, and the best is taken
    keep: bool = False  # keep ten checkpoints, for what is measured over training

    @property
    def rate_from(self) -> str:
        if self.of:
            return (
                f"{self.times:g} × that of {self.of}" if self.times != 1 else f"that of {self.of}"
            )
        return "tuned" if self.lr is None else "given"


class Number(NamedTuple):
    says: str
    value: str  # "arm", "arm - arm + arm …"
    published: float | None = None  # the paper's value
    measure: str = "loss"  # or a key of studies/claims/quantities.py


class Setting(NamedTuple):
    name: str  # a flag, or a key of SHARES
    paper: object  # the paper's value
    source: str  # where the paper says so
    why: str = ""  # why the study has another one


class Claim(NamedTuple):
    id: str
    statement: str
    number: Number  # that decides
    expect: str = "below"  # or "above" 0; or "equal", "not above": within ±, below + the smallest
    #   effect
    smallest: float | None = None  # the smallest effect that matters; None: half of the published
    #   one
    sides: tuple = ()  # further numbers: shown, they decide nothing
    paper: str = ""
    published: str = ""  # the paper's numbers, and where they are
    protocol: tuple = ()  # of `Setting`
    note: str = ""  # what else a reader must know
    cannot: str = ""  # why this scale cannot judge it, written before the runs
    seeds: int = 0  # so many, and not as many as the spread asks for
    plain: dict = {}  # {class of the verdict: what was found, in plain words}

    @property
    def numbers(self) -> tuple:
        return self.number, *self.sides

    @property
    def toward(self) -> int:
        """What turns the claimed sign into +."""
        return -1 if self.expect in ("below", "not above") else 1

    @property
    def effect(self) -> float:
        """The smallest effect that matters."""
        return abs(self.number.published) / 2 if self.smallest is None else self.smallest


class Study(NamedTuple):
    title: str  # the scale: models, data, hardware
    bases: dict  # {name: config files and flags that come first}
    arms: dict  # {name: `Arm`}
    claims: list
    tuned: bool = True  # False: the config files' own rates, and runs are on all GPUs by torchrun,
    #   one at a time
    note: str = ""  # a paragraph for the page
    others: dict = {}  # {paper: [(who and where, what they did and found, "+", "−" or "0")]}


def split_value(value: str) -> list:
    """[(sign, arm)] of "A - B + C"."""
    words = re.findall(r"([+-]) (.+?)(?= [+-] |$)", f"+ {value}")
    return [(-1 if sign == "-" else 1, arm) for sign, arm in words]


def squared_weights(value: str) -> int:
    """The sum of the squares of the arms' weights in "A - B + C - B", where B has -2: the variance
    of a number whose arms have variance 1."""
    weights = Counter()
    for sign, arm in split_value(value):
        weights[arm] += sign
    return sum(weight**2 for weight in weights.values())


def arms_in(numbers) -> list:
    """The names of all arms of some numbers, each once."""
    return list(dict.fromkeys(name for number in numbers for _, name in split_value(number.value)))


def load_study(path: str, measures: set) -> Study:
    """The `study` of a claims file. ValueError, in one line, if there is none or if it contradicts
    itself."""
    try:
        study = runpy.run_path(path).get("study")
    except Exception as error:  # whatever the user's file does wrong
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        line = lines[-1] if lines else getattr(error, "lineno", "?")
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    if not isinstance(study, Study):
        raise ValueError(f"{path} has no `study = Study(…)`: docs/claims.md shows one")
    for problem in find_problems(study, measures):
        raise ValueError(f"{path}: {problem}")
    return study


def find_problems(study: Study, measures: set):
    """What contradicts itself in a study, each in one line."""
    names = []  # (where, what is named there, what is allowed)
    for name, arm in study.arms.items():
        names.append((f"base of arm {name!r}", arm.base, study.bases))
        if arm.of:
            names.append((f"of of arm {name!r}", arm.of, study.arms))
    for claim in study.claims:
        where = f"claim {claim.id}"
        if not claim.number.published and claim.smallest is None or claim.effect <= 0:
            yield f"{where}: smallest, the smallest effect that matters, must be a number above 0"
        names.append((f"expect of {where}", claim.expect, ("below", "above", "equal", "not above")))
        names += [(f"an arm of {where}", name, study.arms) for name in arms_in(claim.numbers)]
        names += [(f"a measure of {where}", number.measure, measures) for number in claim.numbers]
    for where, name, allowed in names:
        if name not in allowed:
            yield f"{where}: {name!r} is not one of {', '.join(sorted(allowed))}"
    if len({claim.id for claim in study.claims}) < len(study.claims):
        yield "two claims have one id"


def settings_of(model_config, config) -> dict:
    """{name in a protocol: value}: the flags, and what is a share of another flag, so that it can
    be the paper's in a shorter run."""
    shares = {
        "warm-up / steps": config.warmup_iters / config.max_iters,
        "min_lr / rate": config.min_lr / config.learning_rate,
        "FFN width / width": (model_config.n_ff or 4 * model_config.n_embd) / model_config.n_embd,
    }
    return asdict(model_config) | asdict(config) | shares


def compare_protocol(claim: Claim, settings: list) -> list:
    """[(setting's name, the paper's value, source, ours, why)] of a claim whose arms have these
    settings. ValueError where ours is another and no reason is given."""
    rows = []
    for name, paper, source, why in claim.protocol:
        values = [its.get(name) for its in settings]
        if not why and (others := [value for value in values if not is_same(value, paper)]):
            problem = (
                f"claim {claim.id}: {name} is {others[0]!r}, and {paper!r} in the paper ({source})"
            )
            raise ValueError(f"{problem}: give the arms the paper's value, or the setting a reason")
        rows.append((name, paper, source, list(dict.fromkeys(values)), why))
    return rows


def is_same(a, b) -> bool:
    """Whether two settings are equal; of numbers, up to rounding."""
    try:
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)
    except TypeError:
        return a == b
