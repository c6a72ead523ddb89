"""Learning rates and ε of a model that is larger than the tuned one: layers/scaling.py has the
parametrizations."""

from layers.scaling import ALPHA, MUON, WIDTH, growth


def learning_factors(c, role: str, like: str, shape: tuple, in_block: bool) -> tuple:
    """(factor on the LR, factor on ε) for a parameter under a rule `like` "adam", "sgd", or a key
    of MUON. A single number does not grow, and a vector as long as a head grows with it [I]. With
    depth, in a block: Adam and Muon l^(α − 1), SGD l^(2α − 1), ε l^-α; SGD's and Muon's follow from
    Adam's [I]."""
    if role not in WIDTH:
        return 1.0, 1.0
    powers, alpha, (m, deeper, heads) = WIDTH[role], ALPHA.get(c.parametrization, 1.0), growth(c)
    # a single head is as long as the stream
    m = {(c.head_dim,): heads, (c.n_embd,): m, (1,): 1.0}.get(shape, m)
    deeper = deeper if in_block else 1.0
    rate = m ** MUON.get(like, powers.sgd if like == "sgd" else powers.adam)
    return rate * deeper ** (
        2 * alpha - 1 if like == "sgd" else alpha - 1
    ), m**powers.eps * deeper**-alpha
