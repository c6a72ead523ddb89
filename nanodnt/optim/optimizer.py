"""The optimizer: parameter groups, each updated by the rule that it names; its state, and loading
it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layers.sharding import assign
from nanodnt.optim.registry import RULES, Group, State, Work, refuse


class Optimizer(torch.optim.Optimizer):
    """Groups as `make_optimizer` makes them. The state of every parameter exists from the start."""

    param_groups: list[Group]

    # Rules read these two, which `update` of nanodnt/engine.py sets. They have the names of
    # arguments of torch's fused kernels.
    grad_scale: Tensor | None = None  # (): divisor of the gradients of this step
    found_inf: Tensor | None = None  # (): bool, or a number > 0, for gradients that are not finite

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, dict(lr=0.0, weight_decay=0.0, compiled=False))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = RULES[group["rule"]].state(p, group)

    def state_dict(self) -> dict[str, Any]:
        """Without `compiled`: a checkpoint does not depend on how a run computes."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            del group["compiled"]
        return saved

    def gradients(self) -> list[Tensor]:
        """The gradients of the loss. The balance rule's are loads of experts, no derivatives."""
        gradients = []
        for group in self.param_groups:
            if group["rule"] != "balance":
                gradients += [p.grad for p in group["params"] if p.grad is not None]
        return gradients

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Update every parameter that has a gradient. Those without one keep their values and their
        state."""
        work_of_rule = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                grads = [p.grad for p in params]
                states = [self.state[p] for p in params]
                work = Work(group, params, grads, states)
                work_of_rule.setdefault(group["rule"], []).append(work)
        found_inf = None if self.found_inf is None else self.found_inf > 0
        for rule, work in work_of_rule.items():
            self.apply_rule(rule, work, found_inf)

    def apply_rule(self, rule: str, work: list[Work], found_inf: Tensor | None) -> None:
        RULES[rule].step(work, self.grad_scale, found_inf)

    def fits(self, saved: dict[str, State], step: int) -> bool:
        """Whether states {name: state} that were saved after `step` steps can be loaded: same
        parameters, shapes and dtypes."""
        fresh = self.state_by_name()
        if not saved and step == 0:
            return True
        return saved.keys() == fresh.keys() and all(
            describe_tensors(saved[name]) == describe_tensors(fresh[name]) for name in fresh
        )

    def load(self, saved: dict[str, State], groups: list[dict[str, Any]]) -> None:
        """Take over states that fit. LR, betas and decay stay as configured, so the saved `groups`
        are for Adapter only."""
        fresh = self.state_by_name()
        for name, state in saved.items():
            for key, value in state.items():
                if torch.is_tensor(value):
                    assign(fresh[name][key], value)
                else:
                    fresh[name][key] = value

    def state_by_name(self) -> dict[str, State]:
        return {name: self.state[p] for name, p in self.named_parameters().items()}

    def named_parameters(self) -> dict[str, Tensor]:
        named = {}
        for group in self.param_groups:
            named |= zip(group["param_names"], group["params"], strict=True)
        return named


def load_optimizer(optimizer: Optimizer, saved: dict, step: int) -> None:
    """Load the state dict that was saved after `step` steps, parameter by parameter; LR, betas and
    decay stay as set. ValueError, before anything is changed, if the state belongs to other
    parameters or another optimizer."""
    try:
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        states = {names[i]: state for i, state in saved["state"].items()}
        same_names = sorted(names) == sorted(optimizer.named_parameters())
        fits = same_names and optimizer.fits(states, step)
    except (KeyError, TypeError, AttributeError, IndexError):
        fits = False
    if not fits:
        problem = "the checkpoint's optimizer state does not fit this optimizer on this model"
        cause = "it is damaged, or belongs to other parameters or other flags of the optimizer"
        fix = "--init_from=CHECKPOINT_FILE with another --out_dir starts a new run from the weights"
        refuse(f"{problem}: {cause}; {fix} alone")
    optimizer.load(states, saved["param_groups"])


def describe_tensors(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """{key: (shape, dtype)} of the tensors in a parameter's state."""
    return {key: (t.shape, t.dtype) for key, t in state.items() if torch.is_tensor(t)}
