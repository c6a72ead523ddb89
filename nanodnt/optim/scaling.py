"""Learning rates and ε of a model that is larger than the base, on which they were tuned.

layers/scaling.py defines the parametrizations, m (times wider), l (times deeper) and α. Weight
decay is divided by the factor on the rate: rate · decay stays that of the base. CompleteP has that
for matrices and the width. For the depth where α < 1, for the other roles, for SGD and for Muon it
is our choice.
"""

from typing import Any, NamedTuple

from layers.scaling import ALPHA, growth


class Powers(NamedTuple):
    """Exponents of m for a parameter."""

    adam: float  # LR of AdamW and Adam-mini, whose updates do not grow with the gradient
    sgd: float  # LR of momentum SGD
    eps: float  # ε of Adam, which follows the gradient


# From a fixed size to the width, and vectors; also the head, thanks to its multiplier
INPUT = Powers(adam=0, sgd=1, eps=-1)
HIDDEN = Powers(adam=-1, sgd=0, eps=-1)  # from the width to the width
OUTPUT = Powers(adam=-1, sgd=-1, eps=0)  # from the width to a fixed size, without a multiplier

# Table 8 of Tensor Programs V by role; that a router is an output is our choice
WIDTH = {
    "emb": INPUT,
    "patch": INPUT,
    "pos": INPUT,
    "head": INPUT,
    "qk": HIDDEN,
    "vo": HIDDEN,
    "ffn": HIDDEN,
    "router": OUTPUT,
    "gain_in": INPUT,
    "gain_out": INPUT,
    "gain_dir": INPUT,
    "scalar": INPUT,
    "bias": INPUT,
}

# Exponents of m for the LR of Muon, which updates hidden matrices alone. Our choice: the spectral
# norm of a change should stay (arXiv 2310.17813). Muon's own update has a spectral norm that stays;
# with match_rms_adamw it grows with √m.
MUON = {"original": 0.0, "match_rms_adamw": -0.5}


class Factors(NamedTuple):
    rate: float  # on the LR
    eps: float  # on ε


def learning_factors(
    config: Any, role: str, kind: str, shape: tuple[int, ...], in_block: bool
) -> Factors:
    """Factors of a parameter of this role and shape; `config` is the GPTConfig.

    `kind` is that of its update rule: "adam", "sgd", or a key of MUON. A single number does not
    grow, and a vector as long as a head grows with the head, our choice. In a block the depth adds
    l^(α − 1) for Adam and Muon, l^(2α − 1) for SGD, and l^-α for ε. The exponents of SGD and Muon
    follow from Adam's, our choice.
    """
    if role not in WIDTH:
        return Factors(1.0, 1.0)
    powers = WIDTH[role]
    larger = growth(config)
    alpha = ALPHA.get(config.parametrization, 1.0)

    wider = larger.n_embd
    if shape == (1,):
        wider = 1.0
    elif shape == (config.head_dim,) and config.head_dim != config.n_embd:
        wider = larger.head_dim
    deeper = larger.n_layer if in_block else 1.0

    if kind == "sgd":
        rate = wider**powers.sgd * deeper ** (2 * alpha - 1)
    else:
        rate = wider ** MUON.get(kind, powers.adam) * deeper ** (alpha - 1)
    return Factors(rate, wider**powers.eps * deeper**-alpha)
