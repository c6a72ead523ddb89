"""Optimizers and schedules. registry.py says how to add an optimizer; docs/optimizers.md has
recipes and sources."""

from importlib import import_module
from pkgutil import iter_modules

import nanodnt.optim.adamw  # noqa: F401  # the default comes first in messages and tables
from nanodnt.optim.defaults import fill_defaults, notes, rate_notes, role_notes, setting_notes
from nanodnt.optim.groups import describe_groups, make_optimizer, state_bytes, state_tensors
from nanodnt.optim.optimizer import Optimizer, load_optimizer
from nanodnt.optim.registry import OPTIMIZERS, RATIOS, RULES, is_class_path
from nanodnt.optim.schedule import lr_at

# Optimizers register themselves, so every file of this folder is imported, by name. Only some runs
# need its folders, which are imported where they are needed.
for file in iter_modules(__path__):
    if not file.ispkg:
        import_module(f"{__name__}.{file.name}")

__all__ = [
    "OPTIMIZERS",
    "RATIOS",
    "RULES",
    "Optimizer",
    "describe_groups",
    "fill_defaults",
    "is_class_path",
    "load_optimizer",
    "lr_at",
    "make_optimizer",
    "notes",
    "rate_notes",
    "role_notes",
    "setting_notes",
    "state_bytes",
    "state_tensors",
]
