"""Parameter groups: the role of a parameter decides on its update rule, its learning rate and its weight decay."""

import torch

from layers.roles import HIDDEN, MATRICES
from nanodnt.optim.optimizer import Optimizer
from nanodnt.optim.registry import OPTIMIZERS, RULES
from nanodnt.tables import table

DECAYED_GAINS = {"none": (), "all": ("gain_in", "gain_out"), "input": ("gain_in",), "output": ("gain_out",)}


def make_optimizer(model, config) -> Optimizer:
    """The configured optimizer, after `fill_defaults`. It has one group for each role. Under blockwise_lr biases and
    scalars have groups of their own for each block type, because they get the LR of the matrix they belong to.

    A group has torch's entries (params, param_names, lr, weight_decay), its rule's options, and: `label`, its name in
    tables and metrics; `role`; `rule`; `base_lr`, the peak LR before it is multiplied by `lr_ratio`, the blockwise
    ratio. ValueError if decay_gains names gains that the model does not have, if settings of experts have none to act
    on, or if a rule does not fit a parameter."""
    check_penalties(model.config, config)
    roles, block_types = model.roles(), model.block_types()
    decayed = decayed_roles(config, set(roles.values()))
    groups, trained = {}, {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        group = make_group(config, model, roles[name], block_types[name], decayed)
        groups.setdefault(group["label"], group)["params"].append((name, p))
    optimizer = Optimizer(list(groups.values()))
    grouped = [name for group in optimizer.param_groups for name in group["param_names"]]
    if sorted(grouped) != sorted(trained):
        raise ValueError(f"groups do not hold every parameter once: {sorted(set(grouped) ^ set(trained))}")
    return optimizer


def check_penalties(model_config, config) -> None:
    """ValueError where a setting of the balance of experts has nothing to act on."""
    for name, balance in (("balance_coef", "loss"), ("balance_rate", "bias"), ("z_coef", model_config.balance)):
        value = getattr(config, name)
        if value in (type(config).__dataclass_fields__[name].default, 0):
            continue
        if not model_config.n_expert:
            raise ValueError(f"{name}={value} needs experts: set n_expert (8, for example), or leave {name} out")
        if model_config.balance != balance:
            raise ValueError(
                f"{name}={value} needs balance={balance}, but the model has balance={model_config.balance}: "
                f"leave {name} out, or change balance"
            )


def decayed_roles(config, roles: set) -> tuple:
    """The roles with weight decay. ValueError if decay_gains names gains, but the model has none of those `roles`."""
    gains = DECAYED_GAINS[config.decay_gains]
    if config.decay_gains in ("input", "output") and not roles & set(gains):
        raise ValueError(
            f"decay_gains={config.decay_gains}, but the model has no such gains ({', '.join(gains)}): set "
            "decay_gains=none, or choose another"
        )
    matrices = MATRICES if config.decay_emb else tuple(role for role in MATRICES if role not in ("emb", "pos"))
    return matrices + gains + (("scalar", "bias") if config.decay_scalars else ())


def make_group(config, model, role: str, block_type: str, decayed: tuple) -> dict:
    """The group, still without parameters, of those with this role that belong to a block type."""
    rest = OPTIMIZERS[config.optimizer].rest
    if role == "balance":
        group = dict(params=[], role=role, label=role, rule=role, weight_decay=0.0, lr_ratio=1.0)
        return group | dict(base_lr=config.balance_rate, **RULES[role].options(config, role, model))
    rule, prefix = (config.optimizer, "") if role in HIDDEN or not rest else (rest, f"{rest}_")
    label, ratio = role, getattr(config, f"lr_ratio_{block_type}") if config.blockwise_lr else 1.0
    if config.blockwise_lr and role in ("bias", "scalar") and block_type != "norm":
        label = f"{role}_{block_type}"
    decay = getattr(config, f"{prefix}weight_decay") if role in decayed else 0.0
    if config.blockwise_decay == "unscaled":
        decay /= ratio or 1.0
    group = dict(params=[], role=role, label=label, rule=rule, weight_decay=decay, lr_ratio=ratio)
    return group | dict(base_lr=getattr(config, f"{prefix}learning_rate"), **RULES[rule].options(config, role, model))


def describe_groups(optimizer, model=None) -> str:
    """A table: role, tensors, parameters, rule, peak LR, weight decay; with `model` its frozen parameters too."""
    rows = [("role", "tensors", "parameters", "optimizer", "peak LR", "decay")]
    for g in optimizer.param_groups:
        count, peak = sum(p.numel() for p in g["params"]), g["base_lr"] * g["lr_ratio"]
        rows.append((g["label"], str(len(g["params"])), f"{count:,}", g["rule"], f"{peak:g}", f"{g['weight_decay']:g}"))
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad] if model else []
    if frozen:
        rows.append(("(frozen)", str(len(frozen)), f"{sum(frozen):,}", "", "", ""))
    return "\n".join(f"  {line}" for line in table(rows))


def state_bytes(model, config) -> int:
    """Bytes of optimizer state on `model`, which may be on the meta device: the state is made and counted."""
    states = make_optimizer(model, config).state.values()
    return sum(t.numel() * t.element_size() for state in states for t in state.values() if torch.is_tensor(t))
