"""How to add an optimizer: one file in this folder that ends with a call of `register`; then
--optimizer=NAME works everywhere. adamw.py is the shortest. A rule is three functions:

    options(config, role, model)       → dict: constants of the parameter group of this role
    state(p, group)                    → dict: the state of p before the first step; p may be on the meta device
    step(work, grad_scale, found_inf)  updates in place; work: [(group, params, grads, states)], lists of equal length

`step` divides the gradients by the tensor `grad_scale` (this clips; None: it does not), and where
the bool tensor `found_inf` is true (None: it is not) it changes nothing, without reading it on the
host. Under FSDP2 tensors are split by rows: a rule works on their `local_shard`s, entry by entry,
or exchanges messages. The functions below help, and those of kernels.py, which are the updates of
AdamW and SGD.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from layers.sharding import local_shard

# Blockwise LR: the LR of a block type is ratio · learning_rate. The paper's ratios for AdamW (eq.
# 5), and 1 for norms (sec. 5); 1 for learned positions and an untied head, as in its authors' code.
# Our choices: other scale vectors and scalars go with the norms; 1 for routers and the matrix of an
# image's patches.
RATIOS = {
    "emb": 10.0,
    "qk": 8.0,
    "ffn": 6.0,
    "vo": 4.0,
    "norm": 1.0,
    "head": 1.0,
    "pos": 1.0,
    "router": 1.0,
}
RATIOS |= {"patch": 1.0}


class Rule(NamedTuple):
    """How the parameters of a group are updated: see the top of this file. What follows is of
    optimizers."""

    options: Callable
    state: Callable
    step: Callable
    # {flag: value where the configuration says None}, with learning_rate and weight_decay. Flags of
    # other optimizers are refused. A new flag is one more line in TrainConfig, with None as its
    # default
    defaults: dict = {}
    defaults_for: Callable = lambda config: {}  # those defaults that depend on other settings
    # The rule of all parameters but the matrices inside the blocks (muon: adamw); None: this rule
    # too. The flags {rest}_learning_rate and {rest}_weight_decay are the matrices' values where
    # they have no default
    rest: str | None = None
    ratios: dict | None = None  # blockwise LR ratios published for it; None: it gets RATIOS, and a
    #   run prints a note
    uses_betas: bool = True  # whether beta1 and beta2 have an effect
    # What its LR follows in larger models, of a TrainConfig: "adam", updates of one size whatever
    # that of the gradient, "sgd", in proportion to it, or a key of MUON in layers/scaling.py
    like: Callable = lambda config: "adam"


RULES = {}  # name: Rule
OPTIMIZERS = {}  # those that --optimizer names


def register(name: str, *functions: Callable, **settings) -> None:
    """Register a `Rule`, of these fields, as --optimizer=`name`."""
    if name in OPTIMIZERS:
        raise ValueError(f"two optimizers register as {name!r}: rename one")
    RULES[name] = OPTIMIZERS[name] = Rule(*functions, **settings)


def divide_gradients(grads: list, grad_scale) -> None:
    """g ← g / grad_scale."""
    if grad_scale is not None:
        torch._foreach_div_(list(map(local_shard, grads)), grad_scale)


def if_finite(found_inf, new, old):
    """`new`, or `old` where found_inf is true. So m.lerp_(if_finite(found_inf, g, m), …) then
    leaves m as it is."""
    return new if found_inf is None else torch.where(found_inf, old, new)


def one_if_finite(found_inf):
    """1, or 0 where found_inf is true: a factor for what a step adds."""
    return 1.0 if found_inf is None else (~found_inf).float()
