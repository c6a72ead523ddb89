"""Optimizers for tests: settings, small models with random parameters and gradients, steps with
changing LRs."""

import math
import re
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.optim import OPTIMIZERS, RULES, fill_defaults, kernels, make_optimizer
from nanodnt.settings import TrainConfig
from support.runs import ROOT, bits
from support.tolerances import roundings

DECAYED = {"emb", "pos", "head", "qk", "vo", "ffn", "router"}  # matrices; written out, not imported
STEPS = 8

# DNT with biases and a head of its own; and a layout with every other kind of parameter, whose k
# and v have fewer heads
DNT = dict(
    pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, bias=True, tie_weights=False
)
ALL = dict(
    pos="rope", mlp="swiglu", n_kv_head=1, bias=True, sigma_reparam=True, branch_scale="skipinit"
)
ALL |= dict(embed_scale=True, mid_norm="both", gain="branch", gain_out="norm", gain_param="magdir")
LAYOUTS = {"dnt": DNT, "tied": dict(DNT, tie_weights=True), "all": ALL}
MIXED = dict(
    mlp="swiglu",
    bias=True,
    n_ff=24,
    n_expert=3,
    n_expert_shared=1,
    balance="bias",
    router="sigmoid",
)
MIXED |= dict(gain="branch", gain_out="scale")

# Every rule with every option that changes its path through the code. One that a fork adds is
# tested by its defaults.
VARIANTS = {
    "adamw": dict(optimizer="adamw"),
    "adamw_cautious": dict(optimizer="adamw", cautious_decay=True),
    "msgdw": dict(optimizer="msgdw"),
    "msgdw_dampening": dict(optimizer="msgdw", dampening=0.3),
    "msgdw_nesterov": dict(optimizer="msgdw", nesterov=True),
    "muon": dict(optimizer="muon"),
    "muon_original": dict(optimizer="muon", muon_adjust_lr="original", nesterov=False),
    "muon_2026": dict(
        optimizer="muon", muon_coefficients="polar", muon_row_norm=True, cautious_decay=True
    ),
    "adam_mini": dict(optimizer="adam_mini"),
    "soap": dict(optimizer="soap", soap_frequency=2),
}
# a fork deletes some
VARIANTS = {name: flags for name, flags in VARIANTS.items() if flags["optimizer"] in OPTIMIZERS}
# whose results tests know by hand
OURS = tuple(dict.fromkeys(v["optimizer"] for v in VARIANTS.values()))
VARIANTS |= {name: dict(optimizer=name) for name in OPTIMIZERS if name not in OURS}
NAMES = list(OPTIMIZERS)


def filled(**changes):
    """The training settings with these changes, checked and filled in."""
    config = TrainConfig(**changes)
    config.check()
    fill_defaults(config)
    return config


def settings(**changes):
    """The same, with an LR and a decay that suit every optimizer, and show in few steps."""
    return filled(**dict(learning_rate=0.01, weight_decay=0.3) | changes)


def tiny(**flags):
    """A DNT, or another layout, of one block, whose parameters are all random numbers of size 1."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=31)
    model = GPT(GPTConfig(**sizes | (flags or DNT)))
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data.normal_(generator=g)
    return model


def gradients(model, steps, seed=0, small=("gain_out", "bias", "pos", "vo")):
    """[{name: gradient} of each step], in float64. Those of `small` roles are so small that Adam's
    ε matters."""
    g = torch.Generator().manual_seed(seed)
    scale = {name: 1e-8 if role in small else 1.0 for name, role in model.roles().items()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return [
        {n: scale[n] * torch.randn(s, generator=g).double() for n, s in shapes.items()}
        for _ in range(steps)
    ]


def spoil(grads, kind):
    """The gradients of a step with found_inf. `one`: a single NaN; `other`: none, it was on another
    rank."""
    grads = {name: g.clone() for name, g in grads.items()}
    if kind in ("nan", "inf"):
        return {name: torch.full_like(g, getattr(math, kind)) for name, g in grads.items()}
    if kind == "one":
        next(iter(grads.values()))[0, 0] = math.nan
    return grads


def drive(model, optimizer, steps, found_inf=None, grad_scale=None):
    """A step for each {name: gradient} of `steps`, with LRs that change. Returns {name: [the LR of
    each step]}."""
    optimizer.found_inf = found_inf
    optimizer.grad_scale = grad_scale
    rates = {name: [] for name, _ in model.named_parameters()}
    for t, grads in enumerate(steps):
        for name, p in model.named_parameters():
            p.grad = None if grads[name] is None else grads[name].to(p.dtype)
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.01 * (1 + (t + i) % 4)
            for name in group["param_names"]:
                rates[name].append(group["lr"])
        optimizer.step()
    return rates


def driven(changes, steps, found_inf=None, grad_scale=None, **flags):
    """(A tiny model, its optimizer with these settings) after `drive`; the numbers may be plain
    ones."""
    model = tiny(**flags)
    optimizer = make_optimizer(model, settings(**changes))
    drive(
        model,
        optimizer,
        steps,
        *(None if x is None else torch.as_tensor(x) for x in (found_inf, grad_scale)),
    )
    return model, optimizer


def values(model):
    """{name: a copy of the parameter in float64}."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def assert_parameters(model, want, tolerance):
    for name, p in model.named_parameters():
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(
            p.detach().double(), want[name], rtol=tolerance, atol=tolerance, msg=message
        )


