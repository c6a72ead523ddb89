"""Parameter groups: a parameter's role decides its update rule, its learning rate and its weight
decay."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layers.roles import BLOCK_ROLES, MATRICES
from model import GPTConfig, Transformer
from nanodnt.optim.optimizer import Optimizer
from nanodnt.optim.registry import RULES, Group, is_class_path, refuse
from nanodnt.optim.scaling import learning_factors
from nanodnt.settings import TrainConfig
from nanodnt.tables import table

DECAYED_GAINS = {
    "none": (),
    "all": ("gain_in", "gain_out"),
    "input": ("gain_in",),
    "output": ("gain_out",),
}


class Row(NamedTuple):
    """A row of the table of groups: how parameters of one role are updated. Parameters whose rows
    are equal form one group."""

    role: str
    rule: str  # a key of RULES
    base_lr: float  # peak LR before lr_ratio
    lr_ratio: float  # ratio of the block type under blockwise_lr, else 1
    weight_decay: float
    label: str  # name of the group in tables and metrics, before `make_optimizer` numbers it
    # of a model that is larger than the tuned one: factors on the LR and on Adam's ε
    rate_factor: float = 1.0
    eps_factor: float = 1.0


Table = dict[Row, list[tuple[str, Tensor]]]  # {row: its named parameters}


def make_optimizer(model: Transformer, config: TrainConfig) -> Optimizer:
    """The configured optimizer, after `fill_defaults`, with a group for each row of `group_table`.
    ValueError if a setting or a rule does not fit the model."""
    check_penalties(
        model.config,
        balance_coef=config.balance_coef,
        balance_rate=config.balance_rate,
        z_coef=config.z_coef,
    )
    groups = []
    n_with_label = Counter()
    for row, params in group_table(model, config).items():
        # a larger model scales parameters with one label differently: label, label_2, …
        n_with_label[row.label] += 1
        label = row.label
        if n_with_label[label] > 1:
            label = f"{label}_{n_with_label[label]}"
        options = RULES[row.rule].options(config, row.role, model)
        group = make_group(row, label, options)
        group["params"] = [p for _, p in params]
        group["param_names"] = [name for name, _ in params]
        group["compiled"] = bool(config.compile)
        groups.append(group)
    if not is_class_path(config.optimizer):
        return Optimizer(groups)
    from nanodnt.optim.adapter import Adapter  # few runs need it

    return Adapter(groups, config.optimizer, config.optimizer_args, config.learning_rate)


def group_table(model: Transformer, config: TrainConfig) -> Table:
    """The rows of all parameters that are trained; rows with the same label one after the other."""
    roles = model.roles(config.input_gains)
    block_types = model.block_types()
    decayed = decayed_roles(
        set(roles.values()),
        gains=config.decay_gains,
        scalars=config.decay_scalars,
        embeddings=config.decay_emb,
    )
    in_blocks = set(model.blocks.parameters())
    rows = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        row = make_row(config, roles[name], block_types[name], roles[name] in decayed)
        shape = tuple(p.shape)
        if block_types[name] == "head" and p.ndim == 1:
            shape = (1,)  # the bias of the ViT's head, one number a class, does not grow
        scaling = RULES[row.rule].lr_scaling(config)
        rate, eps = learning_factors(model.config, row.role, scaling, shape, p in in_blocks)
        row = row._replace(rate_factor=rate, eps_factor=eps)
        rows.setdefault(row, []).append((name, p))
    labels = list(dict.fromkeys(row.label for row in rows))
    return dict(sorted(rows.items(), key=lambda item: labels.index(item[0].label)))


def make_row(config: TrainConfig, role: str, block_type: str, decays: bool) -> Row:
    """The row of a parameter in a model of the tuned size. `block_type`: of its blockwise ratio."""
    if role == "balance":
        return Row(role, "balance", config.balance_rate, 1.0, 0.0, label=role)
    rule = config.optimizer
    prefix = ""
    fallback_rule = RULES[rule].fallback_rule
    if fallback_rule and role not in BLOCK_ROLES:
        rule = fallback_rule
        prefix = f"{fallback_rule}_"
    label = role
    ratio = 1.0
    if config.blockwise_lr:
        ratio = getattr(config, f"lr_ratio_{block_type}")
        # biases and scalars have the LR of the matrix they belong to
        if role in ("bias", "scalar") and block_type != "norm":
            label = f"{role}_{block_type}"
    decay = 0.0
    if decays:
        decay = getattr(config, f"{prefix}weight_decay")
    if config.blockwise_decay == "unscaled":
        decay /= ratio or 1.0  # a ratio of 0 freezes the block
    return Row(role, rule, getattr(config, f"{prefix}learning_rate"), ratio, decay, label)


def make_group(row: Row, label: str, options: Group) -> Group:
    """A group of this row without parameters, with the `options` of its rule. LR · decay does not
    depend on the model's size."""
    group = Group(
        label=label,
        role=row.role,
        rule=row.rule,
        base_lr=row.base_lr * row.rate_factor,
        lr_ratio=row.lr_ratio,
        weight_decay=row.weight_decay / row.rate_factor,
    )
    group |= options
    if "eps" in group:
        group["eps"] *= row.eps_factor
    return group


