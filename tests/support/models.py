"""Small models for tests: flag tables of every layout, builders with random weights, comparisons.

`LAYOUTS` and `SCHEMES` give each layout twice: as flags of GPTConfig, and as support.reference.Net,
which the test author wrote from the papers' equations.
"""

import inspect
from dataclasses import replace

import torch

from model import GPT, GPTConfig
from support.reference import Net

SIZE = dict(n_head=4, n_embd=16, block_size=9, vocab_size=50)
SIZE |= dict(norm_eps=1e-2)  # large, so that a wrong position shows
PRE = dict(attn="pre", mlp="pre")
NET = Net(vocab=50, heads=4, kv_heads=4, blocks=1, eps=1e-2, **PRE)
S4 = dict(input_norm=True, qk_norm=True, mid_norm="both")
S5 = dict(S4, pre_norm="attn")
POST = dict(pre_norm="none", post_norm="both")
LLAMA = dict(pos="rope", rope_theta=500.0, n_kv_head=2, mlp="swiglu", n_ff=24, tie_weights=False)
LLAMA_NET = dict(theta=500.0, kv_heads=2, act="swiglu", tied=False)
S4_NET = dict(attn="pre mid", mlp="pre mid", qk_norm=True, input_norm=True)
S5_NET = dict(S4_NET, mlp="mid")
POST_NET = dict(attn="post", mlp="post", final=False)
NO_NET = dict(attn="", mlp="", final=False)
QK_FULL = dict(qk_norm=True, qk_norm_over="full")
HYBRID = dict(pre_norm="none", post_norm="attn", qk_norm=True, v_norm=True)
HYBRID_NET = dict(attn="post", mlp="", qk_norm=True, v_norm=True)
LAYERNORM = dict(norm="layernorm", bias=True)
LAYERNORM_NET = dict(kind="layer", norm_bias=True, linear_bias=True)
NONE, FIXUP = dict(norm="none"), dict(norm="none", fixup=True)
NGPT = dict(POST, input_norm=True, mid_norm="both", qk_norm=True, gain="none", gain_out="sphere")
NGPT |= dict(branch_scale="layerscale", branch_scale_init=0.3, tied_skip=True, unit_rows=True)
NGPT_NET = dict(attn="mid post", mlp="mid post", final=False, input_norm=True, qk_norm=True)
NGPT_NET |= dict(gains="none", out="sphere", share=0.3)
UNIFIED = dict(gain="branch", gain_out="norm", gain_param="magdir")
UNIFIED_NET = dict(gains="branch", out="norm", gain_kind="magdir")
MANY_GAINS = dict(S4, **LAYERNORM, gain="branch", gain_out="scale")
COMPLETEP = dict(parametrization="completep", base_n_embd=4, base_n_layer=1, base_head_size=1)
DERF = dict(norm="dyt", dyt_squash="erf", dyt_shift=True, dyt_bias=True)
DYT_CONSTANT = dict(norm="dyt", dyt_learn_alpha=False, dyt_alpha_attn=0.7, dyt_alpha_other=0.4)

