"""The block layouts of the papers: against the equations (reference.py), against each other, and against refusals."""

import io
import math
import re
from collections import Counter
from dataclasses import asdict, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import reference
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_model import (
    LAYOUTS,
    LLAMA,
    LLAMA_NET,
    NET,
    POST,
    PRE,
    S4,
    S5,
    SIZE,
    WIDE,
    batch,
    build,
    compare_with_equations,
    error,
    floats,
    gradients,
    scaled,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, ROLES, GPTConfig, KVCache, Linear, Residual
from optim import fill_defaults, make_optimizer
from train import TrainConfig

BLOCK = r"blocks\.\d+\."
S4_NET = dict(attn="pre mid", mlp="pre mid", qk_norm=True, input_norm=True)
S5_NET = dict(S4_NET, mlp="mid")
POST_NET = dict(attn="post", mlp="post", final=False)
LAYERNORM, LAYERNORM_NET = dict(norm="layernorm", bias=True), dict(kind="layer", norm_bias=True, linear_bias=True)
NONE, FIXUP = dict(norm="none"), dict(norm="none", fixup=True)
UNIFIED = dict(gain="branch", gain_out="norm", gain_param="magdir")
UNIFIED_NET = dict(gains="branch", out="norm", gain_kind="magdir")
DYT_CONSTANT = dict(norm="dyt", dyt_learn_alpha=False, dyt_alpha_attn=0.7, dyt_alpha_other=0.4)

# name: (flags of GPTConfig, the same network in the words of reference.Net). A `final` norm after Mix-LN's blocks and
# the numbers of the blocks are the reference's business.
SCHEMES = {
    "LNS": (dict(lns="norm"), dict(PRE, lns="norm")),
    "LNS, bias": (dict(LAYERNORM, lns="norm"), dict(PRE, **LAYERNORM_NET, lns="norm")),
    "LNS 1/l, ffn, llama": (
        dict(LLAMA, lns="norm", lns_power=1.0, lns_branches="mlp"),
        dict(PRE, **LLAMA_NET, lns="norm", power=1.0, lns_on="mlp"),
    ),
    "LNS on S5": (dict(S5, lns="norm", lns_branches="attn"), dict(S5_NET, lns="norm", lns_on="attn")),
    "LNS branch": (dict(lns="branch", lns_power=0.25), dict(PRE, lns="branch", power=0.25)),
    "LNS branch, mid": (dict(S5, lns="branch", mlp="swiglu"), dict(S5_NET, lns="branch", act="swiglu")),
    "LNS residual": (dict(lns="residual"), dict(PRE, lns="residual")),
    "LNS residual, post": (
        dict(POST, lns="residual", lns_branches="mlp", norm="layernorm", bias=True),
        dict(POST_NET, lns="residual", lns_on="mlp", **LAYERNORM_NET),
    ),
    "LNS input": (dict(lns="input", norm="layernorm"), dict(PRE, lns="input", kind="layer")),
    "LNS input, DyT": (dict(norm="dyt", lns="input"), dict(PRE, kind="dyt", lns="input")),
    "LNS learned": (dict(lns="norm", lns_learn=True), PRE),
    "LNS no norm": (dict(NONE, lns="branch"), dict(final=False, lns="branch")),
    "Mix-LN": (dict(post_norm_blocks=1), dict(PRE, post_blocks=1)),
    "Mix-LN, S5, LNS": (
        dict(S5, post_norm_blocks=1, lns="norm", pos="rope"),
        dict(S5_NET, post_blocks=1, lns="norm", theta=10000.0),
    ),
    "Mix-LN, LNS residual": (
        dict(LAYERNORM, mid_norm="mlp", post_norm_blocks=2, lns="residual"),
        dict(attn="pre", mlp="pre mid", **LAYERNORM_NET, post_blocks=2, lns="residual"),
    ),
    "DeepNorm": (dict(POST, deepnorm=True), dict(POST_NET, deepnorm=True)),
    "DeepNorm, bias": (dict(POST, **LAYERNORM, deepnorm=True), dict(POST_NET, **LAYERNORM_NET, deepnorm=True)),
    "DeepNorm, llama, QK": (
        dict(POST, **LLAMA, deepnorm=True, qk_norm=True),
        dict(POST_NET, **LLAMA_NET, deepnorm=True, qk_norm=True),
    ),
    "Admin": (dict(POST, admin=True), dict(POST_NET, admin=True)),
    "Admin, OR, LNS branch": (
        dict(POST, admin=True, gain_param="magdir", lns="branch", n_kv_head=2),
        dict(POST_NET, admin=True, gain_kind="magdir", lns="branch", kv_heads=2),
    ),
    "LayerScale": (dict(branch_scale="layerscale"), dict(PRE, branch_gain="vector")),
    "LayerScale, S4": (dict(S4, branch_scale="layerscale"), dict(S4_NET, branch_gain="vector")),
    "LayerScale, ER, one mid": (
        dict(mid_norm="mlp", branch_scale="layerscale", gain_param="expmagdir"),
        dict(attn="pre", mlp="pre mid", branch_gain="vector", gain_kind="expmagdir"),
    ),
    "LayerScale, no gains": (
        dict(S4, branch_scale="layerscale", gain="none"),
        dict(S4_NET, branch_gain="vector", gains="none"),
    ),
    "SkipInit": (dict(branch_scale="skipinit"), dict(PRE, branch_gain="scalar")),
    "SkipInit, no norm": (dict(NONE, branch_scale="skipinit"), dict(final=False, branch_gain="scalar")),
    "SkipInit, mid, bias, OR": (
        dict(LAYERNORM, mid_norm="attn", branch_scale="skipinit", gain_param="magdir"),
        dict(attn="pre mid", mlp="pre", branch_gain="scalar", gain_kind="magdir", **LAYERNORM_NET),
    ),
    "Group-LN": (dict(LAYERNORM, norm_groups=4), dict(PRE, **LAYERNORM_NET, groups=4)),
    "Group-RMS, S5": (dict(S5, norm_groups=2), dict(S5_NET, groups=2)),
    "Group-RMS, post": (dict(POST, norm_groups=8), dict(POST_NET, groups=8)),
    "Fixup": (FIXUP, dict(final=False, fixup=True)),
    "Fixup, llama, bias": (
        dict(FIXUP, **LLAMA, bias=True, lns="branch"),
        dict(LLAMA_NET, final=False, fixup=True, linear_bias=True, lns="branch"),
    ),
    "Fixup, QK, DP, bias": (
        dict(FIXUP, qk_norm=True, gain_out="scale", bias=True),
        dict(final=False, fixup=True, qk_norm=True, out="scale", linear_bias=True),
    ),
    "Fixup, DNP": (dict(FIXUP, gain_out="norm"), dict(final=False, fixup=True, out="norm")),
    "sigmaReparam": (dict(sigma_reparam=True), dict(PRE, sigma=True)),
    "sigmaReparam, no norm, llama": (
        dict(NONE, **LLAMA, bias=True, sigma_reparam=True),
        dict(LLAMA_NET, final=False, linear_bias=True, sigma=True),
    ),
    "sigmaReparam, HG, DP": (
        dict(sigma_reparam=True, gain="branch", gain_out="scale", bias=True),
        dict(PRE, sigma=True, gains="branch", out="scale", linear_bias=True),
    ),
    "DyT, embed scale": (dict(norm="dyt", embed_scale=True), dict(PRE, kind="dyt", embed_scale=True)),
    "embed scale, no norm, rope": (
        dict(NONE, embed_scale=True, pos="rope"),
        dict(final=False, embed_scale=True, theta=10000.0),
    ),
    "DyT hardtanh, constant alpha": (
        dict(DYT_CONSTANT, dyt_squash="hardtanh", dyt_bias=True),
        dict(PRE, kind="dyt", squash="hardtanh", alpha=(0.7, 0.4), norm_bias=True),
    ),
    "DyT sigmoid, S4": (
        dict(S4, norm="dyt", dyt_squash="sigmoid"),
        dict(S4_NET, kind="dyt", squash="sigmoid"),
    ),
    "DyT identity, S5, LNS": (
        dict(S5, **DYT_CONSTANT, dyt_squash="identity", lns="norm"),
        dict(S5_NET, kind="dyt", squash="identity", alpha=(0.7, 0.4), lns="norm"),
    ),
    "no gains": (dict(S4, gain="none"), dict(S4_NET, gains="none")),
    "no gains, bias": (dict(LAYERNORM, gain="none", lns="norm"), dict(PRE, **LAYERNORM_NET, gains="none", lns="norm")),
    "no gains, DyT": (
        dict(POST, norm="dyt", gain="none", dyt_bias=True),
        dict(POST_NET, kind="dyt", gains="none", norm_bias=True),
    ),
    "HG": (dict(gain="branch"), dict(PRE, gains="branch")),
    "HG, bias, LNS": (
        dict(LAYERNORM, gain="branch", lns="norm", mlp="swiglu"),
        dict(PRE, **LAYERNORM_NET, gains="branch", lns="norm", act="swiglu"),
    ),
    "HG, S5, llama": (dict(S5, **LLAMA, gain="branch"), dict(S5_NET, **LLAMA_NET, gains="branch")),
    "HG, Mix-LN, LNS learned": (
        dict(gain="branch", post_norm_blocks=1, lns="norm", lns_learn=True),
        dict(PRE, gains="branch", post_blocks=1),
    ),
    "HG, DyT": (
        dict(norm="dyt", dyt_bias=True, gain="branch", n_kv_head=2),
        dict(PRE, kind="dyt", norm_bias=True, gains="branch", kv_heads=2),
    ),
    "DP": (dict(gain_out="scale"), dict(PRE, out="scale")),
    "DP, llama, bias": (
        dict(LLAMA, bias=True, gain_out="scale", qk_norm=True),
        dict(PRE, **LLAMA_NET, linear_bias=True, out="scale", qk_norm=True),
    ),
    "DP, no norm": (
        dict(NONE, gain_out="scale", gain_param="magdir"),
        dict(final=False, out="scale", gain_kind="magdir"),
    ),
    "DNP": (dict(gain_out="norm"), dict(PRE, out="norm")),
    "DNP, llama, LayerNorm, bias": (
        dict(LLAMA, **LAYERNORM, gain_out="norm"),
        dict(PRE, **LLAMA_NET, **LAYERNORM_NET, out="norm"),
    ),
    "DNP, S5 without QK": (
        dict(S5, qk_norm=False, gain_out="norm"),
        dict(S5_NET, qk_norm=False, out="norm"),
    ),
    "OR, S4": (dict(S4, gain_param="magdir"), dict(S4_NET, gain_kind="magdir")),
    "ER, bias": (
        dict(LAYERNORM, gain_param="expmagdir", post_norm="attn"),
        dict(attn="pre post", mlp="pre", **LAYERNORM_NET, gain_kind="expmagdir"),
    ),
    "unified": (UNIFIED, dict(PRE, **UNIFIED_NET)),
    "unified, llama, LNS": (dict(UNIFIED, **LLAMA, lns="norm"), dict(PRE, **UNIFIED_NET, **LLAMA_NET, lns="norm")),
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
each_scheme = pytest.mark.parametrize("name", ALL)


def network(name, n_layer, **changes):
    """(flags that fit this depth, Net) of a scheme."""
    flags, net = ALL[name]
    if "post_norm_blocks" in flags:
        flags = dict(flags, post_norm_blocks=min(flags["post_norm_blocks"], n_layer))
    return flags, replace(NET, blocks=n_layer, **net | changes)


def deep(name):
    """A depth at which every part of the scheme is there: both kinds of blocks, and a factor other than 1."""
    return 3 if ALL[name][0].get("post_norm_blocks", 0) > 1 else 2


# ---------------------------------------------------------------------------------------------- 1. the equations


@pytest.mark.parametrize("n_layer", (1, 3))
@each_scheme
def test_forward_is_the_equation(name, n_layer):
    flags, net = network(name, n_layer)
    if flags.get("post_norm_blocks") == n_layer and (flags.get("gain") == "branch" or flags.get("lns") == "norm"):
        net = replace(net, blocks=2)  # refused where no block has a pre norm
    # the rotary angles are fp32 whatever the model is
    compare_with_equations(flags, net, torch.float64, 1e-6 if net.theta else 1e-10)
    compare_with_equations(flags, net, torch.float32, 1e-5)


@each_scheme
def test_gradients_are_the_equations_gradients(name):
    flags, net = network(name, deep(name))
    angles = 1e-5 if name in LAYOUTS else 5e-5  # what fp32 rotary angles leave
    model, (idx, targets) = build(flags, deep(name)), batch()
    weights, parameters = floats(model), dict(model.named_parameters())
    for key in parameters:
        weights[key].requires_grad_()
    reference.forward(net, weights, idx, targets)[1].backward()
    for key, grad in gradients(model, idx, targets)[1].items():
        # a key bias has gradient 0 (softmax ignores it) unless a norm or a rotation follows: hence the floor
        assert error(grad, weights[key].grad, floor=1e-5) < (angles if net.theta else 1e-9), key


def test_a_removed_block_leaves_the_others_their_numbers():
    for name in ("LNS", "LNS branch, mid", "LNS residual", "HG, bias, LNS", "Mix-LN, S5, LNS", "DeepNorm"):
        flags, net = network(name, 3)
        model, idx = build(flags, 3), batch()[0]
        del model.blocks[1]
        expected = reference.forward(replace(net, numbers=(1, 3)), floats(model), idx)[0]
        assert error(model(idx)[0], expected) < 1e-6, name
        if "lns" in flags:
            renumbered = reference.forward(replace(net, numbers=(1, 2)), floats(model), idx)[0]
            assert error(model(idx)[0], renumbered) > 1e-4, name


# ------------------------------------------------------------------------------------ 2. properties of every scheme


@each_scheme
def test_causality(name):
    model, idx = build(ALL[name][0], deep(name)), batch()[0]
    before, least = model(idx)[0], 1e-6 if name in LAYOUTS else 1e-7
    for t in (1, 4, 6):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 7) % 50
        after = model(changed)[0]
        assert error(after[:, :t], before[:, :t]) < 1e-12
        assert ((after - before).abs().amax(-1)[:, t:] > least).all()  # and the future does depend on it


@each_scheme
def test_every_parameter_gets_a_gradient(name):
    flags, least = ALL[name][0], 1e-6 if name in LAYOUTS else 1e-7
    model, (idx, targets) = build(flags, 3), batch()
    shift_shows = flags.get("qk_norm") or flags.get("pos") == "rope" or flags.get("gain_out") == "norm"
    for key, grad in gradients(model, idx, targets)[1].items():
        if key.endswith("attn.f.k.bias") and not shift_shows:
            assert grad.abs().max() < 1e-12, key  # adds the same to all scores of a query: softmax does not see it
        else:
            assert grad.isfinite().all() and grad.abs().max() > least, key


VECTOR = r"\.(gain|magnitude)"
SCALARS = r".*\.(alpha|sigma)|embed_scale\.gain"
BRANCH_GAIN = BLOCK + r"(attn|mlp)\.mid\.gain"  # a vector, but for SkipInit and Fixup
ROLE_TABLE = {
    r"wte\.weight": "emb",
    r"wpe\.weight": "pos",
    r"head\.weight": "head",
    BLOCK + r"attn\.f\.[qk]\.weight": "qk",
    BLOCK + r"attn\.f\.[vo]\.weight": "vo",
    BLOCK + r"mlp\.f\.(gate|up|down)\.weight": "ffn",
    "(" + BLOCK + r"(attn|mlp)\.(pre|f\.([qkv]|gate|up)\.pre)|final_norm)" + VECTOR: "gain_in",
    BLOCK + r"(attn|mlp)\.(post|mid|f\.([qkv]|gate|up)\.out|f\.[qk]_norm)" + VECTOR: "gain_out",
    BLOCK + r"(attn|mlp)\.skip\.gain|input_norm" + VECTOR: "gain_out",
    r".*\.direction": "gain_dir",
    SCALARS: "scalar",
    r".*\.bias": "bias",
}


@each_scheme
def test_roles_are_the_table(name):
    flags = ALL[name][0]
    model = build(flags, deep(name))
    roles, shapes = model.roles(), {key: p.shape for key, p in model.named_parameters()}
    assert list(roles) == list(shapes)
    scalar_branch = flags.get("branch_scale") == "skipinit" or "fixup" in flags
    for key, role in roles.items():
        expected = [r for pattern, r in ROLE_TABLE.items() if re.fullmatch(pattern, key)]
        if re.fullmatch(rf"blocks\.{deep(name) - 1}\.mlp\.post" + VECTOR, key):  # the final norm: the head follows
            expected = ["gain_in"]
        if scalar_branch and re.fullmatch(BRANCH_GAIN, key):
            expected = ["scalar"]
        assert [role] == expected, key
        assert shapes[key] == (1,) or role != "scalar", key
        assert shapes[key] != (), key


def test_a_vector_of_one_entry_is_a_vector():
    one = dict(n_head=16, qk_norm=True, gain_out="scale", n_kv_head=1, gain_param="magdir")
    roles = GPT(GPTConfig(**{**SIZE, **one}, n_layer=1)).roles()
    for part in ("q_norm", "k_norm", "k.out", "v.out"):
        assert roles[f"blocks.0.attn.f.{part}.direction"] == "gain_dir"
        assert roles[f"blocks.0.attn.f.{part}.magnitude"] == "gain_out"


def test_all_roles_exist():
    assert {role for flags, _ in ALL.values() for role in build(flags).roles().values()} == set(ROLES)


@each_scheme
def test_a_checkpoint_and_a_construction_on_the_meta_device_lose_nothing(name):
    flags, n, idx = ALL[name][0], deep(name), batch()[0]
    model = build(flags, n, torch.float32)
    checkpoint = dict(model_config=asdict(model.config), model={k: t.clone() for k, t in model.state_dict().items()})
    assert torch.equal(GPT.from_checkpoint(checkpoint).eval()(idx)[0], model(idx)[0])
    for key, t in GPT.from_checkpoint(checkpoint).state_dict().items():
        assert torch.equal(t, checkpoint["model"][key]), key

    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, "n_layer": n, **flags}))
    assert all(p.is_meta for p in model.parameters()) and bool(list(model.buffers())) == model.config.sigma_reparam
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(math.nan)
    model.init_weights(3)
    direct = GPT(model.config, seed=3)
    for (key, a), b in zip(model.state_dict().items(), direct.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(model(idx)[0], direct(idx)[0])


@each_scheme
def test_cached_logits_equal_the_full_forward(name):
    model, idx = build(ALL[name][0], deep(name)), tokens(2, 9)
    whole = model(idx)[0]
    for prefill in (1, 4):
        cache = [KVCache() for _ in model.blocks]
        parts = [model(idx[:, :prefill], cache=cache)[0]]
        parts += [model(idx[:, t : t + 1], cache=cache)[0] for t in range(prefill, 9)]
        assert error(torch.cat(parts, dim=1), whole) < 1e-12


@each_scheme
def test_traced_whole_to_the_same_function(name):
    model, (idx, targets) = build(ALL[name][0], deep(name)), batch()
    loss, grads = gradients(model, idx, targets)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    after, after_grads = gradients(compiled, idx, targets)
    assert error(after, loss) < 1e-12  # not equal bit by bit: GELU and tanh have another form there
    for key, grad in grads.items():  # k's bias has a gradient of rounding alone: softmax cannot see it
        assert (after_grads["_orig_mod." + key] - grad).abs().max() < 1e-12 * max(1.0, grad.abs().max()), key


class Products(TorchDispatchMode):
    """Records the dtypes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes |= {t.dtype for t in args}
        return function(*args, **kwargs or {})


@each_scheme
def test_bf16_compute_multiplies_bf16_and_keeps_the_stream_in_fp32(name):
    model, (idx, targets) = build(ALL[name][0], deep(name), torch.float32), batch()
    if name in SCHEMES:  # logits of a usual size, where bf16 is not too coarse for a softmax
        with torch.no_grad():
            (model.head or model.wte).weight.mul_(0.1)
    logits, (loss, grads) = model(idx)[0], gradients(model, idx, targets)
    stream, outputs = [], []
    for module in model.modules():
        if isinstance(module, Residual):
            module.register_forward_hook(lambda _, args, out: stream.extend((args[0].dtype, out.dtype)))
        elif isinstance(module, Linear) and module is not model.head:
            module.register_forward_hook(lambda _, args, out: outputs.append(out.dtype))
    assert model.set_compute_dtype(torch.bfloat16) is model
    with Products() as products:
        half, half_grads = gradients(model, idx, targets)
    assert products.dtypes == set(outputs) == {torch.bfloat16}
    assert stream == [torch.float32] * (4 * len(model.blocks))
    assert half.dtype == model(idx)[0].dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {g.dtype for g in half_grads.values()} == {torch.float32}
    assert 0 < error(half, loss) < 0.02
    total, half_total = (torch.cat([g.flatten() for g in some.values()]) for some in (grads, half_grads))
    assert 0 < (half_total - total).norm() / total.norm() < (0.1 if name in LAYOUTS else 0.2)
    cache = [KVCache() for _ in model.blocks]
    model(idx[:, :3], cache=cache)
    assert {x.dtype for layer in cache for x in (layer.k, layer.v)} == {torch.bfloat16}
    model.set_compute_dtype(None)
    assert torch.equal(model(idx)[0], logits)
    assert torch.equal(model(idx, targets)[1], loss)


INDUCED = {
    "LNS, Mix-LN": dict(lns="norm", post_norm_blocks=1, n_layer=2),
    "unified": dict(UNIFIED, mlp="swiglu"),
    "DyT": dict(norm="dyt", embed_scale=True),
    "DeepNorm": dict(POST, deepnorm=True),
    "sigmaReparam": dict(sigma_reparam=True),
}


def test_inductor_compiles_the_same_function():
    """Five schemes in one compilation, which is slow. All that depends on the scheme is in the trace, which the test
    above compares for each."""
    models = [build(dict(n_layer=1) | flags, dtype=torch.float32) for flags in INDUCED.values()]
    idx, targets = batch()
    eager = [gradients(model, idx, targets) for model in models]
    torch._dynamo.reset()
    for model in models:
        model.zero_grad(set_to_none=True)
    losses = torch.compile(lambda: [model(idx, targets)[1] for model in models], fullgraph=True)()
    sum(losses).backward()
    for model, name, compiled, (loss, grads) in zip(models, INDUCED, losses, eager, strict=True):
        assert error(compiled, loss) < 1e-5, name
        for key, p in model.named_parameters():
            assert error(p.grad, grads[key], floor=1e-3) < 1e-4, (name, key)


# ------------------------------------------------------------------------------------------------- 3. identities


@torch.no_grad()
def copied(flags, weights, n_layer=3):
    """A model with these weights, which must be all it has."""
    model = build(flags, n_layer)
    model.load_state_dict(weights)
    return model


MANY_GAINS = dict(S4, **LAYERNORM, gain="branch", gain_out="scale")


@pytest.mark.parametrize(
    "flags, same",
    [(dict(lns=place, lns_power=0.0), dict()) for place in ("norm", "branch", "residual", "input")]
    + [
        (dict(S5, post_norm_blocks=3, mlp="swiglu", qk_norm=False), dict(POST, input_norm=True, mlp="swiglu")),
        (dict(POST, post_norm_blocks=2), POST),
    ],
    ids=str,
)
def test_two_ways_to_say_the_same(flags, same):
    model, idx = build(flags, 3), batch()[0]
    assert torch.equal(copied(same, model.state_dict())(idx)[0], model(idx)[0])


def fresh(flags, n_layer=3):
    """In float64, with a table that is large enough for eps not to matter."""
    model = GPT(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags})).double()
    with torch.no_grad():
        model.wte.weight.mul_(50)
    return model


@pytest.mark.parametrize(
    "flags, same",
    (
        (dict(lns="norm", lns_learn=True), dict(lns="norm")),
        (
            dict(S5, lns="norm", lns_learn=True, lns_power=1.0, gain_param="expmagdir"),
            dict(S5, lns="norm", lns_power=1.0),
        ),
        (
            dict(lns="norm", lns_learn=True, gain="branch", gain_param="magdir", lns_branches="mlp"),
            dict(lns="norm", lns_branches="mlp"),
        ),
        (dict(LLAMA, bias=True, gain_out="scale"), dict(LLAMA, bias=True)),
        (dict(gain="branch"), dict()),
        (dict(S4, gain="none"), S4),
        (dict(gain="none", lns="norm"), dict(lns="norm")),
        (dict(MANY_GAINS, gain_param="magdir"), MANY_GAINS),
        (dict(MANY_GAINS, gain_param="expmagdir"), MANY_GAINS),
        (
            dict(mid_norm="both", branch_scale="layerscale", gain_param="expmagdir", branch_scale_init=0.3),
            dict(mid_norm="both", branch_scale="skipinit", branch_scale_init=0.3),
        ),
        (dict(branch_scale="layerscale", branch_scale_init=1.0), dict()),
        (dict(branch_scale="skipinit", branch_scale_init=1.0), dict()),
        (dict(POST, admin=True), POST),
    ),
    ids=str,
)
def test_at_initialisation_the_same(flags, same):
    idx = batch()[0]
    assert error(fresh(flags)(idx)[0], fresh(same)(idx)[0]) < 1e-6  # the parameters start as fp32 numbers


def test_equal_gains_of_the_branches_are_a_shared_gain():
    for flags in (dict(S4, mlp="swiglu"), dict(LAYERNORM, n_kv_head=2)):
        shared, idx, renamed = build(flags), batch()[0], {}
        for key, t in shared.state_dict().items():
            branch = re.fullmatch("(" + BLOCK + r")(attn|mlp)\.pre\.gain", key)
            if branch is None:
                renamed[key] = t
            else:
                parts = "qkv" if branch[2] == "attn" else ["up", "gate"][: 1 + ("mlp" in flags)]
                renamed |= {f"{branch[1]}{branch[2]}.f.{part}.pre.gain": t for part in parts}
        if "bias" in flags:  # γ (N(x) + β) = γ N(x) + γβ
            for key in [key for key in renamed if key.endswith(("attn.pre.bias", "mlp.pre.bias"))]:
                renamed[key] = renamed[key] / shared.state_dict()[key.replace("bias", "gain")]
        assert error(copied(dict(flags, gain="branch"), renamed, 2)(idx)[0], shared(idx)[0]) < 1e-12


def test_dnp_on_queries_and_keys_starts_as_qk_norm():
    u = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    dnp, qk = fresh(dict(gain_out="norm", n_kv_head=2), 1), fresh(dict(qk_norm=True, n_kv_head=2), 1)
    dnp, qk = dnp.blocks[0].attn.f, qk.blocks[0].attn.f
    for ours, theirs, norm in ((dnp.q, qk.q, qk.q_norm), (dnp.k, qk.k, qk.k_norm)):
        assert error(ours(u).unflatten(-1, (-1, 4)), norm(theirs(u).unflatten(-1, (-1, 4)))) < 1e-12
    v = dnp.v(u)
    assert error(v, reference.rms(qk.v(u), 1e-2)) < 1e-12  # over the full width


@pytest.mark.parametrize("kind", ("magdir", "expmagdir"))
def test_magnitude_and_direction_precondition_as_claimed(kind):
    """J Jᵀ of γ(magnitude, direction), at γ = 1: d along the direction, 1 orthogonal to it."""
    slot, d = fresh(dict(gain_param=kind)).final_norm, 16
    assert torch.equal(slot.folded(), torch.ones(d, dtype=torch.float64))
    rows = [torch.autograd.grad(g, (slot.magnitude, slot.direction), retain_graph=True) for g in slot.folded()]
    jacobian = torch.stack([torch.cat(row) for row in rows])  # (d, 1 + d)
    along = torch.full((d, d), 1 / d, dtype=torch.float64)
    assert error(jacobian @ jacobian.T, d * along + torch.eye(d) - along) < 1e-12
    with torch.no_grad():  # the direction's length says nothing
        slot.direction.copy_(1 + torch.arange(d) / 3)
        before = slot.folded()
        slot.direction.mul_(7)
        assert error(slot.folded(), before) < 1e-12
        assert error(before.square().mean(), torch.ones(())) < 1e-12


def test_dyt_of_the_identity_is_affine():
    flags = dict(norm="dyt", dyt_squash="identity", tie_weights=False, mlp="swiglu")
    model, idx, folded = build(flags), batch()[0], {}
    weights = model.state_dict()
    for key, w in weights.items():
        slot = re.sub(r"\.f\.(q|k|v|up|gate)\.weight", ".pre", key).replace("head.weight", "final_norm")
        if slot != key:
            w = w * weights[slot + ".alpha"] * weights[slot + ".gain"]
        if not key.endswith(("alpha", "gain")):
            folded[key] = w
    flags = dict(NONE, tie_weights=False, mlp="swiglu")
    assert error(copied(flags, folded, 2)(idx)[0], model(idx)[0]) < 1e-12


def test_groups_of_the_same_channels_are_one_group():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double().repeat(1, 1, 4)
    for norm in ("rmsnorm", "layernorm"):
        plain, groups = (fresh(dict(norm=norm, norm_groups=n, input_norm=True)).input_norm for n in (1, 4))
        assert error(groups(x), plain(x)) < 1e-12
        other = torch.cat((3 * x[..., :4], x[..., 4:]), dim=-1)
        assert error(groups(other), plain(other)) > 0.1


@pytest.mark.parametrize(
    "with_norm, without, factors",
    (
        (dict(gain_out="norm"), dict(gain_out="scale"), {"attn.f.q": 7.0, "attn.f.k": 7.0}),
        (
            dict(gain_out="norm", mlp="swiglu"),
            dict(mlp="swiglu"),
            {"attn.f.v": 7.0, "mlp.f.gate": 3.0, "mlp.f.up": 0.2},
        ),
        (dict(sigma_reparam=True), dict(), {"attn.f.q": 7.0, "attn.f.v": 0.2, "attn.f.o": 3.0, "mlp.f.up": 3.0}),
        (dict(sigma_reparam=True), dict(), {"mlp.f.down": 7.0}),
        (dict(S4, branch_scale="layerscale"), dict(branch_scale="layerscale"), {"attn.f.o": 7.0, "mlp.f.down": 7.0}),
    ),
)
def test_the_scale_of_a_matrix_is_normalised_away(with_norm, without, factors):
    assert scaled(with_norm, factors) < 1e-9
    assert scaled(without, factors) > 1e-3


def test_lns_under_qk_norm_acts_through_v_and_under_a_mid_norm_not_at_all():
    lns, idx = dict(lns="norm", lns_branches="attn", norm_eps=1e-14), batch()[0]
    for flags, acts in ((dict(qk_norm=True), True), (dict(qk_norm=True, mid_norm="attn"), False)):
        model, plain = build(dict(lns, **flags), 3), build(dict(flags, norm_eps=1e-14), 3)
        assert (error(model(idx)[0], plain(idx)[0]) > 1e-3) == acts
        with torch.no_grad():
            for number, block in enumerate(plain.blocks, 1):
                block.attn.f.v.weight.div_(number**0.5)
        assert error(model(idx)[0], plain(idx)[0]) < 1e-9
    flags = dict(gain_out="norm", norm_eps=1e-14)  # q, k, v and up are normalised: nothing is left of the factor
    assert error(build(dict(flags, lns="norm"), 3)(idx)[0], build(flags, 3)(idx)[0]) < 1e-9


@each_scheme
def test_folding_gains_by_hand_changes_nothing(name):
    """Gains before a matrix multiply its columns, gains after it its rows. Where a bias or sigmaReparam stands between
    them, they stay."""
    flags = ALL[name][0]
    model, idx = build(dict(flags, tie_weights=False, gain_param="direct"), deep(name)), batch()[0]
    before = model(idx)[0]
    with torch.no_grad():
        pairs = [(model.final_norm, model.head)]
        for block in model.blocks:
            for branch in (block.attn, block.mlp):
                for part, matrix in branch.f.named_children():
                    if part not in ("q", "k", "v", "gate", "up") or flags.get("sigma_reparam"):
                        continue
                    pairs += [(branch.pre, matrix), (matrix.pre, matrix)]
                    if matrix.out.gain is not None and matrix.out.norm == "none":
                        matrix.weight.mul_(matrix.out.gain[:, None])
                        if matrix.bias is not None:
                            matrix.bias.mul_(matrix.out.gain)
                        matrix.out.gain.fill_(1)
        for slot, matrix in pairs:
            if slot.gain is not None and slot.bias is None:
                matrix.weight.mul_(slot.gain)
        for slot, _ in pairs:
            if slot.gain is not None and slot.bias is None:
                slot.gain.fill_(1)
    assert error(model(idx)[0], before) < 1e-12


def test_gains_before_a_matrix_are_multiplied_into_it_not_into_activations():
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for flags in (dict(lns="norm"), dict(gain="branch", lns="norm"), dict(gain_param="magdir")):
        model = build(flags, 2)
        for slot in (model.blocks[1].attn.pre, model.blocks[1].mlp.pre, model.final_norm):
            assert error(slot(x), reference.rms(x, 1e-2)) < 1e-12
    model = build(dict(gain="branch", gain_out="scale", bias=True), 1)
    matrix, seen = model.blocks[0].attn.f.v, []
    expected = matrix.out.gain * ((matrix.pre.gain * x) @ matrix.weight.T + matrix.bias)

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.mul, torch.Tensor.__rmul__, torch.mul, torch.Tensor.__mul__):
                seen.append(max(a.ndim for a in args if torch.is_tensor(a)))
            return function(*args, **kwargs or {})

    with Products():
        assert error(matrix(x), expected) < 1e-12
    assert seen.count(2) == 2 and 3 not in seen  # two passes over the weight, none over x or the output


def test_power_iteration_finds_the_spectral_norm():
    model, idx = build(dict(sigma_reparam=True), 1), batch()[0]
    matrices = {key: p for key, p in model.named_parameters() if p.ndim == 2 and ".f." in key}
    distances = []
    for _ in range(200):
        model.power_iteration()
        weights = model.state_dict()
        ratios = []
        for key, w in matrices.items():
            u, v = (weights[key.replace("weight", side)] for side in "uv")
            assert abs(u.norm() - 1) < 1e-12 and abs(v.norm() - 1) < 1e-12
            ratios.append((u @ w @ v / torch.linalg.matrix_norm(w, 2)).item())
        distances.append(1 - min(ratios))
    assert distances[0] > 1e-3 and -1e-12 < distances[-1] < 1e-4 and len(matrices) == 6
    assert all(b <= a + 1e-12 for a, b in zip(distances, distances[1:], strict=False))

    model = fresh(dict(sigma_reparam=True), 2)
    for module in model.modules():  # γ starts as σ(W), so the matrix is W
        if getattr(module, "sigma", None) is not None:
            assert error(module.sigma, torch.linalg.matrix_norm(module.weight, 2).view(1)) < 0.05
    plain = {key: t for key, t in model.state_dict().items() if key.split(".")[-1] not in ("sigma", "u", "v")}
    assert error(copied(dict(), plain, 2)(idx)[0], model(idx)[0]) < 1e-6
    plain = build(dict(), 1)
    before = {key: t.clone() for key, t in plain.state_dict().items()}
    plain.power_iteration()
    assert all(torch.equal(t, before[key]) for key, t in plain.state_dict().items())


# --------------------------------------------------------------------------------------------- 4. initialisation


@pytest.mark.parametrize(
    "L, alpha, beta", ((1, 1.18921, 0.59460), (12, 2.21336, 0.31947), (24, 2.63215, 0.26864), (32, 2.82843, 0.25))
)
def test_deepnorm_constants(L, alpha, beta):
    flags = dict(n_layer=L, n_head=2, n_embd=8, block_size=4, vocab_size=9, **POST, mlp="swiglu")
    deepnorm, plain = GPT(GPTConfig(**flags, deepnorm=True)), GPT(GPTConfig(**flags, residual_init="plain"))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    for block, other in zip(deepnorm.blocks, plain.blocks, strict=True):
        for residual, same in ((block.attn, other.attn), (block.mlp, other.mlp)):
            assert error(residual.skip(x) / x, torch.full_like(x, alpha)) < 1e-5
            for part, matrix in residual.f.named_children():
                if hasattr(matrix, "weight"):
                    ratio = matrix.weight / same.f.get_submodule(part).weight  # the same random numbers
                    assert error(ratio, torch.full_like(ratio, 1.0 if part in "qk" else beta)) < 1e-4, part


M = 6**-0.5  # Fixup: (2L)^(-1/2) at L = 3, for two matrices in a row; SwiGLU's gate and up, a product, share it
BETA = 24**-0.25  # DeepNorm: (8L)^(-1/4)
XAVIER_ATTN, XAVIER_FFN = (2 / (192 + 192)) ** 0.5, (2 / (192 + 768)) ** 0.5


@pytest.mark.parametrize(
    "flags, q, v, o, up, down, head",
    (
        (dict(POST, deepnorm=True), 0.02, *[0.02 * BETA] * 4, 0.02),
        (dict(POST, deepnorm=True, init_std=0.1), 0.1, *[0.1 * BETA] * 4, 0.1),
        (
            dict(POST, deepnorm=True, init="xavier", residual_init="depth"),
            *(XAVIER_ATTN, *[XAVIER_ATTN * BETA] * 2, *[XAVIER_FFN * BETA] * 2, 0.02),
        ),
        (FIXUP, 0.02, 0.02 * M, 0, 0.02 * M**0.5, 0, 0),
        (dict(FIXUP, residual_init="plain"), 0.02, 0.02 * M, 0, 0.02 * M**0.5, 0, 0),
        (dict(FIXUP, init="xavier"), XAVIER_ATTN, XAVIER_ATTN * M, 0, XAVIER_FFN * M**0.5, 0, 0),
        (dict(sigma_reparam=True), 0.02, 0.02, 0.02 * M, 0.02, 0.02 * M, 0.02),  # of the matrix W; gpt2's 1/√(2L)
        (dict(lns="norm", residual_init="plain", post_norm_blocks=1), *[0.02] * 6),
    ),
    ids=str,
)
def test_initial_standard_deviations(flags, q, v, o, up, down, head):
    model = GPT(GPTConfig(**{**WIDE, "mlp": "swiglu", "n_ff": 768, **flags}))
    wanted = dict(q=q, k=q, v=v, o=o, gate=up, up=up, down=down, head=head)
    wanted |= dict(wte=flags.get("init_std", 0.02), wpe=flags.get("init_std", 0.02))
    matrices = {key: p for key, p in model.named_parameters() if p.ndim == 2}
    assert len(matrices) == 3 + 3 * 7
    for key, p in matrices.items():
        std = wanted[key.split(".")[-2]]
        assert abs(p.mean()) <= 5 * std / p.numel() ** 0.5, key
        assert abs(p.square().mean() ** 0.5 - std) <= 5 * std / (2 * p.numel()) ** 0.5, key


@pytest.mark.parametrize("mlp", ("gelu", "relu", "relu2", "swiglu"))
def test_fixup_keeps_a_steps_effect_on_the_function_by_depth(mlp):
    """What the last matrix of an FFN, zero at first, reads falls as 1/√(2L): then all 2L branches together move the
    output by as much at any depth, whatever the activation."""
    read = []
    for n_layer in (2, 32):
        config = GPTConfig(**{**SIZE, "n_embd": 64, "n_layer": n_layer, **FIXUP, "mlp": mlp, "init_std": 0.125})
        model = GPT(config)
        model.blocks[0].mlp.f.down.register_forward_hook(lambda _, args, out: read.append(args[0].square().mean()))
        model(tokens(4, 9))
    assert 11 < read[0] / read[1] < 24  # (32/2)^(2/2) = 16; GELU is not quite homogeneous


START = {"gain": 1.0, "magnitude": 1.0, "direction": 1.0, "bias": 0.0, "alpha": 1.0}


@pytest.mark.parametrize(
    "flags, changed",
    [(dict(branch_scale="layerscale", n_layer=n), {"mid.gain": 0.1}) for n in (1, 18)]
    + [(dict(branch_scale="layerscale", n_layer=n), {"mid.gain": 1e-5}) for n in (19, 24)]
    + [(dict(branch_scale="layerscale", n_layer=25), {"mid.gain": 1e-6})]
    + [
        (
            dict(branch_scale="layerscale", mid_norm="attn", gain_param="expmagdir"),
            {"magnitude": 0.0, "mid.magnitude": math.log(0.1)},
        ),
        (dict(branch_scale="layerscale", branch_scale_init=0.25, gain_param="magdir"), {"mid.magnitude": 0.25}),
        (dict(branch_scale="skipinit", n_layer=16), {"mid.gain": 0.25}),
        (dict(branch_scale="skipinit", n_layer=4, mid_norm="both"), {"mid.gain": 0.5}),
        (dict(branch_scale="skipinit", branch_scale_init=0.0, norm="none"), {"mid.gain": 0.0}),
        (dict(norm="dyt", embed_scale=True, dyt_bias=True), {"embed_scale.gain": 4.0}),
        (dict(lns="norm", lns_learn=True, n_layer=4), {"3.attn.pre.gain": 0.5, "3.mlp.pre.gain": 0.5}),
        (
            dict(lns="norm", lns_learn=True, n_layer=4, gain="branch"),
            {r"3.attn.f.[qkv].pre.gain": 0.5, "3.mlp.f.up.pre.gain": 0.5},
        ),
        (dict(gain="branch", gain_out="norm", gain_param="expmagdir", bias=True), {"magnitude": 0.0}),
        (dict(MANY_GAINS, gain_param="magdir"), {}),
        (dict(FIXUP, mlp="swiglu"), {}),
        (dict(POST, admin=True), {}),
    ],
    ids=str,
)
def test_start_values_of_vectors_and_scalars(flags, changed):
    model, wrong = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags})), []
    lns = re.compile(r"blocks\.(\d+)\..*pre\.gain") if flags.get("lns_learn") else None
    hits = Counter()
    for key, p in model.named_parameters():
        if p.ndim == 1:
            value = START[key.split(".")[-1]]
            if lns and lns.fullmatch(key):
                value = (int(lns.fullmatch(key)[1]) + 1) ** -0.5
            for pattern, other in changed.items():
                if re.search(pattern + "$", key):
                    value, hits[pattern] = other, hits[pattern] + 1
            if not torch.allclose(p, torch.tensor(value), rtol=1e-6, atol=0):
                wrong.append((key, p[0].item(), value))
    assert not wrong and hits.keys() == changed.keys()


@pytest.mark.parametrize("flags", (dict(), dict(LLAMA), dict(bias=True, qk_norm=True, gain_out="scale")), ids=str)
def test_fixup_starts_as_the_identity(flags):
    idx, targets = batch()
    flags = dict(FIXUP, **flags)
    model, x = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags, "tie_weights": False})), torch.randn(2, 7, 16)
    assert abs(model(idx, targets)[1].item() - math.log(50)) < 1e-6
    rope = None if "pos" not in flags else (torch.ones(7, 2), torch.zeros(7, 2))
    for block in model.blocks:
        assert torch.equal(block(x, rope), x)
    loss, grads = gradients(model, idx, targets)
    assert grads["head.weight"].any()
    model = GPT(GPTConfig(**{**SIZE, "n_layer": 2, **flags, "tie_weights": True}))
    assert gradients(model, idx, targets)[1]["blocks.0.mlp.f.down.weight"].any()  # the branches can start to learn


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize(
    "flags, net",
    (
        (dict(), dict()),
        (dict(norm="layernorm", bias=True, init_std=0.3), LAYERNORM_NET),
        (dict(LLAMA, init="xavier", lns="branch", dropout=0.5), dict(LLAMA_NET, lns="branch")),
        (dict(pre_norm="both", mid_norm="attn"), dict(attn="pre mid post", mlp="pre post")),
    ),
    ids=str,
)
def test_admin_profiles_its_vectors(flags, net, training):
    idx = batch()[0]
    flags = {**SIZE, "n_layer": 3, **POST, **flags, "admin": True}
    model = GPT(GPTConfig(**flags)).double().train(training)
    before = floats(model)
    net = replace(NET, blocks=3, admin=True, **{**POST_NET, **net})
    expected = reference.admin_omegas(net, before, idx)
    model.profile_admin(idx)
    assert model.training == training == model.blocks[0].attn.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    after = floats(model)
    assert len(expected) == 6 and list(expected.values())[0] == 1.0
    assert len({round(omega, 9) for omega in expected.values()}) == 6
    for key, t in after.items():
        if key in expected:
            assert error(t, torch.full_like(t, expected[key])) < 1e-6, key
        else:
            assert torch.equal(t, before[key]), key
    model.profile_admin(idx)  # from any start the same
    assert all(torch.equal(t, after[key]) for key, t in floats(model).items())


def test_admin_profiling_is_nothing_to_other_models():
    model = build(POST)
    before = floats(model)
    model.profile_admin(batch()[0])
    assert all(torch.equal(t, before[key]) for key, t in floats(model).items())


# ------------------------------------------------------------------------------------- 5. refusals, notes, anything

TINY = dict(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=17)


@pytest.mark.parametrize(
    "flags, words",
    (
        (dict(lns="pre"), "lns 'pre' off norm branch residual input"),
        (dict(gain="hg"), "gain 'hg' shared none branch"),
        (dict(gain_out="dp"), "gain_out 'dp' none scale norm"),
        (dict(gain_param="or"), "gain_param 'or' direct magdir expmagdir"),
        (dict(branch_scale="rezero"), "branch_scale 'rezero' none layerscale skipinit"),
        (dict(norm="dyt", dyt_squash="erf"), "dyt_squash 'erf' tanh hardtanh sigmoid identity"),
        (dict(lns="norm", lns_power=math.inf), "lns_power finite"),
        (dict(lns="norm", lns_power="1"), "lns_power='1' float"),
        (dict(norm="none", post_norm_blocks=1), "norm=none post_norm_blocks=1"),
        (dict(norm="none", mid_norm="attn", input_norm=True), "norm=none mid_norm=attn input_norm=True"),
        (dict(post_norm_blocks=-1), "post_norm_blocks=-1 between 0 and n_layer=2"),
        (dict(post_norm_blocks=3), "post_norm_blocks=3 between 0 and n_layer=2"),
        (dict(norm_groups=0), "norm_groups=0 n_embd=8"),
        (dict(norm_groups=3), "norm_groups=3 n_embd=8"),
        (dict(norm_groups=-2), "norm_groups=-2 n_embd=8"),
        (dict(norm_groups=2, norm="dyt"), "norm_groups=2 norm=rmsnorm layernorm norm=dyt"),
        (dict(norm_groups=2, norm="none"), "norm_groups=2 norm=rmsnorm layernorm norm=none"),
        (dict(dyt_squash="sigmoid"), "dyt_squash norm=dyt norm=rmsnorm"),
        (dict(dyt_learn_alpha=False, dyt_bias=True, norm="none"), "dyt_learn_alpha dyt_bias norm=dyt norm=none"),
        (dict(norm="dyt", dyt_alpha_attn=0.0), "dyt_alpha_attn=0"),
        (dict(norm="dyt", dyt_alpha_other=0), "dyt_alpha_other=0"),
        (dict(embed_scale=True, input_norm=True), "embed_scale input_norm"),
        (dict(qk_norm=True, gain_out="norm"), "gain_out=norm qk_norm"),
        (dict(lns="norm", pre_norm="none"), "lns=norm pre_norm"),
        (dict(lns="input", pre_norm="none"), "lns=input pre_norm"),
        (dict(lns="norm", norm="none"), "lns=norm norm=none"),
        (dict(pre_norm="none", admin=True, norm="none"), "admin norm=none"),
        (dict(deepnorm=True, norm="none"), "deepnorm norm=none"),
        (dict(norm="layernorm", norm_groups=8), "norm_groups=8 LayerNorm lower"),
        (dict(lns="norm", pre_norm="attn", lns_branches="mlp"), "lns=norm pre_norm"),
        (dict(lns="input", pre_norm="mlp", lns_branches="attn"), "lns=input pre_norm"),
        (dict(lns="norm", post_norm_blocks=2), "lns=norm pre_norm"),
        (dict(lns_power=1.0), "lns_power lns=norm"),
        (dict(lns_branches="attn"), "lns_branches lns=norm"),
        (dict(lns_branches="attn", lns_power=0.0), "lns_power lns_branches lns=norm"),
        (dict(lns_learn=True), "lns_learn lns=norm"),
        (dict(lns_learn=True, lns="branch"), "lns_learn lns=norm"),
        (dict(lns_learn=True, lns="norm", gain="none"), "lns_learn gain=shared"),
        (dict(deepnorm=True), "deepnorm post_norm=both"),
        (dict(deepnorm=True, post_norm="attn"), "deepnorm post_norm=both"),
        (dict(deepnorm=True, post_norm_blocks=2), "deepnorm post_norm=both"),
        (dict(admin=True), "admin post_norm=both"),
        (dict(admin=True, post_norm="mlp"), "admin post_norm=both"),
        (dict(POST, admin=True, deepnorm=True), "deepnorm admin"),
        (dict(branch_scale_init=0.1), "branch_scale_init branch_scale=layerscale skipinit"),
        (dict(fixup=True), "fixup norm=rmsnorm norm=none"),
        (dict(fixup=True, norm="dyt"), "fixup norm=dyt norm=none"),
        (dict(FIXUP, branch_scale="skipinit"), "fixup branch_scale"),
        (dict(FIXUP, branch_scale="layerscale"), "fixup branch_scale"),
        (dict(FIXUP, sigma_reparam=True), "fixup sigma_reparam"),
        (dict(gain="branch", pre_norm="none"), "gain=branch pre_norm"),
        (dict(gain="branch", norm="none"), "gain=branch norm=none"),
        (dict(gain="branch", post_norm_blocks=2), "gain=branch pre_norm"),
        (dict(post_norm_blocks=2, lns="norm"), "lns=norm pre_norm=both post_norm_blocks n_layer=2"),
        (dict(post_norm_blocks=2, gain="branch"), "gain=branch pre_norm post_norm_blocks n_layer=2"),
        (dict(gain="none", gain_out="scale"), "gain_out=scale gain=none"),
        (dict(gain="none", gain_out="norm"), "gain_out=norm gain=none"),
        (dict(gain="none", gain_param="magdir"), "gain_param=magdir gain=none"),
        (
            dict(branch_scale="layerscale", branch_scale_init=0.0, gain_param="expmagdir"),
            "gain_param=expmagdir branch_scale_init=0.0 positive",
        ),
        (
            dict(branch_scale="layerscale", branch_scale_init=-1, gain_param="expmagdir"),
            "gain_param=expmagdir branch_scale_init=-1 positive",
        ),
        (dict(NONE, gain_param="magdir"), "gain_param=magdir norm=none"),
        (dict(NONE, gain_param="expmagdir", branch_scale="skipinit"), "gain_param=expmagdir norm=none"),
    ),
    ids=str,
)
def test_bad_flags_are_refused_in_one_line_that_names_them(flags, words):
    with pytest.raises(ValueError) as caught:
        GPT(GPTConfig(**TINY | flags))
    message = str(caught.value)
    assert "\n" not in message
    for word in words.split():
        assert word in message, message


@pytest.mark.parametrize(
    "flags",
    (
        dict(NONE, gain_param="magdir", qk_norm=True),
        dict(NONE, gain_param="magdir", gain_out="scale"),
        dict(NONE, gain_param="expmagdir", branch_scale="layerscale"),
        dict(branch_scale="skipinit", branch_scale_init=-1.0, gain_param="expmagdir"),
        dict(branch_scale="layerscale", branch_scale_init=-1.0, gain_param="magdir"),
        dict(lns="residual", pre_norm="none", lns_branches="attn"),
        dict(lns="branch", norm="none"),
        dict(post_norm_blocks=2, lns="branch"),
        dict(lns="norm", pre_norm="attn", lns_branches="attn", lns_power=-1),
        dict(post_norm="both", deepnorm=True),
        dict(gain="none", branch_scale="layerscale"),
        dict(embed_scale=True, norm="none"),
        dict(embed_scale=True, norm="dyt", input_norm=True),  # γ tanh(α s x) keeps s
        dict(norm_groups=8),
    ),
    ids=str,
)
def test_near_misses_are_allowed(flags):
    GPT(GPTConfig(**TINY | flags))


PLAIN = dict(residual_init="plain")


@pytest.mark.parametrize(
    "flags, words",
    (
        (dict(), []),
        (dict(S5, gain="branch", gain_param="magdir"), []),
        (dict(PLAIN, lns="norm"), []),
        (dict(PLAIN, lns="branch", qk_norm=True, mid_norm="both"), []),
        (dict(PLAIN, **POST, deepnorm=True), []),
        (dict(PLAIN, **POST, admin=True), []),
        (dict(PLAIN, **FIXUP), []),
        (dict(lns="norm"), ["lns residual_init=gpt2 residual_init=plain"]),
        (dict(lns="branch", residual_init="depth"), ["lns residual_init=depth residual_init=plain"]),
        (dict(PLAIN, lns="norm", pre_norm="attn"), ["lns=norm attn alone"]),
        (dict(PLAIN, lns="input", pre_norm="mlp", norm="dyt", init_std=0.2), ["lns=input mlp alone"]),
        (dict(PLAIN, lns="norm", pre_norm="attn", lns_branches="attn"), []),
        (dict(PLAIN, lns="norm", qk_norm=True), ["lns attention v alone QK-norm"]),
        (dict(PLAIN, lns="norm", qk_norm=True, mid_norm="mlp"), ["lns attention v alone QK-norm"]),
        (dict(PLAIN, lns="norm", qk_norm=True, lns_branches="mlp"), []),
        (dict(PLAIN, lns="norm", qk_norm=True, mid_norm="both"), ["lns no effect attention QK-norm mid norm"]),
        (dict(PLAIN, lns="norm", qk_norm=True, mid_norm="attn", norm="dyt", init_std=0.2), ["lns attention v alone"]),
        (dict(PLAIN, lns="input"), ["lns=input next to nothing"]),
        (dict(PLAIN, lns="input", norm="dyt", init="xavier"), []),
        (dict(norm="dyt"), ["dyt init_std·√n_embd = 0.06 init_std=0.35"]),  # 8 wide
        (dict(norm="dyt", n_embd=768), []),
        (dict(PLAIN, post_norm="both", deepnorm=True), ["pre_norm=both DeepNorm pre_norm=none"]),
        (dict(PLAIN, post_norm="both", pre_norm="mlp", admin=True), ["pre_norm=mlp Admin pre_norm=none"]),
        (dict(POST, deepnorm=True), ["deepnorm residual_init=gpt2 not used"]),
        (dict(FIXUP, residual_init="depth"), ["fixup residual_init=depth not used"]),
        (dict(S5, lns="norm"), ["residual_init=gpt2", "lns no effect here QK mid"]),
        (dict(PLAIN, lns="norm", lns_learn=True, qk_norm=True, mid_norm="both"), []),  # other steps, if the same start
        (dict(PLAIN, lns="norm", gain_out="norm"), ["lns no effect gain_out=norm"]),
        (dict(PLAIN, lns="norm", gain_out="norm", lns_branches="mlp"), ["lns no effect gain_out=norm"]),
        (dict(PLAIN, lns="norm", gain_out="norm", bias=True), []),  # a bias keeps its size beside the factor
        (dict(PLAIN, lns="norm", qk_norm=True, mid_norm="both", bias=True), []),
    ),
    ids=str,
)
def test_notes_say_what_should_be_known(flags, words):
    config = GPTConfig(**TINY | flags)
    config.check()
    notes = config.notes()
    assert len(notes) == len(words), notes
    for note, wanted in zip(notes, words, strict=True):
        assert "\n" not in note
        for word in wanted.split():
            assert word in note, note


# Every number a flag may be given in the property below, right or wrong.
NUMBERS = dict(n_layer=(1, 3), n_head=(1, 4), n_embd=(4, 12), block_size=(5, 9), vocab_size=(1, 65), rope_theta=(7.0,))
NUMBERS |= dict(n_kv_head=(1, 2, 3), n_ff=(1, 12), dropout=(0.3,), norm_eps=(1e-2,), norm_groups=(2, 3, 4, 8))
NUMBERS |= dict(post_norm_blocks=(1, 2, 3), dyt_alpha_attn=(0.0, 0.4), dyt_alpha_other=(0.3, -1.0), init_std=(0.5,))
NUMBERS |= dict(lns_power=(0.0, 1.0, -0.5), branch_scale_init=(0.0, 0.2, -0.1))


def choices(name, hint):
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (False, True) if hint is bool else NUMBERS.get(name, (0.5,) if hint is float else (2,))


DEFAULTS = {f.name: f.default for f in fields(GPTConfig)} | TINY
CHOICES = {name: choices(name, hint) for name, hint in get_type_hints(GPTConfig).items()}
CHOICES = {name: [v for v in values if v != DEFAULTS[name]] for name, values in CHOICES.items()}
SOME_FLAGS = st.lists(st.sampled_from(sorted(CHOICES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(CHOICES[name]) for name in names})
)
# a scheme, so that flags that need one another meet
START_FLAGS = st.sampled_from([{}, *(flags for flags, _ in SCHEMES.values())])


def step_settings():
    config = TrainConfig(learning_rate=1e-2)
    fill_defaults(config)
    return config


def test_any_flags_are_refused_by_name_or_train_and_survive_a_checkpoint(one_thread):
    outcomes, used = Counter(), Counter()

    @settings(max_examples=600, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(START_FLAGS, SOME_FLAGS)
    def any_flags(scheme, some):
        flags = {**TINY, **scheme, **some}
        config = GPTConfig(**flags)
        try:
            model = GPT(config)
        except ValueError as e:
            event("refused")
            outcomes["refused"] += 1
            named = [name for name in {**scheme, **some} if re.search(rf"\b{name}\b", str(e))]
            assert named and "\n" not in str(e), str(e)
            return
        event("accepted")
        outcomes["accepted"] += 1
        used.update(name for name in flags if flags[name] != DEFAULTS[name])
        assert all(isinstance(note, str) for note in config.notes())
        T = config.block_size
        idx, targets = tokens(2, T, vocab=config.vocab_size), tokens(2, T, vocab=config.vocab_size, seed=2)
        model.profile_admin(idx)
        optimizer = make_optimizer(model.train(), step_settings())
        for _ in range(2):
            loss = model(idx, targets)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.power_iteration()
            assert loss.isfinite()
        assert all(t.isfinite().all() for t in model.state_dict().values())
        file = io.BytesIO()
        torch.save(dict(model_config=asdict(config), model=model.state_dict()), file)
        file.seek(0)
        copy = GPT.from_checkpoint(torch.load(file, weights_only=True)).eval()
        for (key, a), b in zip(copy.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(a, b), key
        assert torch.equal(copy(idx)[0], model.eval()(idx)[0])

    any_flags()
    assert min(outcomes["refused"], outcomes["accepted"]) > 100, outcomes
    assert used.keys() == CHOICES.keys(), CHOICES.keys() - used.keys()
