"""Optimizers and schedules. Parameter groups come from the model's roles, one group a role.

An optimizer here reads the attribute `found_inf` (a tensor, 1 = the gradients are not finite) as torch's fused
optimizers do, and then leaves parameters and state as they are: a bad step is skipped on the device, without a host
sync. A new optimizer is a class with that contract and a row in `OPTIMIZERS`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.sgd import sgd

# Roles that get weight decay: the matrices (nanoGPT's and timm's rule; DNT does not say [I]), and gains as
# decay_gains says (the papers differ). Unit directions, scalars and biases never do.
DECAYED = ("emb", "pos", "head", "qk", "vo", "ffn")
DECAYED_GAINS = {"none": (), "all": ("gain_in", "gain_out"), "input": ("gain_in",), "output": ("gain_out",)}


class SGDW(torch.optim.Optimizer):
    """Momentum SGD with decoupled weight decay, mSGDW (DNT; the decay is timm's):

        w ← w (1 − ηλ);   m ← μ m + g;   w ← w − η m,      m = 0 before the first step

    State: one tensor the size of the parameter. No dampening, no Nesterov. Parameters without gradient are left alone.
    """

    def __init__(self, params, lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure=None):
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if group["weight_decay"]:
                shrink = 1 - group["lr"] * group["weight_decay"]
                if found_inf is not None:
                    shrink = torch.where(found_inf > 0, 1.0, shrink)
                torch._foreach_mul_(params, shrink)
            sgd(
                params,
                [p.grad for p in params],
                [self.state[p]["momentum_buffer"] for p in params],
                fused=True,
                found_inf=found_inf,
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=0.0,  # torch's is coupled (added to the gradient)
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )


@dataclass
class Kind:
    """One optimizer: how to build it, and the peak LR and decay it takes when the configuration names none."""

    build: Callable
    learning_rate: float
    weight_decay: float


def adamw(groups, config):
    fused = groups[0]["params"][0][1].device.type != "meta"  # a model without storage, see state_bytes
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-8, fused=fused)


# Defaults: the DNT paper's language models (Table 5).
OPTIMIZERS = {
    "adamw": Kind(adamw, 6e-4, 0.1),
    "msgdw": Kind(lambda g, c: SGDW(g, lr=0.0, momentum=c.momentum), 1.0, 1e-4),
}


def fill_defaults(config) -> None:
    """Fill in learning_rate, min_lr, weight_decay, lr_decay_iters where None; ValueError for impossible values."""
    kind = OPTIMIZERS[config.optimizer]
    if config.learning_rate is None:
        config.learning_rate = kind.learning_rate
    if config.weight_decay is None:
        config.weight_decay = kind.weight_decay
    if config.min_lr is None:
        config.min_lr = config.learning_rate / 10
    if config.lr_decay_iters is None:
        config.lr_decay_iters = config.max_iters
    for name in ("learning_rate", "min_lr", "weight_decay", "grad_clip", "warmup_iters", "lr_decay_iters"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)} must not be negative")
    for name in ("beta1", "beta2", "momentum"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 0 and below 1")
    if config.min_lr > config.learning_rate:
        raise ValueError(f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}: lower min_lr")
    if config.decay_gains != "none" and not config.weight_decay:
        raise ValueError(
            f"decay_gains={config.decay_gains} decays by weight_decay, which is 0: set it, or leave it out"
        )
    shrink = config.learning_rate * config.weight_decay
    if shrink >= 0.1:
        raise ValueError(
            f"learning_rate·weight_decay = {shrink:.3g} would shrink every matrix by {shrink:.0%} a step: lower "
            f"weight_decay ({config.optimizer}'s default is {kind.weight_decay})"
        )


def make_optimizer(model, config) -> torch.optim.Optimizer:
    """The configured optimizer over one parameter group a role. Groups carry `role`, and names for the state dict.

    ValueError where decay_gains names gains that the model does not have."""
    groups, roles = {}, model.roles()
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault(roles[name], []).append((name, p))
    gains = DECAYED_GAINS[config.decay_gains]
    if gains and not any(role in groups for role in gains):
        raise ValueError(
            f"decay_gains={config.decay_gains}, but the model has no such gains ({', '.join(gains)}): leave it out, or "
            "choose another"
        )
    decayed = DECAYED + gains
    groups = [
        {"params": named, "role": role, "weight_decay": config.weight_decay if role in decayed else 0.0}
        for role, named in groups.items()
    ]
    return OPTIMIZERS[config.optimizer].build(groups, config)


def state_bytes(model, config) -> int:
    """Bytes of optimizer state on `model`, which may be on the meta device: built, stepped once and counted."""
    optimizer = make_optimizer(model, config)
    if not optimizer.state:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        model.zero_grad(set_to_none=True)
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


def describe_groups(optimizer, config) -> str:
    """A table: role, tensors, parameters, optimizer, peak LR, weight decay."""
    rows = [("role", "tensors", "parameters", "optimizer", "peak LR", "decay")]
    for g in optimizer.param_groups:
        count = sum(p.numel() for p in g["params"])
        peak, decay = f"{config.learning_rate:g}", f"{g['weight_decay']:g}"
        rows.append((g["role"], str(len(g["params"])), f"{count:,}", config.optimizer, peak, decay))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(f"  {line}" for line in lines)


def load_optimizer(optimizer, saved: dict, step: int) -> None:
    """Load the state dict saved after `step` steps, keeping this run's LR, betas and decay: the configuration wins.

    Raises ValueError when the state belongs to other parameters or another optimizer, or does not fit."""
    fresh = optimizer.state_dict()["param_groups"]
    params = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
    try:
        fits = [g["param_names"] for g in saved["param_groups"]] == [g["param_names"] for g in fresh]
        states = {i: {k: t for k, t in s.items() if torch.is_tensor(t)} for i, s in saved["state"].items()}
        # a parameter that never had a gradient has no state, but some must have one after the first step
        fits = fits and states.keys() <= params.keys() and bool(states or step == 0)
        fits = fits and len({frozenset(s) for s in states.values()}) <= 1
        shapes = [(t.shape, params[i].shape) for i, s in states.items() for t in s.values() if fits]
        fits = fits and all(a == b or a.numel() == 1 for a, b in shapes)
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(
            f"the checkpoint's optimizer state does not fit {type(optimizer).__name__} on this model, it is damaged or "
            "belongs to other parameters: --init_from=CHECKPOINT_FILE starts a new run from the weights alone"
        )
    optimizer.load_state_dict({"state": saved["state"], "param_groups": fresh})


def lr_at(step: int, config) -> float:
    """LR of update `step` + 1. Warm-up: peak·t/W at update t ≤ W, so the first is not zero; then cosine to min_lr at
    t = lr_decay_iters and min_lr after it, or the peak throughout (schedule=constant)."""
    t, warmup, end, peak = step + 1, config.warmup_iters, config.lr_decay_iters, config.learning_rate
    if t <= warmup:
        return peak * t / warmup
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (t - warmup) / max(1, end - warmup))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - config.min_lr)
