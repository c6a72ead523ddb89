"""Parametrizations: what changes when a network is larger than the one that its learning rate was
tuned on.

m = n_embd / base_n_embd is how much wider it is, l = n_layer / base_n_layer how much deeper.
Initial weights, learning rates and multipliers are those of the base size, times powers of m and l.
At the base size, and with parametrization=standard, every factor is 1. All that is as wide as the
stream must grow with it: FFN, channels of all heads. Heads may become more (base_head_size=0), or
larger.

    mup        μP (Tensor Programs V, arXiv 2203.03466): WIDTH, its Table 8, which allows a tied head; logits / m, and
               attention logits / √(head size / base head size), so q·k / head size (its Def. 4.1)
    depth_mup  and every branch / √l, α = 1/2 (Tensor Programs VI, 2310.02244)
    completep  and every branch / l, α = 1 (CompleteP, 2505.01618, Table 1; rates and ε for any α from there)

Weight decay is divided by what the rate is multiplied by: rate · decay stays that of the base.
CompleteP has that for matrices and the width; for the depth where α < 1, for the other roles, for
SGD and for Muon it is ours [I].
"""

from typing import NamedTuple


class Powers(NamedTuple):
    """Exponents of m for a parameter."""

    init: float  # of the initial standard deviation
    adam: float  # of the LR of AdamW and Adam-mini, whose updates have one size whatever that of
    #   the gradient
    sgd: float  # of the LR of momentum SGD
    eps: float  # of Adam's ε: as the gradient


# from a fixed size to the width, and vectors; also the head, thanks to its multiplier
INPUT = Powers(0, 0, 1, -1)
HIDDEN = Powers(-0.5, -1, 0, -1)  # from the width to the width
# from the width to a fixed size, without a multiplier; that a router is one: ours [I]
OUTPUT = Powers(-1, -1, -1, 0)
WIDTH = dict.fromkeys(
    ("emb", "patch", "pos", "head", "gain_in", "gain_out", "gain_dir", "bias", "scalar"), INPUT
)
WIDTH |= dict.fromkeys(("qk", "vo", "ffn"), HIDDEN) | dict(router=OUTPUT)
# which of a matrix's inputs and outputs grow with m; else both
GROWS = {"patch": (0, 1), "router": (1, 0)}

# Muon, on hidden matrices alone, ours [I]: the spectral norm of a change should stay (arXiv
# 2310.17813). Muon's own update has a spectral norm that stays; with match_rms_adamw it grows with
# √m.
MUON = {"original": 0.0, "match_rms_adamw": -0.5}

ALPHA = {"depth_mup": 0.5, "completep": 1.0}  # branches are multiplied by l^-α


class Sizes(NamedTuple):
    n_embd: float
    n_layer: float
    head_dim: float


def base(c) -> Sizes:
    """The sizes of the base of a GPTConfig; its own where base_… is 0, or its parametrization has
    no rule."""
    if c.parametrization == "standard":
        return Sizes(c.n_embd, c.n_layer, c.head_dim)
    n_layer = c.base_n_layer if c.parametrization in ALPHA else 0
    return Sizes(c.base_n_embd or c.n_embd, n_layer or c.n_layer, c.base_head_size or c.head_dim)


def growth(c) -> Sizes:
    """m, l, and how many times larger a head is: the sizes of a GPTConfig over those of its
    `base`."""
    return Sizes(*(getattr(c, name) / size for name, size in base(c)._asdict().items()))


def base_layer(c, layer: int) -> int:
    """The block of the base, from 1, that block `layer` is like: its ℓ in constants and initial
    values, ours [I]."""
    return -(-layer * base(c).n_layer // c.n_layer)


def initial_std(c, role: str, n_out: int, n_in: int) -> float:
    """Standard deviation of a matrix's initial weights, before its `init_scale`; Xavier's by the
    base's shape."""
    m, (inputs, outputs) = growth(c).n_embd, GROWS.get(role, (1, 1))
    is_xavier = c.init != "normal" and role not in ("emb", "pos", "head")
    std = (2 / (n_in / m**inputs + n_out / m**outputs)) ** 0.5 if is_xavier else c.init_std
    return std * m ** WIDTH[role].init


def multiplier(c, on: str, other: float | None = None) -> float | None:
    """The constant on "logits", on "branch", the output of each, on "q" or "k", times `other`; None
    where it is 1."""
    m, deeper, heads = growth(c)
    factor = dict(
        logits=1 / m, branch=deeper ** -ALPHA.get(c.parametrization, 0), q=heads**-0.5, k=1.0
    )[on]
    return other if factor == 1 else factor * (1.0 if other is None else other)
