"""Predicates for values that were read from files: whether they have the type and form that is expected."""

import math

import torch


def is_count(value) -> bool:
    """Whether it is an int from 0 to 2⁴⁸ - 1."""
    return type(value) is int and 0 <= value < 2**48


def is_number(value) -> bool:
    """Whether it is a finite int or float."""
    return type(value) in (int, float) and math.isfinite(value)


def is_tensor(value) -> bool:
    """Whether it is an ordinary real tensor on the CPU: dense, not nested, not complex, not quantized."""
    if not torch.is_tensor(value) or value.is_nested or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_complex() and not value.is_quantized


def is_plain(value) -> bool:
    """Whether it consists only of numbers, strings, None, dicts, lists and tuples."""
    if isinstance(value, (dict, list, tuple)):
        return all(is_plain(part) for part in (value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str))


def is_nested(value, depth: int) -> bool:
    """Whether it consists only of finite numbers and None, in lists and dicts with string keys, up to `depth` deep."""
    if isinstance(value, (dict, list)):
        keys, parts = (value, value.values()) if isinstance(value, dict) else ((), value)
        return depth > 0 and all(isinstance(k, str) for k in keys) and all(is_nested(v, depth - 1) for v in parts)
    return value is None or is_number(value)


def is_row(value) -> bool:
    """Whether it is a row of metrics.jsonl: only the fields that this project reads back are checked."""
    if not isinstance(value, dict) or not is_count(value.get("step")) or not is_count(value.get("tokens")):
        return False
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return is_count(value.get("rollbacks", 0)) and all(map(is_number, losses))


def is_optimizer_state(value) -> bool:
    """Whether it has the form of an optimizer's state dict: tensors and plain values by parameter, and the groups."""
    states = value.get("state") if isinstance(value, dict) else None
    if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
        return False
    entries = [entry for state in states.values() for entry in state.values()]
    return is_plain({**value, "state": None}) and all(is_tensor(entry) or is_plain(entry) for entry in entries)
