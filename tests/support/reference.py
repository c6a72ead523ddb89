"""The layouts written a second time, straight from the papers' equations, in plain float64.

Nothing here imports model.py: a network is a dict of weights by name, and a `Net` in which the test
says by hand which norm is where. Blocks, heads and tokens are loops, softmax and GELU are written
out, no kernel is shared. Equation numbers are DNT's (arXiv 2507.17501). LNS is arXiv 2502.05795,
DyT 2503.10622, Derf 2512.10938, GPAS 2506.22049, scale vectors 2605.26895, nGPT 2410.01131.
"""

import math
from dataclasses import dataclass

import torch

GATED = ("swiglu", "geglu")


@dataclass(frozen=True)
class Net:
    vocab: int  # entries that count, without padding
    heads: int
    kv_heads: int
    blocks: int
    eps: float
    attn: str = ""  # norms around attention, some of "pre mid post"
    mlp: str = ""  # norms around the FFN
    final: bool = True  # a norm before the head (never after one of Mix-LN's Post-LN blocks)
    kind: str = "rms"  # of all these norms: rms, layer or dyt
    groups: int = 1  # of channels, each with its own statistics
    squash: str = "tanh"  # DyT's function
    alpha: tuple = ()  # DyT's α where it is a constant: (before attention, elsewhere)
    shift: bool = False  # Derf's s
    norm_bias: bool = False
    linear_bias: bool = False
    input_norm: bool = False
    qk_norm: bool = False
    qk_over: str = "head"  # or full: QK-norm over all of q and all of k (OLMo-2)
    v_norm: bool = False  # over each head of v (HybridNorm)
    theta: float | None = None  # rotary positions of this base; None = a learned table
    act: str = "gelu"
    tied: bool = True
    embed_scale: bool = False  # a scalar on the embedding sum
    post_blocks: int = 0  # Mix-LN: the number of first blocks that have post norms alone
    first_pre: int = 0  # the number of first sub-layers that have a pre norm alone
    lns: str = ""  # where 1/l^power multiplies: norm (the pre norm's output), branch, residual,
    #   input (of the pre norm)
    power: float = 0.5
    lns_on: str = "attn mlp"
    numbers: tuple = ()  # l of each block, and of blocks that are not there; () = 1, 2, …
    skip: float = 1.0  # constant on the stream
    later_skip: float = 1.0  # the same, in all blocks but the first; 0 = 2·blocks (Keel)
    branch: float = 1.0  # constant on the branch output
    deepnorm: bool = False  # the stream times (2·blocks)^(1/4)
    admin: bool = False  # the stream times a vector
    gpas: bool = False  # a gate on the residual sum; with a post norm, on the stream before the sum
    branch_gain: str = ""  # on the branch output: vector (LayerScale) or scalar (SkipInit)
    share: float = 0.0  # nGPT: initial share α of the branch in the sum
    fixup: bool = False
    sigma: bool = False  # W → γ W / (uᵀ W v)
    gains: str = "shared"  # one per norm; none; branch = one each for q, k, v, gate, up instead of
    #   the pre norm's
    out: str = ""  # on the outputs of those matrices: scale (a vector) or norm (RMSNorm, then a
    #   vector); sphere: nGPT's vectors
    gain_kind: str = "direct"  # direct: the vector itself; magdir β·α/rms(α); expmagdir
    #   exp(β)·α/rms(α)
    experts: int = 0  # FFNs of a mixture; 0 = one dense FFN
    active: int = 2  # experts of a token
    shared: bool = False  # an FFN beside them that every token goes to
    score: str = "softmax"  # or sigmoid, of the router's logits
    normalised: bool = True  # the weights of a token's experts sum to 1
    weight_scale: float = 1.0  # on these weights
    choice_bias: bool = False  # a vector on the scores, for the choice alone
    causal: bool = True  # False: every token sees every token
    q_factor: float = 1.0  # on attention's logits
    logits_factor: float = 1.0
    depth_power: float = 0.0  # the branch output times blocks^-depth_power


