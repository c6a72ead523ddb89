"""Small models for tests: flag tables of every layout, builders with random weights, comparisons.

`LAYOUTS` and `SCHEMES` give each layout twice: as flags of GPTConfig, and as support.reference.Net, which the test
author wrote from the papers' equations.
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
LAYERNORM, LAYERNORM_NET = dict(norm="layernorm", bias=True), dict(kind="layer", norm_bias=True, linear_bias=True)
NONE, FIXUP = dict(norm="none"), dict(norm="none", fixup=True)
UNIFIED = dict(gain="branch", gain_out="norm", gain_param="magdir")
UNIFIED_NET = dict(gains="branch", out="norm", gain_kind="magdir")
MANY_GAINS = dict(S4, **LAYERNORM, gain="branch", gain_out="scale")
DYT_CONSTANT = dict(norm="dyt", dyt_learn_alpha=False, dyt_alpha_attn=0.7, dyt_alpha_other=0.4)

# name: (flags of GPTConfig, the same network as a support.reference.Net): placements and parts.
LAYOUTS = {
    "S1": (dict(), dict()),
    "S2": (dict(qk_norm=True), dict(qk_norm=True)),
    "S4": (S4, S4_NET),
    "S5": (S5, S5_NET),
    "input norm": (dict(input_norm=True), dict(input_norm=True)),
    "pre-LN, bias": (LAYERNORM, LAYERNORM_NET),
    "pre-LN, no bias": (dict(norm="layernorm"), dict(kind="layer")),
    "rmsnorm, bias": (dict(bias=True), dict(linear_bias=True)),
    "post-LN, bias": (dict(POST, **LAYERNORM), dict(POST_NET, **LAYERNORM_NET)),
    "dyt": (dict(norm="dyt"), dict(kind="dyt")),
    "dyt, S5": (dict(S5, norm="dyt", dyt_bias=True), dict(S5_NET, kind="dyt", norm_bias=True)),
    "dyt, post": (dict(POST, norm="dyt"), dict(POST_NET, kind="dyt")),
    "no norm": (NONE, NO_NET),
    "no norm but qk": (dict(norm="none", qk_norm=True), dict(NO_NET, qk_norm=True)),
    "rope": (dict(pos="rope"), dict(theta=10000.0)),
    "mqa, qk norm": (dict(n_kv_head=1, qk_norm=True), dict(kv_heads=1, qk_norm=True)),
    "head size": (
        dict(head_size=6, pos="rope", n_kv_head=2, qk_norm=True),
        dict(theta=10000.0, kv_heads=2, qk_norm=True),
    ),
    "relu, n_ff": (dict(mlp="relu", n_ff=24), dict(act="relu")),
    "relu2": (dict(mlp="relu2"), dict(act="relu2")),
    "untied": (dict(tie_weights=False), dict(tied=False)),
    "llama": (LLAMA, LLAMA_NET),
    "llama, S5": (dict(LLAMA, **S5), dict(S5_NET, **LLAMA_NET)),
}

# The same for the published schemes. Net derives the final norm of Mix-LN and the numbers of the blocks itself.
SCHEMES = {
    "LNS": (dict(lns="norm"), dict(lns="norm")),
    "LNS, bias": (dict(LAYERNORM, lns="norm"), dict(**LAYERNORM_NET, lns="norm")),
    "LNS 1/l, ffn, llama": (
        dict(LLAMA, lns="norm", lns_power=1.0, lns_branches="mlp"),
        dict(LLAMA_NET, lns="norm", power=1.0, lns_on="mlp"),
    ),
    "LNS branch": (dict(lns="branch", lns_power=0.25), dict(lns="branch", power=0.25)),
    "LNS branch, mid": (dict(S5, lns="branch", mlp="swiglu"), dict(S5_NET, lns="branch", act="swiglu")),
    "LNS residual": (dict(lns="residual"), dict(lns="residual")),
    "LNS residual, post": (
        dict(POST, **LAYERNORM, lns="residual", lns_branches="mlp"),
        dict(POST_NET, lns="residual", lns_on="mlp", **LAYERNORM_NET),
    ),
    "LNS input": (dict(lns="input", norm="layernorm"), dict(lns="input", kind="layer")),
    "LNS input, DyT": (dict(norm="dyt", lns="input"), dict(kind="dyt", lns="input")),
    "LNS learned": (dict(lns="norm", lns_learn=True), dict()),
    "Mix-LN": (dict(post_norm_blocks=1), dict(post_blocks=1)),
    "Mix-LN, S5, LNS": (
        dict(S5, post_norm_blocks=1, lns="norm", pos="rope"),
        dict(S5_NET, post_blocks=1, lns="norm", theta=10000.0),
    ),
    "Mix-LN, LNS residual": (
        dict(LAYERNORM, mid_norm="mlp", post_norm_blocks=2, lns="residual"),
        dict(attn="pre", mlp="pre mid", **LAYERNORM_NET, post_blocks=2, lns="residual"),
    ),
    "DeepNorm": (dict(POST, deepnorm=True), dict(POST_NET, deepnorm=True)),
    "Admin": (dict(POST, admin=True), dict(POST_NET, admin=True)),
    "LayerScale": (dict(branch_scale="layerscale"), dict(branch_gain="vector")),
    "LayerScale, S4": (dict(S4, branch_scale="layerscale"), dict(S4_NET, branch_gain="vector")),
    "LayerScale, ER, one mid": (
        dict(mid_norm="mlp", branch_scale="layerscale", gain_param="expmagdir"),
        dict(attn="pre", mlp="pre mid", branch_gain="vector", gain_kind="expmagdir"),
    ),
    "LayerScale, no gains": (
        dict(S4, branch_scale="layerscale", gain="none"),
        dict(S4_NET, branch_gain="vector", gains="none"),
    ),
    "SkipInit": (dict(branch_scale="skipinit"), dict(branch_gain="scalar")),
    "SkipInit, no norm": (dict(NONE, branch_scale="skipinit"), dict(NO_NET, branch_gain="scalar")),
    "SkipInit, mid, bias, OR": (
        dict(LAYERNORM, mid_norm="attn", branch_scale="skipinit", gain_param="magdir"),
        dict(attn="pre mid", mlp="pre", branch_gain="scalar", gain_kind="magdir", **LAYERNORM_NET),
    ),
    "Group-LN": (dict(LAYERNORM, norm_groups=4), dict(**LAYERNORM_NET, groups=4)),
    "Group-RMS, S5": (dict(S5, norm_groups=2), dict(S5_NET, groups=2)),
    "Fixup": (FIXUP, dict(NO_NET, fixup=True)),
    "Fixup, llama, bias": (
        dict(FIXUP, **LLAMA, bias=True, lns="branch"),
        dict(NO_NET, **LLAMA_NET, fixup=True, linear_bias=True, lns="branch"),
    ),
    "Fixup, QK, DP, bias": (
        dict(FIXUP, qk_norm=True, gain_out="scale", bias=True),
        dict(NO_NET, fixup=True, qk_norm=True, out="scale", linear_bias=True),
    ),
    "Fixup, DNP": (dict(FIXUP, gain_out="norm"), dict(NO_NET, fixup=True, out="norm")),
    "sigmaReparam": (dict(sigma_reparam=True), dict(sigma=True)),
    "sigmaReparam, HG, DP": (
        dict(sigma_reparam=True, gain="branch", gain_out="scale", bias=True),
        dict(sigma=True, gains="branch", out="scale", linear_bias=True),
    ),
    "DyT, embed scale": (dict(norm="dyt", embed_scale=True), dict(kind="dyt", embed_scale=True)),
    "embed scale, no norm, rope": (
        dict(NONE, embed_scale=True, pos="rope"),
        dict(NO_NET, embed_scale=True, theta=10000.0),
    ),
    "DyT hardtanh, constant alpha": (
        dict(DYT_CONSTANT, dyt_squash="hardtanh", dyt_bias=True),
        dict(kind="dyt", squash="hardtanh", alpha=(0.7, 0.4), norm_bias=True),
    ),
    "DyT sigmoid, S4": (dict(S4, norm="dyt", dyt_squash="sigmoid"), dict(S4_NET, kind="dyt", squash="sigmoid")),
    "DyT identity, S5, LNS": (
        dict(S5, **DYT_CONSTANT, dyt_squash="identity", lns="norm"),
        dict(S5_NET, kind="dyt", squash="identity", alpha=(0.7, 0.4), lns="norm"),
    ),
    "no gains": (dict(S4, gain="none"), dict(S4_NET, gains="none")),
    "no gains, bias": (dict(LAYERNORM, gain="none", lns="norm"), dict(**LAYERNORM_NET, gains="none", lns="norm")),
    "no gains, DyT": (
        dict(POST, norm="dyt", gain="none", dyt_bias=True),
        dict(POST_NET, kind="dyt", gains="none", norm_bias=True),
    ),
    "HG": (dict(gain="branch"), dict(gains="branch")),
    "HG, bias, LNS": (
        dict(LAYERNORM, gain="branch", lns="norm", mlp="swiglu"),
        dict(**LAYERNORM_NET, gains="branch", lns="norm", act="swiglu"),
    ),
    "HG, S5, llama": (dict(S5, **LLAMA, gain="branch"), dict(S5_NET, **LLAMA_NET, gains="branch")),
    "HG, Mix-LN, LNS learned": (
        dict(gain="branch", post_norm_blocks=1, lns="norm", lns_learn=True),
        dict(gains="branch", post_blocks=1),
    ),
    "HG, DyT": (
        dict(norm="dyt", dyt_bias=True, gain="branch", n_kv_head=2),
        dict(kind="dyt", norm_bias=True, gains="branch", kv_heads=2),
    ),
    "DP": (dict(gain_out="scale"), dict(out="scale")),
    "DNP": (dict(gain_out="norm"), dict(out="norm")),
    "OR, S4": (dict(S4, gain_param="magdir"), dict(S4_NET, gain_kind="magdir")),
    "ER, bias": (
        dict(LAYERNORM, gain_param="expmagdir", post_norm="attn"),
        dict(attn="pre post", mlp="pre", **LAYERNORM_NET, gain_kind="expmagdir"),
    ),
    "unified": (UNIFIED, UNIFIED_NET),
    "unified, llama, LNS": (dict(UNIFIED, **LLAMA, lns="norm"), dict(**UNIFIED_NET, **LLAMA_NET, lns="norm")),
    "much at once": (
        dict(LLAMA, mid_norm="both", input_norm=True, bias=True, norm_groups=2, post_norm_blocks=1)
        | dict(lns="norm", lns_power=0.3, branch_scale="layerscale", sigma_reparam=True)
        | dict(gain="branch", gain_out="scale", gain_param="expmagdir"),
        dict(LLAMA_NET, attn="pre mid", mlp="pre mid", input_norm=True, linear_bias=True, groups=2, post_blocks=1)
        | dict(lns="norm", power=0.3, branch_gain="vector", sigma=True)
        | dict(gains="branch", out="scale", gain_kind="expmagdir"),
    ),
}
ALL = LAYOUTS | SCHEMES
# One or two schemes of every family, for checks that are too slow to run on all in the fast suite.
REPRESENTATIVES = (
    "S5 | post-LN, bias | dyt, S5 | no norm but qk | llama, S5 | relu2 | LNS | LNS branch, mid | Mix-LN, S5, LNS | "
    "DeepNorm | Admin | LayerScale | SkipInit, no norm | Group-LN | Fixup, llama, bias | sigmaReparam, HG, DP | "
    "HG, bias, LNS | DNP | ER, bias | unified | much at once"
).split(" | ")


def network(name, n_layer, **changes):
    """(flags that fit this depth, Net) of a scheme."""
    flags, net = ALL[name]
    if "post_norm_blocks" in flags:
        flags = dict(flags, post_norm_blocks=min(flags["post_norm_blocks"], n_layer))
    return flags, replace(NET, blocks=n_layer, **net | changes)


def depth_of(name) -> int:
    """The smallest depth at which every part of the scheme acts: both kinds of blocks, and a factor other than 1."""
    return 3 if ALL[name][0].get("post_norm_blocks", 0) > 1 else 2


# --------------------------------------------------------------------------------------------------------- builders


@torch.no_grad()
def perturb(model, seed=0):
    """Random weights away from their init: no gain is 1 and no bias 0, so that an ignored one shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.empty(p.shape).normal_(generator=generator)
        if name.endswith((".gain", ".magnitude", ".direction", ".alpha", ".sigma")):
            p.copy_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            p.copy_(0.3 * noise)
        else:  # a matrix keeps the size of its input; embeddings are of size 1
            p.copy_(noise if name.startswith("w") else noise * p.shape[-1] ** -0.5)
    model.power_iteration()  # σReparam's u and v belong to these matrices
    return model


def build(flags, n_layer=2, dtype=torch.float64):
    """A small model with random weights, in eval mode."""
    return perturb(GPT(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags}))).to(dtype).eval()


def fresh(flags, n_layer=3):
    """A small float64 model with its initial weights, but the embedding so large that eps does not matter."""
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


# ------------------------------------------------------------------------------------------------------ comparisons


def error(ours, theirs, floor=1e-9):
    """Largest difference, relative to the largest entry of `theirs` (or to `floor`, if that is all zeros)."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=floor)).item()


def floats(model):
    """{name: float64 copy} of every parameter and buffer."""
    return {name: t.detach().double().clone() for name, t in model.state_dict().items()}


def gradients(model, *args):
    """(loss, {parameter name: gradient}) of model(idx, targets)."""
    model.zero_grad(set_to_none=True)
    loss = model(*args)[1]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------------ refusals


def rule_lines(*groups) -> dict:
    """{(function, line number): line} of every rule in these functions of layers.rules."""
    lines_of = {}
    for group in groups:
        lines, first = inspect.getsourcelines(group)
        found = {(group.__name__, number): line for number, line in enumerate(lines, first) if " yield " in line}
        assert found, group
        lines_of |= found
    return lines_of
