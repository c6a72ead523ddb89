"""What an optimizer consists of, and where it registers. To add one, write one file in this folder.

The file ends with a call of `register`, and `--optimizer=NAME` then works everywhere. adamw.py is the shortest example.
Its rule, which updates parameters, is three functions:

    options(config, role, model)  a dict: further entries of the parameter group of this role, constant during a run
    state(p, group)               a dict: the state of parameter p before the first step. It exists from the start, so
                                  it is the same on all ranks and in every checkpoint. p may be on the meta device.
    step(work, grad_scale, found_inf)
                                  update parameters and state in place. `work` is a list with one (group, params, grads,
                                  states) for each group of this rule; the last three are lists of equal length.

`grad_scale` clips: first of all `step` divides the gradients by it, in place. torch's fused kernels do so in the pass
that updates the parameters (`for_kernel`); a rule without them calls `divide_gradients`. It is a tensor (), at least 1,
or None where nothing is to be divided. Nothing else may change the gradients.

Where the bool tensor `found_inf` is true, a gradient is not finite, and `step` must change nothing: on the device,
because reading it would make the host wait. `grad_scale` is 1 then. None means that all gradients are finite.

Under FSDP2 parameters, gradients and state are DTensors, which are split by rows. A rule of entry-by-entry operations
works on them as it is; on each one's `layers.sharding.local_shard` it is faster. Other rules have to exchange messages.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim.sgd import sgd

from layers.sharding import local_shard

# Blockwise LR: the LR of a block type is ratio · learning_rate. The paper's ratios for AdamW (eq. 5), and 1 for norms
# (sec. 5); 1 for learned positions and an untied head, as in its authors' code. Other scale vectors and scalars go with
# the norms [I]; 1 for routers and the matrix of an image's patches [I].
RATIOS = {"emb": 10.0, "qk": 8.0, "ffn": 6.0, "vo": 4.0, "norm": 1.0, "head": 1.0, "pos": 1.0, "router": 1.0}
RATIOS |= {"patch": 1.0}
NO_DECAY = dict(weight_decay=0.0, maximize=False)  # for torch's SGD, whose decay is added to the gradient


class Rule(NamedTuple):
    """How the parameters of a group are updated: see the top of this file."""

    options: Callable
    state: Callable
    step: Callable


class Entry(NamedTuple):
    """What the configuration has to know about an optimizer: see `register`."""

    defaults: dict
    defaults_for: Callable
    rest: str | None
    ratios: dict | None
    uses_betas: bool
    check: Callable


RULES = {}  # name: Rule
OPTIMIZERS = {}  # name: Entry; adamw, which is the default, first, the others in the order of their names


def register(
    name: str,
    options: Callable,
    state: Callable,
    step: Callable,
    *,
    defaults: dict,
    defaults_for: Callable = lambda config: {},
    rest: str | None = None,
    ratios: dict | None = None,
    uses_betas: bool = True,
    check: Callable = lambda config: None,
) -> None:
    """Register an update rule, and with it --optimizer=`name`. The rule updates every parameter or, if `rest` is given,
    only the matrices inside the blocks.

    defaults: {knob: value where the configuration says None}. Its keys are the knobs that the optimizer understands:
        those of other optimizers are refused. learning_rate and weight_decay must be among them. A knob that is new is
        one more line in TrainConfig, with None as its default.
    defaults_for(config): those defaults that depend on other settings.
    rest: the name of the rule of all other parameters, if they need another one (muon: adamw). The knobs
        {rest}_learning_rate and {rest}_weight_decay are then filled with the hidden matrices' values where they have
        no default.
    ratios: blockwise LR ratios published for this optimizer; None: it gets RATIOS, and a run prints a note.
    uses_betas: whether beta1 and beta2 have an effect.
    check(config): ValueError for impossible values of knobs that no other optimizer has.
    """
    if name in OPTIMIZERS:
        raise ValueError(f"two optimizers register as {name!r}: rename one")
    missing = [knob for knob in ("learning_rate", "weight_decay") if knob not in defaults]
    if missing:
        raise ValueError(f"optimizer {name!r} needs a default for {' and '.join(missing)}")
    RULES[name] = Rule(options, state, step)
    OPTIMIZERS[name] = Entry(defaults, defaults_for, rest, ratios, uses_betas, check)
    # the order of --help and of tables: adamw first, then by name
    for other in sorted(OPTIMIZERS, key=lambda other: (other != "adamw", other)):
        OPTIMIZERS[other] = OPTIMIZERS.pop(other)


def divide_gradients(grads: list, grad_scale) -> None:
    """g ← g / grad_scale."""
    if grad_scale is not None:
        torch._foreach_div_(list(map(local_shard, grads)), grad_scale)


def for_kernel(grad_scale, found_inf) -> dict:
    """The arguments of torch's fused kernels that make them follow both. They read fp32 numbers."""
    numbers = dict(grad_scale=grad_scale, found_inf=found_inf)
    return dict(fused=True, **{key: None if number is None else number.float() for key, number in numbers.items()})


def average_gradients(params: list, grads: list, averages: list, beta: float, grad_scale, found_inf) -> None:
    """g ← g / grad_scale;  m ← β m + (1 − β) g. One pass over all tensors, which leaves m as it is where found_inf is
    true: torch's fused SGD at an LR of 0, so `params` do not change."""
    params, grads, averages = (list(map(local_shard, tensors)) for tensors in (params, grads, averages))
    numbers = dict(lr=0.0, momentum=beta or 1e-300, dampening=beta, nesterov=False)  # at 0 it would not keep m
    sgd(params, grads, averages, **numbers, **NO_DECAY, **for_kernel(grad_scale, found_inf))


def if_finite(found_inf, new, old):
    """`new`, or `old` where found_inf is true. So m.lerp_(if_finite(found_inf, g, m), …) then leaves m as it is."""
    return new if found_inf is None else torch.where(found_inf, old, new)


def one_if_finite(found_inf):
    """1, or 0 where found_inf is true: a factor for what a step adds."""
    return 1.0 if found_inf is None else (~found_inf).float()
