"""What holds for every layout: a gradient and a role for every parameter, checkpoints, the cache,
bf16."""

import copy
import math
import re

import pytest
import torch

from layers.linear import Linear
from model import GPT, GPTConfig, Residual
from nanodnt.generate import KVCache
from support.depth import spread
from support.models import (
    ALL,
    LAYOUTS,
    REPRESENTATIVES,
    SIZE,
    batch,
    build,
    depth_of,
    error,
    gradients,
    tokens,
)
from support.moe import MIXTURES
from support.operators import Watch
from support.tolerances import as_near, flat, shaken

BLOCK = r"blocks\.\d+\."  # of a parameter name
# flags of layouts whose blocks differ
NUMBERED = {"lns", "post_norm_blocks", "pre_norm_sublayers", "skip_scale"}
mostly_deep = pytest.mark.parametrize("name", spread(ALL, fast=REPRESENTATIVES))


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_gets_a_gradient(name):
    flags, least = ALL[name][0], 1e-6 if name in LAYOUTS else 1e-7
    model, (idx, targets) = build(flags, depth_of(name)), batch()
    shift_shows = (
        flags.get("qk_norm") or flags.get("pos") == "rope" or flags.get("gain_out") == "norm"
    )
    for key, grad in gradients(model, idx, targets)[1].items():
        if key.endswith("attn.f.k.bias") and not shift_shows:
            # adds the same to all scores of a query: softmax does not see it
            assert grad.abs().max() < 1e-12, key
        else:
            assert grad.isfinite().all() and grad.abs().max() > least, key


# -------------------------------------------------------------------------------------------- roles

VECTOR = r"\.(gain|magnitude)"
SCALARS = r".*\.(alpha|shift|gate|sigma)|embed_scale\.gain"
BRANCH_GAIN = BLOCK + r"(attn|mlp)\.mid\.gain"  # a vector, except for SkipInit and Fixup
ROLE_TABLE = {
    r"wte\.weight": "emb",
    r"wpe\.weight": "pos",
    r"head\.weight": "head",
    BLOCK + r"attn\.f\.[qk]\.weight": "qk",
    BLOCK + r"attn\.f\.[vo]\.weight": "vo",
    BLOCK + r"mlp\.f\.((experts|shared)\.)?(gate|up|down)\.weight": "ffn",
    BLOCK + r"mlp\.f\.router\.weight": "router",
    BLOCK + r"mlp\.f\.router\.choice_bias": "balance",
    "("
    + BLOCK
    + r"(attn|mlp)\.(pre|f\.(experts\.|shared\.)?([qkv]|gate|up|router)\.pre)|final_norm)"
    + VECTOR: "gain_in",
    BLOCK
    + r"(attn|mlp)\.(post|mid|f\.(experts\.|shared\.)?([qkv]|gate|up)\.out|f\.[qkv]_norm)"
    + VECTOR: "gain_out",
    BLOCK
    + r"(attn\.f\.qk_scale|(attn|mlp)\.skip)\.gain|(input_norm|logits_scale)"
    + VECTOR: "gain_out",
    r".*\.direction": "gain_dir",
    SCALARS: "scalar",
    r".*\.bias": "bias",
}


def empty(flags, n_layer):
    return GPT.empty(GPTConfig(**{**SIZE, "n_layer": n_layer, **flags}))


@pytest.mark.parametrize("name", [*ALL, *MIXTURES])
def test_roles_are_the_table(name):
    flags, depth = (ALL | MIXTURES)[name][0], 2 if name in MIXTURES else depth_of(name)
    model = empty(flags, depth)
    roles, shapes = model.roles(), {key: p.shape for key, p in model.named_parameters()}
    assert list(roles) == list(shapes)
    scalar_branch = flags.get("branch_scale") == "skipinit" or "fixup" in flags
    for key, role in roles.items():
        expected = [r for pattern, r in ROLE_TABLE.items() if re.fullmatch(pattern, key)]
        # the final norm: the head follows
        if re.fullmatch(rf"blocks\.{depth - 1}\.mlp\.post" + VECTOR, key):
            expected = ["gain_in"]
        if scalar_branch and re.fullmatch(BRANCH_GAIN, key):
            expected = ["scalar"]
        assert [role] == expected, key
        assert shapes[key] == (1,) or role != "scalar", key
        assert shapes[key] != (), key