STEPS_ERROR = roundings(10 * STEPS)  # of ten operations each


def assert_steps(update, model, tolerance=STEPS_ERROR, **changes):
    """Some steps change every parameter as `update(role, w, decay, steps)` does in float64;
    `steps`: [(gradient, LR)]. Returns the optimizer."""
    optimizer = make_optimizer(model, settings(**changes))
    want = values(model)
    grads = gradients(model, STEPS)
    roles = model.roles()
    rates = drive(model, optimizer, grads)
    for name, w in want.items():
        steps = [(g[name], lr) for g, lr in zip(grads, rates[name], strict=True)]
        want[name] = update(roles[name], w, 0.3 if roles[name] in DECAYED else 0.0, steps)
    assert_parameters(model, want, tolerance)
    return optimizer


def with_torch(p, steps, optimizer, decay=0.0):
    """p after the steps [(gradient, LR)] of an optimizer of torch; `decay` comes before each."""
    for grad, lr in steps:
        optimizer.param_groups[0]["lr"] = lr
        p.grad = grad.to(p.dtype)
        p.data.mul_(1 - lr * decay)
        optimizer.step()
    return p.detach().double()


def everything(model, optimizer):
    """Parameters and state, bit by bit."""
    return bits([dict(model.named_parameters()), optimizer.state_dict()["state"]])


def blocks_of(role, rows, head_dim):
    """The slices along the rows that share a second moment, as in Adam-mini 1.1.0."""
    if role == "qk":
        return [slice(i, i + head_dim) for i in range(0, rows, head_dim)]
    return [slice(i, i + 1) for i in range(rows)] if role in DECAYED else [slice(None)]


def use_plain_operators(monkeypatch) -> None:
    """A CPU counts as a device whose fused kernels are not used."""
    monkeypatch.setattr(kernels, "FUSED", ())


def compile_updates(monkeypatch, backend="inductor") -> None:
    """A CPU counts as a device whose updates are compiled."""
    monkeypatch.setattr(kernels, "COMPILED", ("cpu",))
    monkeypatch.setattr(
        kernels, "compile_update", cache(partial(torch.compile, backend=backend, dynamic=False))
    )


def lion_source():
    """The docs' example of a new optimizer: the whole of nanodnt/optim/lion.py."""
    return block_of_page(r"the whole of `nanodnt/optim/lion\.py`:\n\n```python\n(.*?)```")


def block_of_page(pattern: str) -> str:
    """The block of docs/optimizers.md that the group of `pattern` matches. Skips where a fork has
    no such page."""
    if not (ROOT / "docs" / "optimizers.md").exists():
        pytest.skip("this fork has deleted docs/optimizers.md")
    page = (ROOT / "docs" / "optimizers.md").read_text()
    (source,) = re.findall(pattern, page, re.DOTALL)
    return source


@contextmanager
def registered(source):
    """Run the source of an optimizer's file; at the end forget what it has registered. A fork may
    have the same."""
    before = dict(OPTIMIZERS), dict(RULES)
    for name in set(re.findall(r"\bregister(?:_update)?\(['\"](\w+)", source)) & OPTIMIZERS.keys():
        del OPTIMIZERS[name], RULES[name]
    try:
        exec(compile(source, "nanodnt/optim/lion.py", "exec"), {})
        yield
    finally:
        for registry, entries in zip((OPTIMIZERS, RULES), before, strict=True):
            registry.clear()
            registry.update(entries)
