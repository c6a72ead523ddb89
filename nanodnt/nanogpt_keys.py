"""The settings of a nanoGPT config, written as flags of this repository. configurator.py loads this
file for an error message only. A source is a file, or the command line.

A file with one of KEYS is nanoGPT's. The flags are, if any source has one."""

import math
import os
from itertools import groupby
from pathlib import Path

from configurator import COMMAND_LINE, Setting, Value, source_of

BASE = Path(__file__).resolve().parents[1] / "config" / "nanogpt" / "gpt2.py"

# Keys of nanoGPT's train.py that are no flags: advice where nothing can be computed.
KEYS = {
    "always_save_checkpoint": "remove it: last.pt is always saved",
    "backend": "remove it: it follows from device",
    "wandb_run_name": "remove it: the run is named after out_dir",
    "gradient_accumulation_steps": "multiply batch_size by it, then remove it",
    "eval_iters": "set eval_tokens, the validation tokens of an evaluation",
    "decay_lr": "set schedule=cosine, or schedule=constant and warmup_iters=0",
}
# nanoGPT's defaults of the keys that flags are computed from.
DEFAULTS = {
    "batch_size": 12,  # sequences of a micro batch
    "gradient_accumulation_steps": 40,  # micro batches of a step, over all devices
    "eval_iters": 200,  # micro batches of an evaluation
    "block_size": 1024,
    "warmup_iters": 2000,
    "decay_lr": True,
}
DECAY = "decay_lr is the cosine after a warm-up; without it the rate is constant"
# {flag: the keys that it is the product of, and the reason, {} for these factors}. It is written in
# place of the first of these keys that a source sets.
PRODUCTS = {
    "batch_size": (
        ("batch_size", "gradient_accumulation_steps"),
        "{} sequences a step, over all devices",
    ),
    "block_size": (("block_size",), "{} tokens"),
    "eval_tokens": (
        ("eval_iters", "batch_size", "block_size"),
        "{} validation tokens an evaluation",
    ),
    "schedule": (("decay_lr",), DECAY),  # True: cosine, False: constant
    "warmup_iters": (("warmup_iters", "decay_lr"), DECAY),
}

Values = dict[str, Value]  # {name: value}


def find_base(settings: list[Setting]) -> list[str]:
    """The line of an error message that asks for BASE before all files; none where it is there, or
    where only the flags are nanoGPT's, after a file of ours."""
    first = settings[0].where
    file = source_of(first)
    theirs = [source_of(setting.where) for setting in settings if setting.name in KEYS]
    has_base = any(_is_base(source_of(setting.where)) for setting in settings)
    if has_base or not theirs or theirs[0] == COMMAND_LINE != file:
        return []
    change = f"name {os.path.relpath(BASE)} first on the command line"
    if theirs[0] == file != COMMAND_LINE:
        path = os.path.relpath(BASE, os.path.dirname(file) or ".")
        change = f'{first}: above this line write `base = "{path}"`'
    return [f"{change}: nanoGPT's network, and its defaults for all that is not set"]


def _is_base(source: str) -> bool:
    return Path(source).resolve() == BASE


def find_changes(settings: list[Setting]) -> dict[tuple[str, str], str]:
    """{(source, name): advice}: every change of a line or flag that makes this nanoGPT's run; none
    where no name is nanoGPT's."""
    changes = {}
    current = dict(DEFAULTS)
    any_keys = KEYS.keys() & {setting.name for setting in settings}
    for source, lines in groupby(settings, key=lambda setting: source_of(setting.where)):
        own = {line.name: line.readings[-1] for line in lines}
        if "eval_iters" in own:
            current.pop("eval_tokens", None)
        current |= own
        if _is_base(source):
            current = dict(DEFAULTS)
        elif KEYS.keys() & own.keys() or (any_keys and source == COMMAND_LINE):
            for name, advice in change_source(own, current, source).items():
                changes[source, name] = advice
        elif "batch_size" in own:  # a file of ours, which has the whole batch
            current["gradient_accumulation_steps"] = 1
    return changes


def change_source(own: Values, current: Values, source: str) -> dict[str, str]:
    """{name: advice} for the names of one source. `current`: the values after it, and DEFAULTS."""
    flags = {}  # {name: {flag in place of it: value}}
    reasons = {}
    for flag, (keys, reason) in PRODUCTS.items():
        values = [current[key] for key in keys]
        name = next((key for key in keys if key in own), None)
        if not name or not all(isinstance(value, int) for value in values):
            continue
        if flag == "eval_tokens" and flag in current:  # set by a file of ours
            continue
        value = math.prod(values)
        if flag == "schedule":
            value = "cosine" if value else "constant"
        flags.setdefault(name, {})[flag] = value
        reasons[name] = reason.format(" × ".join(map(str, values)))
    advice = {name: text for name, text in KEYS.items() if name in own}
    if "gradient_accumulation_steps" in own and "batch_size" in flags.get("batch_size", ()):
        reason = "batch_size counts all sequences of a step"
        advice["gradient_accumulation_steps"] = f"remove it: {reason}"
    for name, values in flags.items():
        code = "; ".join(f"{flag} = {value!r}" for flag, value in values.items())
        if source == COMMAND_LINE:
            code = " ".join(f"--{flag}={value}" for flag, value in values.items())
        if values != {name: own[name]}:  # else it means the same here
            advice[name] = f"write `{code}`: {reasons[name]}"
    return advice