# The three tables have rows of the form
#     name: (flags of GPTConfig, the same network as fields of support.reference.Net).
# This one has the placements of norms, and the parts of a network.
LAYOUTS = {
    "S1": (dict(), dict()),
    "S2": (dict(qk_norm=True), dict(qk_norm=True)),
    "S4": (S4, S4_NET),
    "S5": (S5, S5_NET),
    "input norm": (dict(input_norm=True), dict(input_norm=True)),
    "LN": (LAYERNORM, LAYERNORM_NET),
    "LN without bias": (dict(norm="layernorm"), dict(kind="layer")),
    "bias": (dict(bias=True), dict(linear_bias=True)),
    "dyt": (dict(norm="dyt"), dict(kind="dyt")),
    "no norm": (NONE, NO_NET),
    "rope": (dict(pos="rope"), dict(theta=10000.0)),
    "relu": (dict(mlp="relu", n_ff=24), dict(act="relu")),
    "relu2": (dict(mlp="relu2"), dict(act="relu2")),
    "untied": (dict(tie_weights=False), dict(tied=False)),
    "llama": (LLAMA, LLAMA_NET),
}
# Published schemes. Net itself derives the final norm of Mix-LN and the numbers of the blocks.
SCHEMES = {
    "LNS": (dict(lns="norm"), dict(lns="norm")),
    "LNS residual": (dict(lns="residual"), dict(lns="residual")),
    "LNS learned": (dict(lns="norm", lns_learn=True), dict()),
    "Mix-LN": (dict(post_norm_blocks=1), dict(post_blocks=1)),
    "DeepNorm": (dict(POST, deepnorm=True), dict(POST_NET, deepnorm=True)),
    "Admin": (dict(POST, admin=True), dict(POST_NET, admin=True)),
    "LayerScale": (dict(branch_scale="layerscale"), dict(branch_gain="vector")),
    "SkipInit": (dict(branch_scale="skipinit"), dict(branch_gain="scalar")),
    "Fixup": (FIXUP, dict(NO_NET, fixup=True)),
    "Derf": (DERF, dict(kind="dyt", squash="erf", shift=True, norm_bias=True)),
    "GPAS": (dict(gpas=True), dict(gpas=True)),
    "sigmaReparam": (dict(sigma_reparam=True), dict(sigma=True)),
    "HG": (dict(gain="branch"), dict(gains="branch")),
    "DP": (dict(gain_out="scale"), dict(out="scale")),
    "DNP": (dict(gain_out="norm"), dict(out="norm")),
    "Peri-LN": (dict(mid_norm="both", input_norm=True), dict(S4_NET, qk_norm=False)),
    "Gemma 3": (
        dict(mid_norm="both", qk_norm=True, embed_scale=True),
        dict(S4_NET, input_norm=False, embed_scale=True),
    ),
    "OLMo-2": (
        dict(QK_FULL, pre_norm="none", mid_norm="both"),
        dict(attn="mid", mlp="mid", qk_norm=True, qk_over="full"),
    ),
    "HybridNorm": (HYBRID, HYBRID_NET),
    "HybridNorm*": (dict(HYBRID, pre_norm_sublayers=2), dict(HYBRID_NET, first_pre=2)),
    "Keel": (
        dict(post_norm="both", pre_norm_sublayers=1, skip_scale=0.0),
        dict(attn="pre post", mlp="pre post", final=False, first_pre=1, later_skip=0.0),
    ),
    "nGPT": (NGPT, NGPT_NET),
    "CompleteP": (
        COMPLETEP,
        dict(q_factor=0.5, logits_factor=0.25, depth_power=1.0, numbers=(1, 1, 1)),
    ),
}
# Parts that are tested only together with others, by `joined`.
BESIDE = {
    "post": (POST, POST_NET),
    "post attn": (dict(post_norm="attn"), dict(attn="pre post")),
    "mid": (dict(mid_norm="both"), dict(attn="pre mid", mlp="pre mid")),
    "mid attn": (dict(mid_norm="attn"), dict(attn="pre mid")),
    "mid mlp": (dict(mid_norm="mlp"), dict(mlp="pre mid")),
    "mqa": (dict(n_kv_head=1), dict(kv_heads=1)),
    "gqa": (dict(n_kv_head=2), dict(kv_heads=2)),
    "head size": (dict(head_size=6), dict()),
    "swiglu": (dict(mlp="swiglu"), dict(act="swiglu")),
    "geglu": (dict(mlp="geglu"), dict(act="geglu")),
    "LNS branch": (dict(lns="branch"), dict(lns="branch")),
    "LNS input": (dict(lns="input"), dict(lns="input")),
    "1/l": (dict(lns_power=1.0), dict(power=1.0)),
    "1/l^0.3": (dict(lns_power=0.3), dict(power=0.3)),
    "ffn alone": (dict(lns_branches="mlp"), dict(lns_on="mlp")),
    "Mix-LN 2": (dict(post_norm_blocks=2), dict(post_blocks=2)),
    "first pre": (dict(pre_norm_sublayers=3), dict(first_pre=3)),
    "skip": (dict(skip_scale=0.9), dict(later_skip=0.9)),
    "2 groups": (dict(norm_groups=2), dict(groups=2)),
    "4 groups": (dict(norm_groups=4), dict(groups=4)),
    "embed scale": (dict(embed_scale=True), dict(embed_scale=True)),
    "beta": (dict(dyt_bias=True), dict(norm_bias=True)),
    "constant": (DYT_CONSTANT, dict(kind="dyt", alpha=(0.7, 0.4))),
    "hardtanh": (dict(dyt_squash="hardtanh"), dict(squash="hardtanh")),
    "sigmoid": (dict(dyt_squash="sigmoid"), dict(squash="sigmoid")),
    "identity": (dict(dyt_squash="identity"), dict(squash="identity")),
    "no gains": (dict(gain="none"), dict(gains="none")),
    "OR": (dict(gain_param="magdir"), dict(gain_kind="magdir")),
    "ER": (dict(gain_param="expmagdir"), dict(gain_kind="expmagdir")),
}
PARTS = LAYOUTS | SCHEMES | BESIDE


