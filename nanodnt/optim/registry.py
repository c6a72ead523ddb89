"""Update rules and optimizers by name.

To add an optimizer, put one file into this folder. The update of one parameter is enough:

    update(p, g, state, group, t)      changes p and state in place
    register_update(NAME, update, …)   makes --optimizer=NAME of it: see its docstring

A rule that is to be faster, or that needs whole matrices, is three functions and a call of
`register`; adamw.py is the shortest example:

    options(config, role, model)       → dict: constants of the parameter group of this role
    state(p, group)                    → dict: state of p before the first step; p may be on the
                                       meta device, when memory is counted
    step(work, grad_scale, found_inf)  updates the parameters of all its groups in place

`step` divides the gradients by the tensor `grad_scale`: this clips them (None: no clipping). Where
the bool tensor `found_inf` is true, it must change nothing, without reading it on the host (None:
the gradients are finite). Under FSDP2 tensors are split by rows over processes: a rule works entry
by entry on their `local_shard`s, or sends messages. The functions at the end of this file help, and
those of kernels.py, which has the updates of AdamW and SGD.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor

from layers.sharding import local_shard
from model import Transformer
from nanodnt.settings import TrainConfig

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
    "patch": 1.0,
}

State = dict[str, Tensor]  # optimizer state of one parameter


class Group(TypedDict, total=False):
    """A parameter group: keys of every group, then options of our rules. A rule may have further
    ones, which need no line here. Checkpoints hold all but `compiled`."""

    params: list[Tensor]
    param_names: list[str]
    label: str  # name in tables and metrics
    role: str  # role of its parameters
    rule: str  # a key of RULES
    base_lr: float  # peak learning rate before lr_ratio
    lr_ratio: float  # ratio of its block type under blockwise_lr, else 1
    lr: float  # learning rate of the next step
    weight_decay: float
    compiled: bool  # whether the run compiles its updates: see kernels.py
    constant: bool  # the learning rate stays base_lr: no schedule
    betas: tuple[float, float]
    eps: float
    momentum: float
    dampening: float
    nesterov: bool
    block_rows: int  # Adam-mini: rows of a block; 0: the whole tensor is one
    ns_steps: int  # Muon: steps of the Newton-Schulz iteration
    ns_dtype: str  # Muon: dtype of the iteration
    coefficients: str  # Muon: those of the iteration, jordan or polar
    adjust_lr: str  # Muon: original, or match_rms_adamw
    row_beta: float | None  # Muon: β₂ of NorMuon's average for each row; None: no such average
    cautious: bool  # weight decay acts only where a step moves a weight towards zero
    frequency: int  # SOAP: updates from one change of the bases to the next


class Work(NamedTuple):
    """The parameters of a group that have a gradient: lists of equal length."""

    group: Group
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]


class Rule(NamedTuple):
    """How the parameters of a group are updated (the first three fields: see the top of this file),
    and settings of an optimizer."""

    options: Callable[[TrainConfig, str, Transformer], Group]
    state: Callable[[Tensor, Group], State]
    # None for MODULE:CLASS, whose step Adapter calls
    step: Callable[[list[Work], Tensor | None, Tensor | None], None] | None
    # {flag: default}: learning_rate and weight_decay, which are required, and flags that only some
    # optimizers have (momentum, say). Those of other optimizers are refused. A new flag is one more
    # line in TrainConfig with the default None
    defaults: dict = {}
    # defaults that depend on other settings; they replace those above
    defaults_for: Callable[[TrainConfig], dict] = lambda config: {}
    # rule of all parameters but the matrices of the blocks (muon: adamw), with the flags
    # {fallback_rule}_learning_rate and {fallback_rule}_weight_decay; None: the same rule
    fallback_rule: str | None = None
    ratios: dict[str, float] | None = None  # published blockwise LR ratios; None: RATIOS
    # How its LR follows the size of the model: "adam" (updates whose size does not depend on that
    # of the gradient), "sgd" (in proportion to the gradient), or a key of MUON in scaling.py
    lr_scaling: Callable[[TrainConfig], str] = lambda config: "adam"


RULES: dict[str, Rule] = {}
OPTIMIZERS: dict[str, Rule] = {}  # rules that --optimizer names


def is_class_path(name: str) -> bool:
    """Whether --optimizer=`name` is MODULE:CLASS, a class that is not ours."""
    return ":" in name


def register(name: str, *functions: Callable, **settings: object) -> None:
    """Register a `Rule` with these fields as --optimizer=`name`. ValueError for a name that is
    taken, and for `defaults` that could not act."""
    if name in OPTIMIZERS:
        refuse(f"two optimizers register as {name!r}: rename one")
    rule = Rule(*functions, **settings)
    for flag in rule.defaults:
        if getattr(TrainConfig, flag, "no flag") is not None:
            fix = "defaults are for flags that are None in TrainConfig"
            refuse(f"optimizer {name} cannot have a default for {flag}: {fix}")
    RULES[name] = rule
    OPTIMIZERS[name] = rule


def beta_options(config: TrainConfig, role: str, model: Transformer) -> Group:
    """The `options` of a rule whose only constants are beta1 and beta2."""
    return Group(betas=(config.beta1, config.beta2))


def register_update(
    name: str,
    update: Callable[[Tensor, Tensor, State, Group, Tensor], None],
    state: Sequence[str] = (),
    options: Callable[[TrainConfig, str, Transformer], Group] = beta_options,
    **settings: object,
) -> None:
    """Register --optimizer=`name` from the update of one parameter, in place:

        update(p, g, state, group, t)

    `p`, `g`: parameter and clipped gradient, which must stay as it is; `state`: a tensor shaped as
    p, zeros before the first step, for each name in the list `state` ("step" is taken); `group`: a
    Group with lr, weight_decay and the `options` (betas by default); `t`: number of this update
    from 1, a tensor (). `settings`: further fields of a Rule.

    Where the gradient is not finite, the old values are written back: this takes copies of p and
    its state. Under FSDP2 the tensors are the rows that this process holds, so `update` must work
    entry by entry."""

    def zeros(p: Tensor, group: Group) -> State:
        count = torch.zeros((), device=p.device)
        return dict(step=count, **{key: torch.zeros_like(p) for key in state})

    def step(work: list[Work], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        for group, params, grads, states in work:
            divide_gradients(grads, grad_scale)
            for p, g, tensors in zip(params, grads, states, strict=True):
                update_shard(update, p, g, tensors, group, found_inf)

    register(name, options, zeros, step, **settings)


def update_shard(
    update: Callable, p: Tensor, g: Tensor, state: State, group: Group, found_inf: Tensor | None
) -> None:
    """Call an `update` of `register_update` on the rows of this process."""
    shards = {key: local_shard(t) for key, t in state.items()}
    changed = [local_shard(p), *shards.values()]
    before = []
    if found_inf is not None:
        before = [tensor.clone() for tensor in changed]
    count = shards.pop("step").add_(1)
    update(local_shard(p), local_shard(g), shards, group, count)
    if found_inf is not None:
        for new, old in zip(changed, before, strict=True):
            new.copy_(if_finite(found_inf, new, old))


def refuse(text: str) -> NoReturn:
    """Raise a ValueError with this line."""
    raise ValueError(text)


def divide_gradients(grads: list[Tensor], grad_scale: Tensor | None) -> None:
    """g ← g / grad_scale."""
    if grad_scale is not None:
        torch._foreach_div_(local_shards(grads), grad_scale)


def local_shards(tensors: list[Tensor]) -> list[Tensor]:
    return [local_shard(t) for t in tensors]


def if_finite(found_inf: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new`, or `old` where found_inf is true. So m.lerp_(if_finite(found_inf, g, m), …) then
    leaves m as it is."""
    return new if found_inf is None else torch.where(found_inf, old, new)


def one_if_finite(found_inf: Tensor | None) -> Tensor | float:
    """1, or 0 where found_inf is true: a factor for what a step adds."""
    return 1.0 if found_inf is None else (~found_inf).float()
