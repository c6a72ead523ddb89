"""The layouts once more, straight from the papers' equations, in plain float64: what test_model.py holds the model to.

Nothing here knows model.py: a network is a dict of weights by name, and a `Net` in which the test says by hand what
stands where. Blocks, heads and places are loops, softmax and GELU are written out, no kernel is shared. Equation
numbers are DNT's (arXiv 2507.17501); DyT is arXiv 2503.10622.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Net:
    vocab: int  # entries that count, without padding
    heads: int
    kv_heads: int
    blocks: int
    eps: float
    attn: str = ""  # places around attention that carry a norm, out of "pre mid post"
    mlp: str = ""
    final: bool = True  # a norm before the head
    kind: str = "rms"  # of all these norms: rms, layer, dyt
    norm_bias: bool = False
    linear_bias: bool = False
    input_norm: bool = False
    qk_norm: bool = False
    theta: float | None = None  # rotary positions of this base; None = a learned table
    act: str = "gelu"
    tied: bool = True


def forward(net: Net, weights: dict, idx, targets=None):
    """(logits, loss or None) of token ids idx (B, T). Every weight must be used: a leftover one raises."""
    unused = set(weights)

    def take(name):
        unused.discard(name)
        return weights[name]

    def norm(name, x):
        if net.kind == "dyt":
            y = torch.tanh(take(name + ".alpha") * x)
        else:
            y = rms(x, net.eps) if net.kind == "rms" else standardise(x, net.eps)
        y = take(name + ".gain") * y
        return y + take(name + ".bias") if net.norm_bias else y

    def affine(name, x):
        y = x @ take(name + ".weight").T
        return y + take(name + ".bias") if net.linear_bias else y

    def attention(name, u):
        q, k, v = (affine(f"{name}.{part}", u) for part in "qkv")
        d_h, T = q.shape[-1] // net.heads, u.shape[1]
        future = torch.ones(T, T).triu(1).bool()
        outputs = []
        for head in range(net.heads):
            group = head // (net.heads // net.kv_heads)  # consecutive query heads share a key/value head
            q_h = q[..., head * d_h : (head + 1) * d_h]
            k_h, v_h = (x[..., group * d_h : (group + 1) * d_h] for x in (k, v))
            if net.qk_norm:  # eq. 10: RMSNorm over d_h, before the rotation
                q_h = take(name + ".q_norm.gain") * rms(q_h, net.eps)
                k_h = take(name + ".k_norm.gain") * rms(k_h, net.eps)
            if net.theta is not None:
                q_h, k_h = rotated(q_h, net.theta), rotated(k_h, net.theta)
            scores = (q_h @ k_h.transpose(1, 2) / math.sqrt(d_h)).masked_fill(future, -math.inf)  # eq. 9
            outputs.append(softmax(scores) @ v_h)
        return affine(name + ".o", torch.cat(outputs, dim=-1))

    def ffn(name, u):
        h = affine(name + ".up", u)
        if net.act == "swiglu":
            g = affine(name + ".gate", u)
            h = g / (1 + torch.exp(-g)) * h
        elif net.act == "gelu":
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        else:
            h = h * (h > 0) if net.act == "relu" else (h * (h > 0)) ** 2
        return affine(name + ".down", h)

    x = take("wte.weight")[idx]
    if net.theta is None:
        x = x + take("wpe.weight")[: idx.shape[1]]
    if net.input_norm:
        x = norm("input_norm", x)
    for block in range(net.blocks):
        for branch, f, places in (("attn", attention, net.attn.split()), ("mlp", ffn, net.mlp.split())):
            name = f"blocks.{block}.{branch}"
            u = norm(name + ".pre", x) if "pre" in places else x
            y = f(name + ".f", u)
            x = x + (norm(name + ".mid", y) if "mid" in places else y)
            x = norm(name + ".post", x) if "post" in places else x
    x = norm("final_norm", x) if net.final else x
    logits = x @ take("wte.weight" if net.tied else "head.weight")[: net.vocab].T
    if unused:
        raise AssertionError(f"the equations have no place for {sorted(unused)}")
    return logits, None if targets is None else mean_loss(logits, targets)


def mean_loss(logits, targets):
    """-log p(target), in nats, averaged over the positions whose target is not -1."""
    terms = []
    for row in range(targets.shape[0]):
        for t in range(targets.shape[1]):
            if targets[row, t] != -1:
                z = logits[row, t] - logits[row, t].max()
                terms.append(torch.log(torch.exp(z).sum()) - z[targets[row, t]])
    return sum(terms) / len(terms)


def rms(x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def standardise(x, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)


def softmax(scores):
    e = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def rotated(x, theta):
    """At position t, turn the pair (x_i, x_{i + d_h/2}) by the angle t · theta^(-2i/d_h). x: (B, T, d_h)."""
    half = x.shape[-1] // 2
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            a, b = x[:, t, i], x[:, t, i + half]
            y[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
            y[:, t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return y
