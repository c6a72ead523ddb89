"""Parameter groups: a parameter's role decides its update rule, its learning rate and its weight
decay."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layers.roles import BLOCK_ROLES, MATRICES
from model import GPTConfig, Transformer
from nanodnt.optim.optimizer import Optimizer
from nanodnt.optim.registry import OPTIMIZERS, RULES, Group, refuse
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
    label: str  # name of the group in tables and metrics
    # of a model that is larger than the tuned one: factors on the LR and on Adam's ε
    rate_factor: float = 1.0
    eps_factor: float = 1.0


Table = dict[Row, list[tuple[str, Tensor]]]  # {row: its named parameters}


def make_optimizer(model: Transformer, config: TrainConfig) -> Optimizer:
    """The configured optimizer, after `fill_defaults`. ValueError if a setting or a rule does not
    fit the model."""
    groups = make_groups(model, config)
    if config.optimizer in OPTIMIZERS:
        return Optimizer(groups)
    from nanodnt.optim.adapter import Adapter  # few runs need it

    return Adapter(groups, config)


def make_groups(model: Transformer, config: TrainConfig) -> list[Group]:
    """The groups of the optimizer, one for each row of `group_table`. Rows with the same label,
    which a larger model scales differently, become label, label_2, …"""
    check_penalties(model.config, config)
    groups = []
    n_with_label = {}
    for row, params in group_table(model, config).items():
        group = make_group(row, config, model)
        group["params"] = [p for _, p in params]
        group["param_names"] = [name for name, _ in params]
        n = n_with_label[row.label] = n_with_label.get(row.label, 0) + 1
        if n > 1:
            group["label"] += f"_{n}"
        groups.append(group)
    return groups


def group_table(model: Transformer, config: TrainConfig) -> Table:
    """The rows of all parameters that are trained; rows with the same label one after the other."""
    roles = model.roles(config.input_gains)
    block_types = model.block_types()
    decayed = decayed_roles(config, set(roles.values()))
    in_blocks = set(model.blocks.parameters())
    rows = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        row = make_row(config, roles[name], block_types[name], roles[name] in decayed)
        shape = tuple(p.shape)
        if block_types[name] == "head" and p.ndim == 1:
            shape = (1,)  # a bias of classes does not grow
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
        decay /= ratio or 1.0
    return Row(role, rule, getattr(config, f"{prefix}learning_rate"), ratio, decay, label)


def make_group(row: Row, config: TrainConfig, model: Transformer) -> Group:
    """A group of this row without parameters. LR · decay does not depend on the model's size."""
    group = Group(
        params=[],
        label=row.label,
        role=row.role,
        rule=row.rule,
        base_lr=row.base_lr * row.rate_factor,
        lr_ratio=row.lr_ratio,
        weight_decay=row.weight_decay / row.rate_factor,
        compiled=bool(config.compile),
    )
    group |= RULES[row.rule].options(config, row.role, model)
    if "eps" in group:
        group["eps"] *= row.eps_factor
    return group


def decayed_roles(config: TrainConfig, roles: set[str]) -> tuple[str, ...]:
    """The roles with weight decay. ValueError if decay_gains names gains, but the model has none of
    those `roles`."""
    gains = DECAYED_GAINS[config.decay_gains]
    if config.decay_gains in ("input", "output") and not roles & set(gains):
        text = f"decay_gains={config.decay_gains}, but the model has no such gains"
        refuse(f"{text} ({', '.join(gains)}): set decay_gains=none, or choose another")
    decayed = MATRICES + gains
    if config.decay_scalars:
        decayed += ("scalar", "bias")
    if not config.decay_emb:
        decayed = tuple(role for role in decayed if role not in ("emb", "pos"))
    return decayed


def check_penalties(model_config: GPTConfig, config: TrainConfig) -> None:
    """ValueError where a setting of the balance of experts has nothing to act on."""
    needed_balance = {
        "balance_coef": "loss",
        "balance_rate": "bias",
        "z_coef": model_config.balance,
    }
    for name, balance in needed_balance.items():
        value = getattr(config, name)
        default = type(config).__dataclass_fields__[name].default
        if value in (default, 0):
            continue
        if not model_config.n_expert:
            fix = f"set n_expert (8, for example), or leave {name} out"
            refuse(f"{name}={value} needs experts: {fix}")
        if model_config.balance != balance:
            text = f"{name}={value} needs balance={balance}, but the model has balance="
            refuse(f"{text}{model_config.balance}: leave {name} out, or change balance")


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
    """Bytes of optimizer state on `model`, which may be on the meta device. No state is kept."""
    if config.optimizer not in OPTIMIZERS:
        optimizer = make_optimizer(type(model).empty(model.config), config)
        return sum(
            t.nbytes for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t)
        )
    n_bytes = 0
    for group in make_groups(model, config):
        for p in group["params"]:
            state = RULES[group["rule"]].state(p, group)
            n_bytes += sum(t.nbytes for t in state.values())
    return n_bytes