def joined(names: str) -> dict:
    """{"A + B": (flags, fields of Net)} of parts that are tested together; in each the later one
    wins."""
    found = {}
    for name in names.split(" | "):
        flags, nets = zip(*(PARTS[part] for part in name.split(" + ")), strict=True)
        found[name] = tuple(
            {key: value for part in parts for key, value in part.items()} for parts in (flags, nets)
        )
    return found


# One or two of every family, for checks that are too slow to run on all in the fast suite.
REPRESENTATIVES = joined(
    "S5 | post + LN | S5 + dyt + beta | no norm + S2 | llama + S5 | relu2 | LNS | "
    "S5 + LNS branch + swiglu | S5 + Mix-LN + LNS + rope | DeepNorm | Admin | LayerScale | "
    "no norm + SkipInit | LN + 4 groups | Fixup + llama + bias + LNS branch | "
    "sigmaReparam + HG + DP + bias | LN + HG + LNS + swiglu | DNP | LN + post attn + ER | "
    "HG + DNP + OR | Derf + GPAS + Mix-LN | OLMo-2 + llama | HybridNorm* + llama + bias + ER | "
    "Keel"
)
MUCH = "llama + mid + input norm + bias + 2 groups + Mix-LN + LNS + 1/l^0.3 + LayerScale"
MUCH += " + sigmaReparam + HG + DP + ER"
REPRESENTATIVES["much at once"] = joined(MUCH)[MUCH]
LAYOUTS |= joined(
    "post + LN | S5 + dyt + beta | post + dyt | no norm + S2 | S2 + mqa | "
    "S2 + rope + gqa + head size | llama + S5"
)
SCHEMES |= {name: layout for name, layout in REPRESENTATIVES.items() if name not in LAYOUTS}
SCHEMES |= joined(
    "LN + LNS | llama + LNS + 1/l + ffn alone | LNS branch + 1/l^0.3 | "
    "post + LN + LNS residual + ffn alone | LN without bias + LNS input | dyt + LNS input | "
    "LN + mid mlp + Mix-LN 2 + LNS residual | S4 + LayerScale | mid mlp + LayerScale + ER | "
    "S4 + LayerScale + no gains | LN + mid attn + SkipInit + OR | S5 + 2 groups | "
    "Fixup + S2 + DP + bias | Fixup + DNP | dyt + embed scale | no norm + embed scale + rope | "
    "constant + hardtanh + beta | S4 + dyt + sigmoid | S5 + constant + identity + LNS | "
    "S4 + no gains | LN + no gains + LNS | post + dyt + no gains + beta | S5 + llama + HG | "
    "HG + Mix-LN + LNS learned | dyt + beta + HG + gqa | S4 + OR | "
    "llama + HG + DNP + OR + LNS | llama + nGPT | CompleteP + llama + S5 + LNS branch | "
    "DeepNorm + GPAS | S4 + Derf + LNS residual | llama + S2 | "
    "OLMo-2 + no gains + sigmaReparam | S5 + first pre + skip + LNS | HG + DP + bias + geglu"
)
ALL = LAYOUTS | SCHEMES
# Schemes that are refused with one block, and the fewest blocks that they need.
LEAST_LAYERS = dict.fromkeys(("S5 + Mix-LN + LNS + rope", "HG + Mix-LN + LNS learned"), 2)
LEAST_LAYERS |= dict.fromkeys(("much at once", "Keel", "S5 + first pre + skip + LNS"), 2)


