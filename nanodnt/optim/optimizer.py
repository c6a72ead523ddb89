"""The optimizer: parameter groups, each updated by the rule that it names. Its state, and loading
it."""

import torch

from layers.sharding import assign
from nanodnt.optim.registry import RULES


class Optimizer(torch.optim.Optimizer):
    """Groups as `make_groups` makes them. The state of every parameter exists from the start."""

    # Set for the rules (see registry.py) by `update` of nanodnt/engine.py. Named as in torch's
    # fused kernels.
    grad_scale = None  # (): what the gradients of this step are to be divided by
    found_inf = None  # (): whether they are not finite; bool, or a number that is not 0 then

    def __init__(self, groups):
        super().__init__(groups, dict(lr=0.0, weight_decay=0.0, compiled=False))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = RULES[group["rule"]].state(p, group)

    def state_dict(self) -> dict:
        """Without `compiled`: how a run computes is in no checkpoint."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            del group["compiled"]
        return saved

    def gradients(self) -> list:
        """The gradients that are a derivative of the loss: all but the loads that the balance rule
        is given."""
        params = [
            p for group in self.param_groups if group["rule"] != "balance" for p in group["params"]
        ]
        return [p.grad for p in params if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Those without one keep their values and their
        state."""
        work = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                lists = group, params, [p.grad for p in params], [self.state[p] for p in params]
                work.setdefault(group["rule"], []).append(lists)
        found_inf = None if self.found_inf is None else self.found_inf > 0
        for rule, groups in work.items():
            RULES[rule].step(groups, self.grad_scale, found_inf)


def load_optimizer(optimizer, saved: dict, step: int) -> None:
    """Load the state dict that was saved after `step` steps, parameter by parameter; LR, betas and
    decay stay as set. ValueError, before anything is changed, if the state belongs to other
    parameters or another optimizer."""
    groups = optimizer.param_groups
    fresh = {
        n: optimizer.state[p]
        for g in groups
        for n, p in zip(g["param_names"], g["params"], strict=True)
    }
    try:
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        states = {names[i]: state for i, state in saved["state"].items()}
        fits = sorted(names) == sorted(fresh) and (
            states.keys() == fresh.keys() or not states and step == 0
        )
        fits = fits and all(
            describe_tensors(state) == describe_tensors(fresh[name])
            for name, state in states.items()
        )
    except (KeyError, TypeError, AttributeError, IndexError):
        fits = False
    if not fits:
        problem = "the checkpoint's optimizer state does not fit this optimizer on this model"
        cause = "it is damaged or belongs to other parameters"
        fix = "--init_from=CHECKPOINT_FILE with another --out_dir starts a new run from the weights alone"
        raise ValueError(f"{problem}: {cause}; {fix}")
    for name, state in states.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                assign(fresh[name][key], value)
            else:
                fresh[name][key] = value


def describe_tensors(state: dict) -> dict:
    """{key: (shape, dtype)} of the tensors in a parameter's state."""
    return {key: (t.shape, t.dtype) for key, t in state.items() if torch.is_tensor(t)}
