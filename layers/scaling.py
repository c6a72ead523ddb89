"""Parametrizations: factors for a network that is larger than the one its learning rate was tuned
on, the base.

m = n_embd / base_n_embd is how many times wider it is, l = n_layer / base_n_layer how many times
deeper. Initial weights, learning rates and multipliers are those of the base, times powers of m and
l. At the size of the base, and with parametrization=standard, every factor is 1. All sizes that
follow the stream must grow with it: FFN, channels of all heads. Heads may become more
(base_head_size=0), or larger.

    mup        μP (Tensor Programs V, arXiv 2203.03466), its Table 8, which allows a tied head;
               logits / m, and attention logits / √(head size / base head size), so q·k / head size
               (its Def. 4.1)
    depth_mup  also every branch / √l, α = 1/2 (Tensor Programs VI, 2310.02244)
    completep  also every branch / l, α = 1 (CompleteP, 2505.01618, Table 1; rates and ε for any α
               are from there)

Here are the constants in the forward pass. `initial_std` in layers/network.py has the initial
weights, nanodnt/optim/scaling.py the learning rates and ε. Functions take a GPTConfig.
"""

from typing import Any, NamedTuple

ALPHA = {"depth_mup": 0.5, "completep": 1.0}  # branches are multiplied by l^-α


class Sizes(NamedTuple):
    n_embd: float
    n_layer: float
    head_dim: float


def base(config: Any) -> Sizes:
    """Sizes of the base. They are the network's own where base_… is 0, or its parametrization has
    no rule for them."""
    if config.parametrization == "standard":
        return Sizes(config.n_embd, config.n_layer, config.head_dim)
    n_layer = config.n_layer
    if config.parametrization in ALPHA and config.base_n_layer:
        n_layer = config.base_n_layer
    return Sizes(
        n_embd=config.base_n_embd or config.n_embd,
        n_layer=n_layer,
        head_dim=config.base_head_size or config.head_dim,
    )


def growth(config: Any) -> Sizes:
    """Sizes of the network divided by those of its base: m, l, and the growth of a head."""
    sizes = base(config)
    return Sizes(
        n_embd=config.n_embd / sizes.n_embd,
        n_layer=config.n_layer / sizes.n_layer,
        head_dim=config.head_dim / sizes.head_dim,
    )


def base_layer(config: Any, layer: int) -> int:
    """Number, from 1, of the base's block that corresponds to block `layer`. Constants and initial
    values of block `layer` use it as their ℓ, our choice."""
    return -(-layer * base(config).n_layer // config.n_layer)


def multiplier(config: Any, place: str, constant: float | None = None) -> float | None:
    """Factor on "logits", on the output of each "branch", or on "q", "k" or "v", times `constant`.

    None if there is no constant and the factor is 1.
    """
    larger = growth(config)
    factors = {
        "logits": 1 / larger.n_embd,
        "branch": larger.n_layer ** -ALPHA.get(config.parametrization, 0),
        "q": larger.head_dim**-0.5,
        "k": 1.0,
        "v": 1.0,
    }
    factor = factors[place]
    if factor == 1:
        return constant
    if constant is None:
        return factor
    return factor * constant