def network(name, n_layer, **changes):
    """(flags that fit this depth, or LEAST_LAYERS; Net) of a scheme."""
    flags, net = ALL[name]
    n_layer = max(n_layer, LEAST_LAYERS.get(name, 1))
    if "post_norm_blocks" in flags:
        flags = dict(flags, post_norm_blocks=min(flags["post_norm_blocks"], n_layer))
    return flags, replace(NET, blocks=n_layer, **net | changes)


def depth_of(name) -> int:
    """The smallest depth at which every part of the scheme acts: both kinds of blocks, and a factor
    other than 1."""
    flags = ALL[name][0]
    n_first = max(2 * flags.get("post_norm_blocks", 0), flags.get("pre_norm_sublayers", 0))
    return 3 if n_first > 2 else 2


# ----------------------------------------------------------------------------------------- builders


@torch.no_grad()
def perturb(model, seed=0):
    """Random weights away from their init: no gain is 1 and no bias 0, so that an ignored one
    shows. Raises ValueError for a parameter whose name does not say what it is."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.empty(p.shape).normal_(generator=generator)
        if name.endswith((".gain", ".magnitude", ".direction", ".alpha", ".sigma")):
            p.copy_(1 + 0.3 * noise)
        elif name.endswith(("bias", ".shift", ".gate")):
            p.copy_(0.3 * noise)
        elif name in ("wte.weight", "wpe.weight"):
            p.copy_(noise)
        elif name.endswith(".weight"):  # a matrix keeps the size of its input
            p.copy_(noise * p.shape[-1] ** -0.5)
        else:
            raise ValueError(f"perturb has no values for {name}: add its name")
    model.power_iteration()  # σReparam's u and v belong to these matrices
    return model


def off_unit(weights) -> float:
    """The largest difference from 1 of a row's length, of a column's in o and down, in a state
    dict."""
    return max(
        (w.norm(dim=-2 if name.endswith((".o.weight", ".down.weight")) else -1) - 1).abs().max()
        for name, w in weights.items()
        if w.ndim > 1
    )


def build(flags, n_layer=2, dtype=torch.float64):
    """A small model with random weights, in eval mode."""
    return perturb(GPT(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags}))).to(dtype).eval()


def fresh(flags, n_layer=3):
    """A small float64 model with its initial weights, but the embedding so large that eps does not
    matter."""
    model = GPT(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags})).double()
    with torch.no_grad():
        model.wte.weight.mul_(50)
    return model


@torch.no_grad()
def copied(flags, weights, n_layer=3):
    """A model with these weights; they must be complete."""
    model = build(flags, n_layer)
    model.load_state_dict(weights)
    return model


def tokens(*shape, vocab=50, seed=1):
    """Random token ids."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def batch(T=7):
    """idx and targets (2, T); two targets are ignored."""
    idx, targets = tokens(2, T), tokens(2, T, seed=2)
    targets[0, 3] = targets[1, 0] = -1
    return idx, targets


# -------------------------------------------------------------------------------------- comparisons


def error(ours, theirs, floor=1e-9):
    """Largest difference, relative to the largest entry of `theirs` (or to `floor`, if that is all
    zeros)."""
    assert ours.shape == theirs.shape
    return (
        (ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=floor)
    ).item()


def floats(model):
    """{name: float64 copy} of every parameter and buffer."""
    return {name: t.detach().double().clone() for name, t in model.state_dict().items()}


def gradients(model, *args):
    """(loss, {parameter name: gradient}) of model(idx, targets)."""
    model.zero_grad(set_to_none=True)
    loss = model(*args)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------- refusals


def refusals(*functions, call: str = " refuse(") -> set:
    """(function, line number) of every line in these functions that refuses: by `refuse` of
    layers.rules, or by another call."""
    places = set()
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        places |= {
            (function.__name__, number) for number, line in enumerate(lines, first) if call in line
        }
    return places


def places_of(caught) -> set:
    """(function, line number) of every call on the way to the error that pytest.raises caught."""
    return {(entry.frame.code.name, entry.lineno + 1) for entry in caught.traceback}
