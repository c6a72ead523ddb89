"""studies/analysis/norms.py against its definitions: the reference's equations, fits, cases by
hand."""

import math
from dataclasses import replace

import pytest
import torch

from studies.analysis import norms, streams
from studies.analysis.figure import NotApplicable
from support import reference
from support.analysis import batches_of, close, solve
from support.models import DYT_CONSTANT, NET, POST, PRE, S5, UNIFIED, build, error, floats, tokens
from support.tolerances import FORWARD, GRADIENTS

SLOTS = {
    "Pre-LN": (dict(), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "DNT S5": (S5, ["attn.pre", "attn.mid", "mlp.mid"], ["final_norm"]),
    "Post-LN": (dict(POST, qk_norm=True), ["attn.post", "mlp.post"], []),
    "HG, DNP": (dict(UNIFIED), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "LayerScale, DyT": (
        dict(norm="dyt", branch_scale="layerscale"),
        ["attn.pre", "mlp.pre"],
        ["final_norm"],
    ),
    "no norm": (
        dict(norm="none", branch_scale="layerscale", embed_scale=True, qk_norm=True),
        [],
        [],
    ),
}


@pytest.mark.parametrize("name", SLOTS)
def test_norm_slots_are_those_of_the_residual_path(name):
    flags, places, last = SLOTS[name]
    model = build(flags)
    wanted = ["input_norm"] * bool(flags.get("input_norm"))
    wanted += [f"blocks.{i}.{place}" for i in range(2) for place in places] + last
    found = norms.norm_slots(model)
    assert list(found) == wanted and all(
        found[name] is model.get_submodule(name) for name in wanted
    )


def test_dyt_alphas():
    """Learned, or DyT's constants; over all elements of two batches."""
    how, idx = dict(norm="dyt", embed_scale=True), tokens(3, 7)
    words = dict(PRE, kind="dyt", embed_scale=True)
    for constant, flags, net in (
        (False, how, words),
        (True, how | DYT_CONSTANT, words | dict(alpha=(0.7, 0.4))),
    ):
        model, terms = build(flags, dtype=torch.float32), []
        weights = floats(model)
        reference.forward(replace(NET, blocks=2, **net), weights, idx, seen=terms)
        names = [f"blocks.{i}.{branch}.pre" for i in range(2) for branch in ("attn", "mlp")] + [
            "final_norm"
        ]
        inputs = [x for x, _ in terms] + [sum(terms[-1])]
        found = norms.measure_alpha(model, batches_of(idx, 2))["slots"]
        assert [slot["slot"] for slot in found] == names
        for slot, name, x in zip(found, names, inputs, strict=True):
            alpha = (
                (0.7 if "attn" in name else 0.4) if constant else weights[name + ".alpha"].item()
            )
            assert close(slot["alpha"], alpha) and close(
                slot["inv_std"], 1 / x.std(correction=0).item()
            )


def scatter(model, idx, slot, n=400):
    """(x, y, token, channel) of norm_scatter as tensors."""
    found = norms.norm_scatter(model, batches_of(idx, 2), slot, n, torch.Generator().manual_seed(0))
    x, y, token, channel = (torch.tensor(found[key]) for key in ("x", "y", "token", "channel"))
    assert len(x) == len(y) == min(n, idx.numel() * 16)
    # no element twice
    assert len(set(zip(token.tolist(), channel.tolist(), strict=True))) == len(x)
    return x.double(), y.double(), token, channel


def test_scatter_of_rmsnorm():
    net = solve("Pre-LN", idx=tokens(5, 9))
    x, y, token, channel = scatter(net.model, net.idx, "blocks.1.attn.pre")
    entering = net.streams[1].flatten(0, 1)
    assert error(x, entering[token, channel]) < FORWARD
    assert error(y, x / (entering.square().mean(-1)[token] + net.eps) ** 0.5) < FORWARD
    assert token.unique().numel() == 45 and channel.unique().numel() == 16


def test_scatter_of_layernorm_and_dyt():
    """Before the affine part."""
    model, idx = (
        build(dict(norm="layernorm", norm_eps=1e-5, bias=True), dtype=torch.float32),
        tokens(5, 9),
    )
    parts = [
        streams[2].double().flatten(0, 1)
        for streams in streams.collect_streams(model, batches_of(idx, 2))
    ]
    entering = torch.cat(parts)
    x, y, token, channel = scatter(model, idx, "final_norm", n=10**6)  # more than there are
    assert torch.equal(x, entering[token, channel])
    assert error(y, reference.standardise(entering, 1e-5)[token, channel]) < GRADIENTS
    net = solve("DyT, embed scale", idx=tokens(5, 9))
    x, y, *_ = scatter(net.model, net.idx, "blocks.1.mlp.pre")
    assert error(y, torch.tanh(net.model.blocks[1].mlp.pre.alpha.item() * x)) < FORWARD


@pytest.mark.parametrize("param", ("direct", "magdir", "expmagdir"))
def test_gain_statistics(param):
    """HG, DP, post norms: each gain as it acts. Not SkipInit's scalar, in the place of the mid
    norm's."""
    flags = dict(
        gain="branch", gain_out="scale", mid_norm="attn", post_norm="mlp", branch_scale="skipinit"
    )
    model = build(dict(flags, gain_param=param, qk_norm=True, n_kv_head=2), dtype=torch.float32)
    weights, wanted = floats(model), {}
    places = [
        "f.q.pre",
        "f.k.pre",
        "f.v.pre",
        "f.q.out",
        "f.k.out",
        "f.v.out",
        "f.q_norm",
        "f.k_norm",
    ]
    places = [f"attn.{p}" for p in places] + ["mlp.f.up.pre", "mlp.f.up.out", "mlp.post"]
    for name in [f"blocks.{i}.{place}" for i in range(2) for place in places]:
        if param == "direct":
            gain = weights[name + ".gain"]
        else:
            size, direction = weights[name + ".magnitude"].item(), weights[name + ".direction"]
            size = math.exp(size) if param == "expmagdir" else size
            gain = size * direction / ((direction**2).sum() / len(direction)) ** 0.5
        wanted[name] = {
            key: ((gain - c) ** 2).mean().item() ** 0.5
            for key, c in (("rms", 0), ("std", gain.mean()))
        }
    found = norms.measure_gains(model)["slots"]
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert found[name].keys() == numbers.keys() and all(
            close(found[name][k], v) for k, v in numbers.items()
        ), name


def test_qkv_cosines():
    model = build(dict(gain="branch", n_kv_head=2, post_norm_blocks=1), 3, torch.float32)
    found = norms.measure_gains(model)["cosines"]
    # a block of Mix-LN has no pre norm
    assert len(found) == 3 and all(math.isnan(x) for x in found[0].values())
    for i in (1, 2):
        gains = {part: getattr(model.blocks[i].attn.f, part).pre.gain.tolist() for part in "qkv"}
        dot = {
            a + b: sum(x * y for x, y in zip(gains[a], gains[b], strict=True))
            for a in "qkv"
            for b in "qkv"
        }
        assert found[i].keys() == {"qk", "qv", "kv"}
        assert all(
            close(c, dot[ab] / math.sqrt(dot[ab[0] * 2] * dot[ab[1] * 2]))
            for ab, c in found[i].items()
        )
    assert norms.measure_gains(build(S5))["cosines"] == []


def test_models_without_dyt_or_gains():
    for measure, words in (
        (norms.measure_alpha, "no DyT"),
        (norms.measure_gains, "no scale vector"),
    ):
        with pytest.raises(NotApplicable, match=words):
            measure(build(dict(gain="none")), batches_of(tokens(1, 4)))