def decayed_roles(roles: set[str], gains: str, scalars: bool, embeddings: bool) -> tuple[str, ...]:
    """The roles with weight decay, by the settings decay_gains, decay_scalars and decay_emb.
    ValueError if decay_gains names gains, but the model has none of those among its `roles`."""
    decayed_gains = DECAYED_GAINS[gains]
    if gains in ("input", "output") and not roles & set(decayed_gains):
        text = f"decay_gains={gains}, but the model has no such gains"
        refuse(f"{text} ({', '.join(decayed_gains)}): set decay_gains=none, or choose another")
    decayed = MATRICES + decayed_gains
    if scalars:
        decayed += ("scalar", "bias")
    if not embeddings:
        decayed = tuple(role for role in decayed if role not in ("emb", "pos"))
    return decayed


def check_penalties(model_config: GPTConfig, **settings: float) -> None:
    """ValueError where a setting of the balance of experts has nothing to act on. `settings`:
    balance_coef, balance_rate and z_coef."""
    needed_balance = {
        "balance_coef": "loss",
        "balance_rate": "bias",
        "z_coef": model_config.balance,
    }
    for name, value in settings.items():
        if value in (getattr(TrainConfig, name), 0):
            continue
        if not model_config.n_expert:
            fix = f"set n_expert (8, for example), or leave {name} out"
            refuse(f"{name}={value} needs experts: {fix}")
        if model_config.balance != needed_balance[name]:
            text = f"{name}={value} needs balance={needed_balance[name]}, but the model has"
            refuse(f"{text} balance={model_config.balance}: leave {name} out, or change balance")


def describe_groups(optimizer: Optimizer, model: Transformer) -> str:
    """The table of groups with the number of tensors and parameters; then the model's frozen
    parameters."""
    rows = [("role", "tensors", "parameters", "optimizer", "peak LR", "decay")]
    for group in optimizer.param_groups:
        n_params = sum(p.numel() for p in group["params"])
        peak = group["base_lr"] * group["lr_ratio"]
        rows.append(
            (
                group["label"],
                str(len(group["params"])),
                f"{n_params:,}",
                group["rule"],
                f"{peak:g}",
                f"{group['weight_decay']:g}",
            )
        )
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    if frozen:
        rows.append(("(frozen)", str(len(frozen)), f"{sum(frozen):,}", "", "", ""))
    return "\n".join(f"  {line}" for line in table(rows))


def state_bytes(model: Transformer, config: TrainConfig) -> int:
    """Bytes of optimizer state on `model`, counted on a copy without storage."""
    optimizer = make_optimizer(type(model).empty(model.config), config)
    return sum(t.nbytes for t in state_tensors(optimizer))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of the optimizer's state."""
    return [t for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t)]