def forward(net: Net, weights: dict, idx, targets=None, seen=None, routed=None):
    """(logits, loss or None) of token ids idx (B, T). A weight that is not used raises
    AssertionError.

    The two terms of each sub-layer's residual sum are appended to the list `seen`; of each mixture
    of experts (logits (B, T, E), scores (B, T, E), [[the experts of a token] of a row]) to
    `routed`."""
    unused = set(weights)

    def take(name):
        unused.discard(name)
        return weights[name]

    def vector(name):
        if net.gain_kind == "direct":
            return take(name + ".gain")
        magnitude, direction = take(name + ".magnitude"), take(name + ".direction")
        magnitude = torch.exp(magnitude) if net.gain_kind == "expmagdir" else magnitude
        return magnitude * direction / torch.sqrt((direction * direction).mean())

    def normalised(name, x):
        if net.kind == "dyt":
            before_attention = name.endswith("attn.pre")
            alpha = net.alpha[0 if before_attention else 1] if net.alpha else take(name + ".alpha")
            shift = take(name + ".shift") if net.shift else 0
            return squashed(alpha * x + shift, net.squash)
        size = x.shape[-1] // net.groups
        function = rms if net.kind == "rms" else standardise
        return torch.cat([function(part, net.eps) for part in x.split(size, dim=-1)], dim=-1)

    def gained(name, y, gain):
        """γ·y, where γ is a vector, a scalar, or ("") left out."""
        if gain == "scalar":
            return take(name + ".gain") * y
        return vector(name) * y if gain == "vector" else y

    def norm(name, x, gain="vector"):
        """γ·N(x) + β."""
        y = gained(name, normalised(name, x), gain)
        return y + take(name + ".bias") if net.norm_bias else y

    usual = "" if net.gains == "none" else "vector"  # the gain of a norm

    def affine(name, x, positions, expert=None):
        part = name.split(".")[-1]
        reads = part in ("q", "k", "v", "gate", "up")
        if net.gains == "branch" and reads and "pre" in positions:
            x = vector(name + ".pre") * x
        if net.fixup and not reads:
            x = x + take(name + ".pre.bias")
        w = take(name + ".weight")
        if net.sigma:
            w = take(name + ".sigma") * w / (take(name + ".u") @ w @ take(name + ".v"))
        b = take(name + ".bias") if net.linear_bias else None
        if expert is not None:
            w, b = w[expert], None if b is None else b[expert]
        y = x @ w.T
        y = y if b is None else y + b
        if reads and net.out and (net.out != "sphere" or part in ("gate", "up")):
            if net.out == "norm":
                heads = {"q": net.heads, "k": net.kv_heads}.get(part, 1)
                y = torch.cat([rms(head, net.eps) for head in y.chunk(heads, dim=-1)], dim=-1)
            y = vector(name + ".out") * y
        if net.fixup and part == ("gate" if net.act in GATED else "up"):
            y = y + take(name + ".out.bias")
        return y

    def attention(name, u, positions):
        q, k, v = (affine(f"{name}.{part}", u, positions) for part in "qkv")
        d_h, T = q.shape[-1] // net.heads, u.shape[1]
        factor = net.q_factor / math.sqrt(d_h)  # eq. 9
        if net.out == "sphere":  # nGPT, secs. 2.3 and 2.5: unit vectors times s, stored at 1/√d
            factor = math.sqrt(d_h)
            s = (take(name + ".qk_scale.gain") * math.sqrt(u.shape[-1])).chunk(net.heads)
        if net.qk_norm and net.qk_over == "full":
            q, k = rms(q, net.eps), rms(k, net.eps)
            if usual:
                q, k = vector(name + ".q.out") * q, vector(name + ".k.out") * k
        future = torch.full((T, T), float(net.causal)).triu(1).bool()
        outputs = []
        for head in range(net.heads):
            # consecutive query heads share a key/value head
            group = head // (net.heads // net.kv_heads)
            q_h = q[..., head * d_h : (head + 1) * d_h]
            k_h, v_h = (x[..., group * d_h : (group + 1) * d_h] for x in (k, v))
            # eq. 10: RMSNorm over d_h, before the rotation
            if net.qk_norm and net.qk_over == "head":
                q_h, k_h = rms(q_h, net.eps), rms(k_h, net.eps)
                if usual:
                    q_h, k_h = vector(name + ".q_norm") * q_h, vector(name + ".k_norm") * k_h
            if net.v_norm:
                v_h = rms(v_h, net.eps)
                v_h = vector(name + ".v_norm") * v_h if usual else v_h
            if net.theta is not None:
                q_h, k_h = rotated(q_h, net.theta), rotated(k_h, net.theta)
            if net.out == "sphere":
                q_h, k_h = (s[head] * x / math.sqrt(d_h) for x in (q_h, k_h))
            scores = q_h @ k_h.transpose(1, 2) * factor
            scores = scores.masked_fill(future, -math.inf)
            outputs.append(softmax(scores) @ v_h)
        return affine(name + ".o", torch.cat(outputs, dim=-1), positions)

    def ffn(name, u, positions, expert=None):
        h = affine(name + ".up", u, positions, expert)
        if net.act in GATED:
            g = affine(name + ".gate", u, positions, expert)
            h = (g / (1 + torch.exp(-g)) if net.act == "swiglu" else gelu(g)) * h
        elif net.act == "gelu":
            h = gelu(h)
        elif net.act == "gelu_erf":
            h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        else:
            h = h * (h > 0) if net.act == "relu" else (h * (h > 0)) ** 2
        return affine(name + ".down", h, positions, expert)

    def mixture(name, u, positions):
        read = (
            vector(name + ".router.pre") * u if net.gains == "branch" and "pre" in positions else u
        )
        z = read @ take(name + ".router.weight").T
        scores = softmax(z) if net.score == "softmax" else 1 / (1 + torch.exp(-z))
        ranked = (
            scores + take(name + ".router.choice_bias") if net.choice_bias else scores
        ).tolist()
        chosen, rows = [], []
        for row, ranks in enumerate(ranked):
            chosen.append(
                [sorted(range(net.experts), key=lambda e, r=r: -r[e])[: net.active] for r in ranks]
            )
            outputs = []
            for t, experts in enumerate(chosen[row]):
                total = sum(scores[row, t, e] for e in experts) if net.normalised else 1
                terms = [
                    scores[row, t, e] / total * ffn(name + ".experts", u[row, t], positions, e)
                    for e in experts
                ]
                outputs.append(net.weight_scale * sum(terms))
            rows.append(torch.stack(outputs))
        if routed is not None:
            routed.append((z, scores, chosen))
        y = torch.stack(rows)
        return y + ffn(name + ".shared", u, positions) if net.shared else y

    x = take("wte.weight")[idx]
    if net.theta is None:
        x = x + take("wpe.weight")[: idx.shape[1]]
    if net.embed_scale:
        x = take("embed_scale.gain") * x
    if net.input_norm:
        x = norm("input_norm", x, usual)
    for block, number in zip(
        range(net.blocks), net.numbers or range(1, net.blocks + 1), strict=False
    ):
        f_mlp = mixture if net.experts else ffn
        for branch, f, positions in (
            ("attn", attention, net.attn.split()),
            ("mlp", f_mlp, net.mlp.split()),
        ):
            name = f"blocks.{block}.{branch}"
            positions = ["post"] if number <= net.post_blocks else positions
            if 2 * (number - 1) + (branch == "mlp") < net.first_pre:
                positions = ["pre"]
            factor = {net.lns: number**-net.power} if branch in net.lns_on.split() else {}
            u = x
            if "pre" in positions:
                u = factor.get("input", 1) * u
                u = norm(name + ".pre", u, "" if net.gains == "branch" else usual)
                u = factor.get("norm", 1) * u
            elif net.fixup:
                u = u + take(name + ".pre.bias")
            y = f(name + ".f", u, positions)
            if "mid" in positions:
                y = norm(name + ".mid", y, net.branch_gain or usual)
            else:
                y = gained(name + ".mid", y, net.branch_gain)
            if net.share:  # nGPT eqs. 10 and 11, α stored at 1/√d
                alpha = abs(take(name + ".mid.gain") * net.share * math.sqrt(x.shape[-1]))
                x, y = (1 - alpha) * x, alpha * y
            if net.fixup:
                y = take(name + ".mid.gain") * y + take(name + ".mid.bias")
            y = factor.get("branch", 1) * net.blocks**-net.depth_power * net.branch * y
            if net.gpas and "post" in positions:
                x = shrunk(x, take(name + ".skip.gate"))
            x = net.skip * x
            if number > 1:
                x = (net.later_skip or 2 * net.blocks) * x
            if net.deepnorm:
                x = (2 * net.blocks) ** 0.25 * x
            if net.admin:
                x = take(name + ".skip.gain") * x
            if seen is not None:
                seen.append((x, y))
            x = x + y
            if net.gpas and "post" not in positions:
                x = shrunk(x, take(name + ".post.gate"))
            x = norm(name + ".post", x, usual) if "post" in positions else x
            x = factor.get("residual", 1) * x
    if net.final and net.post_blocks < net.blocks:
        x = norm("final_norm", x, usual)
    logits = (
        net.logits_factor * x @ take("wte.weight" if net.tied else "head.weight")[: net.vocab].T
    )
    if net.out == "sphere" and net.causal:  # nGPT, sec. 2.1: of a stream of length 1
        root = math.sqrt(x.shape[-1])
        logits = logits / root * (take("logits_scale.gain")[: net.vocab] * root)  # stored at 1/√d
    if unused:
        raise AssertionError(f"the equations have no place for {sorted(unused)}")
    return logits, None if targets is None else mean_loss(logits, targets)


