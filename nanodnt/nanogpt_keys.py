"""The settings of a nanoGPT config, written as flags of this repository.

    batch_size      nanoGPT's batch_size · gradient_accumulation_steps
    eval_tokens     eval_iters · nanoGPT's batch_size · block_size
    schedule        constant, without warm-up, where decay_lr is False

configurator.py imports this file for an error message, where a name is unknown. It imports none of
ours, because they import configurator.py.
"""

import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

COMMAND_LINE = "command line"  # the source of flags, as configurator.py names it
BASE = Path(__file__).resolve().parents[1] / "config" / "nanogpt" / "gpt2.py"

# Keys of nanoGPT's train.py that are no flags: advice where a value cannot be computed.
KEYS = {
    "always_save_checkpoint": "remove it: last.pt is always saved",
    "backend": "remove it: it follows from device",
    "wandb_run_name": "remove it: the run is named after out_dir",
    "gradient_accumulation_steps": "remove it: batch_size counts all sequences of a step",
    "eval_iters": "set eval_tokens, the validation tokens of an evaluation",
    "decay_lr": "remove it, or if it is False set schedule=constant and warmup_iters=0",
}
# nanoGPT's defaults of the keys that flags are computed from.
DEFAULTS = {
    "batch_size": 12,  # sequences of a micro batch
    "gradient_accumulation_steps": 40,  # micro batches of a step, over all devices
    "eval_iters": 200,  # micro batches of an evaluation
    "block_size": 1024,
    "decay_lr": True,
}
# {flag: its factors among these keys, and the meaning of the product}
PRODUCTS = {
    "batch_size": (
        ("batch_size", "gradient_accumulation_steps"),
        "sequences a step, over all devices",
    ),
    "eval_tokens": (
        ("eval_iters", "batch_size", "block_size"),
        "validation tokens an evaluation",
    ),
}
SCHEDULES = {
    True: {"schedule": "cosine"},
    False: {"schedule": "constant", "warmup_iters": 0},
}

Values = dict[str, Any]  # {name: value} of a file or of the command line; None = not known


def find_changes(values: dict[str, Values], flags: Collection[str]) -> dict[tuple[str, str], str]:
    """{(source, name): advice}: every change that makes this nanoGPT's run. None, if no name is
    nanoGPT's, or if the command, whose `flags` these are, does not train.

    `values`: of each source, a file or COMMAND_LINE, in the order of their application. A file with
    a key of nanoGPT is one of nanoGPT, and then so are all flags. The name "base" stands for what
    comes before everything else."""
    with_keys = {source for source, own in values.items() if KEYS.keys() & own.keys()}
    if not with_keys or not PRODUCTS.keys() <= set(flags):
        return {}
    changes = {}
    first = next(iter(values))
    if first in with_keys:
        changes[first, "base"] = advise_base(first)
    current = dict(DEFAULTS)
    for source, own in values.items():
        if Path(source).resolve() == BASE:
            continue
        current.update({name: own[name] for name in DEFAULTS if name in own})
        if source in with_keys or source == COMMAND_LINE:
            for name, advice in change_source(own, current, source).items():
                changes[source, name] = advice
        elif "batch_size" in own:  # a file of ours, which has the whole batch
            current["gradient_accumulation_steps"] = 1
    return changes


def advise_base(source: str) -> str:
    """Advice to begin with nanoGPT's network and defaults."""
    reason = "nanoGPT's network, and its defaults for all that is not set"
    if source == COMMAND_LINE:
        return f"write `{os.path.relpath(BASE)}` before the flags: {reason}"
    path = os.path.relpath(BASE, os.path.dirname(source) or ".")
    return f'above this line write `base = "{path}"`: {reason}'


def change_source(own: Values, current: Values, source: str) -> dict[str, str]:
    """{name: advice} for the names of one source. `current`: the values of DEFAULTS after it."""
    advice = {name: text for name, text in KEYS.items() if name in own}
    written = {}  # {name: {flag: value} in place of it}
    reasons = {}  # {name: why}
    for flag, (factors, meaning) in PRODUCTS.items():
        names = [name for name in factors if name in own]
        numbers = [current[name] for name in factors]
        if not names or not all(map(is_count, numbers)):
            continue
        name = names[0]
        settings = written.setdefault(name, {})
        if name not in KEYS:
            settings.setdefault(name, int(current[name]))  # it remains a flag
        settings[flag] = int(math.prod(numbers))
        product = " × ".join(f"{number:g}" for number in numbers)
        reasons.setdefault(name, []).append(f"{product} {meaning}")
    schedule = SCHEDULES.get(current["decay_lr"], {})
    if schedule and "decay_lr" in own:
        written["decay_lr"] = schedule
        reasons["decay_lr"] = ["the same learning rates"]
    if "warmup_iters" in schedule and "warmup_iters" in own:
        advice["warmup_iters"] = "remove it: with decay_lr=False nanoGPT has no warm-up"
    for name, settings in written.items():
        if settings != {name: current.get(name)}:
            code = write(settings, source)
            advice[name] = f"write `{code}`: {', and '.join(reasons[name])}"
    return advice


def is_count(value: Any) -> bool:
    """Whether a value is a positive whole number, of a usual size: 12, or 12.0 from a flag."""
    return type(value) in (int, float) and 1 <= value < 1e9 and value == int(value)


def write(settings: Values, source: str) -> str:
    """Settings as a line of a file, or as flags."""
    if source == COMMAND_LINE:
        return " ".join(f"--{name}={value}" for name, value in settings.items())
    return "; ".join(f"{name} = {value!r}" for name, value in settings.items())
