"""The settings of a nanoGPT config, written as flags of this repository.

    batch_size      nanoGPT's batch_size · gradient_accumulation_steps
    eval_tokens     eval_iters · nanoGPT's batch_size · block_size
    schedule        constant, without warm-up, where decay_lr is False

configurator.py loads this file for an error message only.
"""

import math
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from configurator import COMMAND_LINE, Setting

BASE = Path(__file__).resolve().parents[1] / "config" / "nanogpt" / "gpt2.py"

# Keys of nanoGPT's train.py that are no flags: advice where nothing can be computed.
KEYS = {
    "always_save_checkpoint": "remove it: last.pt is always saved",
    "backend": "remove it: it follows from device",
    "wandb_run_name": "remove it: the run is named after out_dir",
    "gradient_accumulation_steps": "remove it: batch_size counts all sequences of a step",
    "eval_iters": "set eval_tokens, the validation tokens of an evaluation",
    "decay_lr": "remove it; if it is False, set schedule=constant and warmup_iters=0",
}
# nanoGPT's defaults of the keys that flags are computed from.
DEFAULTS = {
    "batch_size": 12,  # sequences of a micro batch
    "gradient_accumulation_steps": 40,  # micro batches of a step, over all devices
    "eval_iters": 200,  # micro batches of an evaluation
    "block_size": 1024,
    "decay_lr": True,
}
# {flag: its factors among these keys, and what it counts}. The flag takes the place of the first of
# them that is set.
PRODUCTS = {
    "batch_size": (
        ("batch_size", "gradient_accumulation_steps"),
        "sequences a step, over all devices",
    ),
    "block_size": (("block_size",), "tokens"),
    "eval_tokens": (
        ("eval_iters", "batch_size", "block_size"),
        "validation tokens an evaluation",
    ),
}

Values = dict[str, Any]  # {name: value as it is written}


def find_changes(settings: list[Setting]) -> dict[tuple[str, str], str]:
    """{(source, name): advice}: every change that makes this nanoGPT's run; none, if no name is
    nanoGPT's. A file that has a key of nanoGPT is one of nanoGPT, and so are the flags."""
    changes = {}
    if not KEYS.keys() & {setting.name for setting in settings}:
        return changes
    current = dict(DEFAULTS)
    for source, lines in groupby(settings, key=lambda setting: setting.source):
        own = {line.name: line.readings[0] for line in lines}
        if Path(source).resolve() == BASE:
            continue
        current.update(own)
        has_keys = bool(KEYS.keys() & own.keys())
        if has_keys and source == settings[0].source != COMMAND_LINE:
            path = os.path.relpath(BASE, os.path.dirname(source) or ".")
            reason = "nanoGPT's network, and its defaults for all that is not set"
            changes[source, "base"] = f'above this line write `base = "{path}"`: {reason}'
        if has_keys or source == COMMAND_LINE:
            for name, advice in change_source(own, current, source).items():
                changes[source, name] = advice
        elif "batch_size" in own:  # a file of ours, which has the whole batch
            current["gradient_accumulation_steps"] = 1
    return changes


def change_source(own: Values, current: Values, source: str) -> dict[str, str]:
    """{name: advice} for the names of one source. `current`: the values after it, and DEFAULTS."""
    advice = {name: text for name, text in KEYS.items() if name in own}
    written = {}  # {name: flags in place of it}
    for flag, (factors, unit) in PRODUCTS.items():
        name = next((factor for factor in factors if factor in own), "")
        values = [current[factor] for factor in factors]
        number = multiply(values)
        if name and number is not None:
            written.setdefault(name, {})[flag] = number
            advice[name] = f"{' × '.join(map(str, values))} {unit}"
    if str(current["decay_lr"]) == "False":
        written["decay_lr"] = {"schedule": "constant", "warmup_iters": 0}
        advice["decay_lr"] = "the same learning rates"
        advice["warmup_iters"] = "remove it: nanoGPT has no warm-up with decay_lr=False"
    for name, flags in written.items():
        code = "; ".join(f"{flag} = {value!r}" for flag, value in flags.items())
        if source == COMMAND_LINE:
            code = " ".join(f"--{flag}={value}" for flag, value in flags.items())
        advice[name] = f"write `{code}`: {advice[name]}"
        if flags == {name: multiply([current[name]])}:
            del advice[name]  # it means the same here
    return advice


def multiply(values: list[Any]) -> int | None:
    """The product of whole numbers, or of their texts; None if one is none."""
    try:
        return math.prod(map(int, values))
    except (TypeError, ValueError):
        return None