def test_a_parameter_without_a_role_raises():
    model = build(dict())
    model.blocks[1].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"blocks\.1\.extra\.weight .*param_roles"):
        model.roles()


# ------------------------------------------------------------ construction, cache, trace, precision


@mostly_deep
def test_a_construction_on_the_meta_device_loses_nothing(name):
    model, idx = empty(ALL[name][0], depth_of(name)), batch()[0]
    assert (
        all(p.is_meta for p in model.parameters())
        and bool(list(model.buffers())) == model.config.sigma_reparam
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(math.nan)
    model.init_weights(3)
    direct = GPT(model.config, seed=3)
    for (key, a), b in zip(model.state_dict().items(), direct.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(model(idx)[0], direct(idx)[0])


@mostly_deep
def test_cached_logits_equal_the_full_forward(name):
    model, idx = build(ALL[name][0], depth_of(name)), tokens(2, 9)
    full = model(idx)[0]
    for prefill in (1, 4):
        cache = [KVCache(9) for _ in model.blocks]
        parts = [model(idx[:, :prefill], cache=cache)[0]]
        parts += [model(idx[:, t : t + 1], cache=cache)[0] for t in range(prefill, 9)]
        assert error(torch.cat(parts, dim=1), full) < 1e-12
        with pytest.raises(ValueError, match="10 tokens does not fit block_size=9"):
            model(idx[:, :1], cache=cache)


@pytest.mark.deep
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_the_traced_model_is_one_graph_and_the_same_function(name):
    has_numbers = NUMBERED & ALL[name][0].keys()
    model, (idx, targets) = build(ALL[name][0], depth_of(name) if has_numbers else 1), batch()
    loss, grads = gradients(model, idx, targets)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    after, after_grads = gradients(compiled, idx, targets)
    assert error(after, loss) < 1e-12  # not equal bit by bit: GELU and tanh have another form there
    # k's bias has a gradient of rounding alone: softmax cannot see it
    for key, grad in grads.items():
        assert (after_grads["_orig_mod." + key] - grad).abs().max() < 1e-12 * max(
            1.0, grad.abs().max()
        ), key


def numbers(model, idx, targets):
    """(logits and loss, gradients), each as one vector."""
    loss, grads = gradients(model, idx, targets)
    return flat(model(idx)[0], loss), flat(*grads.values())


@mostly_deep
def test_bf16_compute_multiplies_bf16_and_keeps_the_stream_in_fp32(name):
    """It is as far off as if each weight were moved by one or two roundings, at most."""
    model, (idx, targets) = build(ALL[name][0], depth_of(name), torch.float32), batch()
    if name not in LAYOUTS:  # logits of a usual size, where bf16 is not too coarse for a softmax
        with torch.no_grad():
            (model.head or model.wte).weight.mul_(0.1)
    before, exact = numbers(model, idx, targets), copy.deepcopy(model).double()
    stream, outputs = [], []
    for module in model.modules():
        if isinstance(module, Residual):
            module.register_forward_hook(
                lambda _, args, out: stream.extend((args[0].dtype, out.dtype))
            )
        elif isinstance(module, Linear) and module is not model.head:
            module.register_forward_hook(lambda _, args, out: outputs.append(out.dtype))
    assert model.set_runtime(compute_dtype=torch.bfloat16) is model
    with Watch() as watch:
        half = numbers(model, idx, targets)
    assert watch.multiplied == set(outputs) == {torch.bfloat16}
    assert stream == [torch.float32] * (8 * len(model.blocks))
    assert {t.dtype for t in (*half, model(idx, targets)[1], *model.parameters())} == {
        torch.float32
    }
    usual = numbers(shaken(exact, torch.bfloat16), idx, targets)
    for ours, moved, right, single in zip(
        half, usual, numbers(exact, idx, targets), before, strict=True
    ):
        assert as_near(ours, moved, right, times=2) and not torch.equal(ours, single)
    cache = [KVCache(9) for _ in model.blocks]
    model(idx[:, :3], cache=cache)
    assert {x.dtype for layer in cache for x in (layer.k, layer.v)} == {torch.bfloat16}
    model.set_runtime(compute_dtype=None)
    for ours, single in zip(numbers(model, idx, targets), before, strict=True):
        assert torch.equal(ours, single)
