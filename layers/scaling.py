"""Parametrizations: what changes when a network is larger than the one that its learning rate was tuned on.

m = n_embd / base_n_embd is how much wider it is, l = n_layer / base_n_layer how much deeper. Initial weights, learning
rates and multipliers are those of the base size, times powers of m and l. At the base size, and with
parametrization=standard, every factor is 1. All that is as wide as the stream must grow with it: FFN, channels of all
heads. Heads may become more (base_head_size=0), or larger.

    mup        μP (Tensor Programs V, arXiv 2203.03466): WIDTH, its Table 8, which allows a tied head; logits / m, and
               attention logits / √(head size / base head size), so q·k / head size (its Def. 4.1)
    depth_mup  and every branch / √l, α = 1/2 (Tensor Programs VI, 2310.02244)
    completep  and every branch / l, α = 1 (CompleteP, 2505.01618, Table 1; rates and ε for any α from there)

Weight decay is divided by what the rate is multiplied by: rate · decay stays that of the base, as CompleteP has it for
matrices; for the other roles, for SGD and for Muon ours [I].
"""

from typing import NamedTuple


class Powers(NamedTuple):
    """Exponents of m for a parameter."""

    init: float  # of the initial standard deviation
    adam: float  # of the LR of AdamW and Adam-mini, whose updates have one size whatever that of the gradient
    sgd: float  # of the LR of momentum SGD
    eps: float  # of Adam's ε: as the gradient


INPUT = Powers(0, 0, 1, -1)  # from a fixed size to the width, and vectors; also the head, thanks to its multiplier
HIDDEN = Powers(-0.5, -1, 0, -1)  # from the width to the width
OUTPUT = Powers(-1, -1, -1, 0)  # from the width to a fixed size, without a multiplier; that a router is one: ours [I]
SCALAR = Powers(0, 0, 0, 0)  # ours [I]
WIDTH = dict.fromkeys(("emb", "patch", "pos", "head", "gain_in", "gain_out", "gain_dir", "bias"), INPUT)
WIDTH |= dict.fromkeys(("qk", "vo", "ffn"), HIDDEN) | dict(router=OUTPUT, scalar=SCALAR)

# Muon, on hidden matrices alone, ours [I]: the spectral norm of a change should stay (arXiv 2310.17813). Muon's own
# update has a spectral norm that stays; with match_rms_adamw it grows with √m.
MUON = {"original": 0.0, "match_rms_adamw": -0.5}

ALPHA = {"depth_mup": 0.5, "completep": 1.0}  # branches are multiplied by l^-α


def width(c) -> float:
    """m of a GPTConfig."""
    return c.n_embd / (c.base_n_embd or c.n_embd) if c.parametrization != "standard" else 1.0


def depth(c) -> float:
    """l of a GPTConfig."""
    return c.n_layer / (c.base_n_layer or c.n_layer) if c.parametrization in ALPHA else 1.0


def base_width(c) -> float:
    """The width that other initial values depend on."""
    return c.n_embd / width(c)


def init_depth(c) -> int:
    """The L that initial values depend on."""
    return round(c.n_layer / depth(c))


def init_factor(c, role: str, is_xavier: bool) -> float:
    """Factor on the initial standard deviation of a matrix. Xavier's falls with the width by itself."""
    return width(c) ** (WIDTH[role].init + 0.5 * is_xavier)


def multiplier(c, on: str, other: float | None = None) -> float | None:
    """The constant on "logits", on "branch", the output of each, on "q" or "k", times `other`; None where it is 1."""
    heads = c.head_dim / (c.base_head_size or c.head_dim) if c.parametrization != "standard" else 1.0
    factors = dict(logits=1 / width(c), branch=depth(c) ** -ALPHA.get(c.parametrization, 0), q=heads**-0.5, k=1.0)
    return other if factors[on] == 1 else factors[on] * (1.0 if other is None else other)


def learning_factors(c, role: str, like: str, in_block: bool) -> tuple:
    """(factor on the LR, factor on ε) for a parameter under a rule `like` "adam", "sgd", or a key of MUON. With depth,
    of those in a block: Adam and Muon l^(α − 1), SGD l^(2α − 1), ε l^-α; SGD's and Muon's follow from Adam's [I]."""
    if role not in WIDTH:
        return 1.0, 1.0
    is_magnitude = role in ("gain_in", "gain_out") and c.gain_param != "direct"  # a single number
    powers = SCALAR if is_magnitude else WIDTH[role]
    alpha = ALPHA.get(c.parametrization, 1.0)
    rate = width(c) ** MUON.get(like, powers.sgd if like == "sgd" else powers.adam)
    deeper = depth(c) if in_block else 1.0
    return rate * deeper ** (2 * alpha - 1 if like == "sgd" else alpha - 1), width(c) ** powers.eps * deeper**-alpha