def admin_omegas(net: Net, weights: dict, idx) -> dict:
    """{name: ω} of Admin's sub-layers: ω₁ = 1, ωᵢ₊₁² = Var(ωᵢ x) + Var(fᵢ) over all entries, with
    ω₁ … ωᵢ already set. One full forward pass for each sub-layer."""
    weights, omega, found = dict(weights), 1.0, {}
    for i, name in enumerate(
        f"blocks.{b}.{f}.skip.gain" for b in range(net.blocks) for f in ("attn", "mlp")
    ):
        found[name], weights[name], seen = omega, torch.full_like(weights[name], omega), []
        forward(net, weights, idx, seen=seen)
        omega = math.sqrt(sum(((part - part.mean()) ** 2).mean().item() for part in seen[i]))
    return found


def mean_loss(logits, targets, smoothing=0.0):
    """-Σ q log p, in nats, averaged over the positions whose target is not -1: q is 1 at the
    target, but for the share `smoothing`, which all entries have equally."""
    terms = []
    for z, target in zip(logits.flatten(0, -2), targets.flatten().tolist(), strict=True):
        if target != -1:
            log_p = z - z.max() - torch.log(torch.exp(z - z.max()).sum())
            q = torch.full_like(z, smoothing / len(z))
            q[target] += 1 - smoothing
            terms.append(-(q * log_p).sum())
    return sum(terms) / len(terms)


def shrunk(x, g):
    """GPAS: x − SiLU(g) · stopgrad(x)."""
    return x - g / (1 + torch.exp(-g)) * x.detach()


def squashed(x, function):
    if function == "tanh":
        return (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x))
    if function == "erf":  # from the normal distribution
        return 2 * torch.special.ndtr(math.sqrt(2) * x) - 1
    if function == "hardtanh":
        return x.clamp(-1, 1)
    return 1 / (1 + torch.exp(-x)) if function == "sigmoid" else x


def gelu(x):
    """GPT-2's form."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms(x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def standardise(x, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)


def softmax(scores):
    e = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def rotated(x, theta):
    """At position t, turn the pair (x_i, x_{i + d_h/2}) by the angle t · theta^(-2i/d_h). x: (B, T,
    d_h)."""
    half = x.shape[-1] // 2
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * theta ** (-i / half)
            a, b = x[:, t, i], x[:, t, i + half]
            y[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
            y[:, t, i + half] = a * math.sin(angle) + b * math.cos(angle)
    return y
