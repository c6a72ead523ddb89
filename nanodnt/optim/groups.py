"""Parameter groups: a parameter's role decides its update rule, its learning rate and its weight
decay."""

import torch

from layers.roles import BLOCK_ROLES, MATRICES
from nanodnt.optim.optimizer import Optimizer
from nanodnt.optim.registry import OPTIMIZERS, RULES
from nanodnt.optim.scaling import learning_factors
from nanodnt.tables import table

DECAYED_GAINS = {
    "none": (),
    "all": ("gain_in", "gain_out"),
    "input": ("gain_in",),
    "output": ("gain_out",),
}


def make_optimizer(model, config) -> Optimizer:
    """The configured optimizer, after `fill_defaults`. ValueError if a setting or a rule does not
    fit the model."""
    return Optimizer(make_groups(model, config))


def make_groups(model, config) -> list:
    """One group for each label. Beside torch's entries a group has `make_group`'s, and its rule's
    options. Parameters of one label that a larger model changes in different ways are label,
    label_2, …"""
    check_penalties(model.config, config)
    roles, block_types, groups = model.roles(config.input_gains), model.block_types(), {}
    decayed, inside = decayed_roles(config, set(roles.values())), set(model.blocks.parameters())
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = make_group(config, roles[name], block_types[name], roles[name] in decayed)
            rule, shape = RULES[group["rule"]], tuple(p.shape)
            if block_types[name] == "head" and p.ndim == 1:
                shape = (1,)  # a bias of classes does not grow
            factors = learning_factors(
                model.config, roles[name], rule.like(config), shape, p in inside
            )
            same = groups.setdefault(group["label"], {})  # {factors: group}
            if factors not in same:
                group |= rule.options(config, roles[name], model)
                group["label"] += f"_{len(same) + 1}" if same else ""
                same[factors] = scaled(group, *factors)
            same[factors]["params"].append((name, p))
    return [group for same in groups.values() for group in same.values()]


def make_group(config, role: str, block_type: str, decays: bool) -> dict:
    """A group without parameters. `label`: its name in tables and metrics; `base_lr`: the peak LR
    before it is multiplied by `lr_ratio`, that of its block type under blockwise_lr; `compiled`:
    see kernels.py."""
    if role == "balance":
        numbers = dict(base_lr=config.balance_rate, lr_ratio=1.0, weight_decay=0.0)
        return dict(params=[], label=role, role=role, rule=role, **numbers)
    rest = OPTIMIZERS[config.optimizer].rest
    rule, prefix = (config.optimizer, "") if role in BLOCK_ROLES or not rest else (rest, f"{rest}_")
    ratio = getattr(config, f"lr_ratio_{block_type}") if config.blockwise_lr else 1.0
    # biases and scalars get the LR of the matrix they belong to
    own_group = config.blockwise_lr and role in ("bias", "scalar") and block_type != "norm"
    decay = getattr(config, f"{prefix}weight_decay") if decays else 0.0
    if config.blockwise_decay == "unscaled":
        decay /= ratio or 1.0
    label = f"{role}_{block_type}" if own_group else role
    numbers = dict(
        base_lr=getattr(config, f"{prefix}learning_rate"), lr_ratio=ratio, weight_decay=decay
    )
    return dict(
        params=[], label=label, role=role, rule=rule, compiled=bool(config.compile), **numbers
    )


def scaled(group: dict, rate: float, eps: float) -> dict:
    """A group with its LR and Adam's ε times these. LR · decay stays what it was."""
    changed = dict(base_lr=group["base_lr"] * rate, weight_decay=group["weight_decay"] / rate)
    return group | changed | ({"eps": group["eps"] * eps} if "eps" in group else {})


def decayed_roles(config, roles: set) -> tuple:
    """The roles with weight decay. ValueError if decay_gains names gains, but the model has none of
    those `roles`."""
    gains = DECAYED_GAINS[config.decay_gains]
    if config.decay_gains in ("input", "output") and not roles & set(gains):
        text = f"decay_gains={config.decay_gains}, but the model has no such gains ({', '.join(gains)})"
        raise ValueError(f"{text}: set decay_gains=none, or choose another")
    matrices = (
        MATRICES
        if config.decay_emb
        else tuple(role for role in MATRICES if role not in ("emb", "pos"))
    )
    return matrices + gains + (("scalar", "bias") if config.decay_scalars else ())


def check_penalties(model_config, config) -> None:
    """ValueError where a setting of the balance of experts has nothing to act on."""
    for name, balance in (
        ("balance_coef", "loss"),
        ("balance_rate", "bias"),
        ("z_coef", model_config.balance),
    ):
        value = getattr(config, name)
        if value in (type(config).__dataclass_fields__[name].default, 0):
            continue
        if not model_config.n_expert:
            raise ValueError(
                f"{name}={value} needs experts: set n_expert (8, for example), or leave {name} out"
            )
        if model_config.balance != balance:
            text = f"{name}={value} needs balance={balance}, but the model has balance={model_config.balance}"
            raise ValueError(f"{text}: leave {name} out, or change balance")


def describe_groups(optimizer, model) -> str:
    """A table: role, tensors, parameters, rule, peak LR, weight decay; then the model's frozen
    parameters."""
    rows = [("role", "tensors", "parameters", "optimizer", "peak LR", "decay")]
    for g in optimizer.param_groups:
        count, peak = sum(p.numel() for p in g["params"]), g["base_lr"] * g["lr_ratio"]
        rows.append(
            (
                g["label"],
                str(len(g["params"])),
                f"{count:,}",
                g["rule"],
                f"{peak:g}",
                f"{g['weight_decay']:g}",
            )
        )
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    if frozen:
        rows.append(("(frozen)", str(len(frozen)), f"{sum(frozen):,}", "", "", ""))
    return "\n".join(f"  {line}" for line in table(rows))


def state_bytes(model, config) -> int:
    """Bytes of optimizer state on `model`, which may be on the meta device, without making an
    optimizer."""
    states = (
        RULES[g["rule"]].state(p, g) for g in make_groups(model, config) for _, p in g["params"]
    )
    return sum(t.nbytes for state in states for t in state.values() if torch.is_tensor(t))
