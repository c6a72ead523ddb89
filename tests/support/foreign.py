"""Optimizer classes of others, as --optimizer=MODULE:CLASS finds them: their state has every form
that the adapter must keep, or cannot."""

import torch


class Nested(torch.optim.Optimizer):
    """Momentum with nested state as SOAP has it: float64, transposed in memory, None, numbers; with
    a count in its groups. It makes its state when a parameter has no entry."""

    def __init__(self, params, lr=1e-3, mu=0.9, weight_decay=0.0, start=0):
        if lr < 0 or not 0 <= mu < 1:
            raise ValueError(f"invalid lr {lr}\nor mu {mu}")
        defaults = dict(lr=lr, mu=mu, weight_decay=weight_decay, count=start)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["total"] = group.get("total", torch.zeros(1)) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    m = torch.zeros(p.shape[::-1], dtype=torch.float64).permute(
                        *reversed(range(p.ndim))
                    )
                    counts = {"n": 0, "seen": torch.zeros((), dtype=torch.int64), "none": None}
                    self.state[p] = {"parts": [m, [], (1.5, "text")], "counts": counts}
                m, counts = self.state[p]["parts"][0], self.state[p]["counts"]
                m.mul_(group["mu"]).add_(p.grad)
                counts["n"] += 1
                counts["seen"] += 1
                flat = m.reshape(-1, m.shape[-1]) if m.ndim != 2 else m
                step = (flat @ (flat.mT @ flat)).view_as(m) / (flat.norm() ** 3 + 1e-12)
                share = group["lr"] / (1 + counts["n"] / group["count"])
                p.mul_(1 - share * group["weight_decay"]).sub_(share * step)


class Silent(Nested):
    """Without lr in its groups."""

    def __init__(self, params, lr):
        torch.optim.Optimizer.__init__(self, params, dict(mu=0.9, weight_decay=0.0, count=0))


class Regroups(torch.optim.Optimizer):
    """All parameters in one new group, with one learning rate."""

    def __init__(self, params, lr):
        every = [p for group in params for p in group["params"]]
        super().__init__(every, dict(lr=lr, weight_decay=0.0))


class WithoutRate(Nested):
    def __init__(self, params, mu=0.9):
        super().__init__(params, mu=mu)


class Bare(Nested):
    """Does not call the constructor of torch's Optimizer."""

    def __init__(self, params, lr):
        self.lr = lr


class Exits(Nested):
    def __init__(self, params, lr):
        raise SystemExit(3)


class NeedsClosure(Nested):
    def step(self, closure):
        closure()


class Unsavable(Nested):
    def step(self, closure=None):
        super().step()
        for p, state in self.state.items():
            state["set"] = {p.ndim}


class Global(Nested):
    def step(self, closure=None):
        super().step()
        self.state["count"] = {"n": 1}


class Reads(Nested):
    """Looks at the gradients, which tensors without contents do not have."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = [p.grad.sum().item() for p in group["params"]]
        super().step()


class Fails(Nested):
    """Raises in its second step."""

    def step(self, closure=None):
        if self.state:
            raise self.error("a mistake\nof its author")
        super().step()

    error = ArithmeticError


class RunsOut(Fails):
    error = torch.OutOfMemoryError


no_class = Nested.step
