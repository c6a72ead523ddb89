"""studies/analysis/norms.py against its definitions: the reference's equations, fits, cases by hand."""

import math
from dataclasses import replace

import pytest
import torch

from studies.analysis import norms, streams
from studies.analysis.figure import NotApplicable
from support import reference
from support.analysis import IN_PARTS, batches_of, close, solve
from support.models import DYT_CONSTANT, NET, POST, PRE, S5, UNIFIED, build, error, floats, tokens
from support.tolerances import FORWARD, GRADIENTS

SLOTS = {
    "Pre-LN": (dict(), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "DNT S5": (S5, ["attn.pre", "attn.mid", "mlp.mid"], ["final_norm"]),
    "Post-LN": (dict(POST, qk_norm=True), ["attn.post", "mlp.post"], []),
    "HG, DNP": (dict(UNIFIED), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "LayerScale, DyT": (dict(norm="dyt", branch_scale="layerscale"), ["attn.pre", "mlp.pre"], ["final_norm"]),
    "no norm": (dict(norm="none", branch_scale="layerscale", embed_scale=True, qk_norm=True), [], []),
}


@pytest.mark.parametrize("name", SLOTS)
def test_norm_slots_are_those_of_the_residual_path(name):
    flags, places, last = SLOTS[name]
    model = build(flags)
    wanted = ["input_norm"] * bool(flags.get("input_norm"))
    wanted += [f"blocks.{i}.{place}" for i in range(2) for place in places] + last
    found = norms.norm_slots(model)
    assert list(found) == wanted and all(found[name] is model.get_submodule(name) for name in wanted)


@IN_PARTS
@pytest.mark.parametrize("constant", (False, True), ids=("learned", "constant"))
def test_dyt_alphas(constant, rows):
    flags, words = dict(norm="dyt", embed_scale=True), dict(PRE, kind="dyt", embed_scale=True)
    if constant:
        flags, words = flags | DYT_CONSTANT, words | dict(alpha=(0.7, 0.4))
    model, net, terms = build(flags, dtype=torch.float32), replace(NET, blocks=2, **words), []
    weights, idx = floats(model), tokens(3, 7)
    reference.forward(net, weights, idx, seen=terms)
    names = [f"blocks.{i}.{branch}.pre" for i in range(2) for branch in ("attn", "mlp")] + ["final_norm"]
    inputs = [x for x, _ in terms] + [sum(terms[-1])]
    found = norms.measure_alpha(model, batches_of(idx, rows))["slots"]
    assert [slot["slot"] for slot in found] == names
    for slot, name, x in zip(found, names, inputs, strict=True):
        alpha = (0.7 if "attn" in name else 0.4) if constant else weights[name + ".alpha"].item()
        assert close(slot["alpha"], alpha) and close(slot["inv_std"], 1 / ((x - x.mean()) ** 2).mean().sqrt().item())
    with pytest.raises(NotApplicable, match="no DyT"):
        norms.measure_alpha(build(S5, dtype=torch.float32), batches_of(idx))


def scatter(model, idx, slot, n=400, rows=9):
    """norm_scatter of an fp32 model, with tensors for its lists."""
    found = norms.norm_scatter(model, batches_of(idx, rows), slot, n, torch.Generator().manual_seed(0))
    x, y, token, channel = (torch.tensor(found[key]) for key in ("x", "y", "token", "channel"))
    assert len(x) == len(y) == len(token) == len(channel) == min(n, idx.numel() * 16)
    assert len(set(zip(token.tolist(), channel.tolist(), strict=True))) == len(x)  # no element twice
    return found, x.double(), y.double(), token, channel


@IN_PARTS
def test_scatter_of_rmsnorm_is_a_line_for_each_token(rows):
    sizes = torch.empty(64, 1).normal_(generator=torch.Generator().manual_seed(2)).exp()  # tokens differ
    net = solve("Pre-LN", idx=tokens(5, 9), scale=sizes)
    found, x, y, token, channel = scatter(net.model, net.idx, "blocks.1.attn.pre", rows=rows)
    entering = net.streams[1].flatten(0, 1)
    mean_square = (entering**2).mean(-1)
    assert error(x, entering[token, channel]) < FORWARD
    assert error(y, x / (mean_square[token] + net.eps) ** 0.5) < FORWARD
    assert token.unique().numel() == 45 and channel.unique().numel() == 16

    rms = (mean_square**0.5).tolist()
    mean = sum(rms) / 45
    assert close(found["token_rms_cv"], (sum((r - mean) ** 2 for r in rms) / 45) ** 0.5 / mean)
    assert found["token_rms_cv"] > 0.3

    def r2(curve):
        """Of the best multiple of `curve`."""
        residual = y - (curve @ y) / (curve @ curve) * curve
        return (1 - residual @ residual / ((y - y.mean()) ** 2).sum()).item()

    slopes = torch.logspace(-2, 1.5, 400)
    best = max(r2(torch.tanh(a * x)) for a in slopes.tolist())
    fitted = y - found["amplitude"] * torch.tanh(found["slope"] * x)
    assert close(found["r2"], (1 - fitted @ fitted / ((y - y.mean()) ** 2).sum()).item())
    assert best - 1e-6 < found["r2"] < best + 1e-3 and close(found["linear_r2"], r2(x)) and best > r2(x) + 0.02


def test_scatter_of_layernorm():
    model, idx = build(dict(norm="layernorm", norm_eps=1e-5, bias=True), dtype=torch.float32), tokens(5, 9)
    entering = next(streams.collect_streams(model, batches_of(idx)))[2].double().flatten(0, 1)
    found, x, y, token, channel = scatter(model, idx, "final_norm", n=10**6)  # more than there are
    assert torch.equal(x, entering[token, channel])
    assert error(y, reference.standardise(entering, 1e-5)[token, channel]) < GRADIENTS


def test_scatter_of_dyt_finds_its_tanh():
    net = solve("DyT, embed scale", idx=tokens(5, 9))
    for slot, alpha in (("blocks.1.mlp.pre", 0.8), ("final_norm", -0.3), ("blocks.0.attn.pre", 0.05)):
        with torch.no_grad():
            net.model.get_submodule(slot).alpha.fill_(alpha)
            net.model.get_submodule(slot).gain.fill_(3.0)  # comes after y
        found, x, y, *_ = scatter(net.model, net.idx, slot)
        assert error(y, torch.tanh(alpha * x)) < FORWARD
        assert found["r2"] > 1 - 1e-6 > found["linear_r2"]
        assert close(found["slope"], abs(alpha), 1e-2) and close(found["amplitude"], math.copysign(1, alpha), 1e-2)


@pytest.mark.parametrize("param", ("direct", "magdir", "expmagdir"))
def test_gain_statistics(param):
    """HG, DP, post norms: each gain as it acts. Not SkipInit's scalar, in the place of the mid norm's."""
    flags = dict(gain="branch", gain_out="scale", mid_norm="attn", post_norm="mlp", branch_scale="skipinit")
    model = build(dict(flags, gain_param=param, qk_norm=True, n_kv_head=2), dtype=torch.float32)
    weights, wanted = floats(model), {}
    places = ["f.q.pre", "f.k.pre", "f.v.pre", "f.q.out", "f.k.out", "f.v.out", "f.q_norm", "f.k_norm"]
    places = [f"attn.{p}" for p in places] + ["mlp.f.up.pre", "mlp.f.up.out", "mlp.post"]
    for name in [f"blocks.{i}.{place}" for i in range(2) for place in places]:
        if param == "direct":
            gain = weights[name + ".gain"]
        else:
            size, direction = weights[name + ".magnitude"].item(), weights[name + ".direction"]
            size = math.exp(size) if param == "expmagdir" else size
            gain = size * direction / ((direction**2).sum() / len(direction)) ** 0.5
        wanted[name] = {key: ((gain - c) ** 2).mean().item() ** 0.5 for key, c in (("rms", 0), ("std", gain.mean()))}
    found = norms.measure_gains(model)["slots"]
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert found[name].keys() == numbers.keys() and all(close(found[name][k], v) for k, v in numbers.items()), name
    with pytest.raises(NotApplicable, match="no scale vector"):
        norms.measure_gains(build(dict(gain="none")))


def test_qkv_cosines():
    model = build(dict(gain="branch", n_kv_head=2, post_norm_blocks=1), 3, torch.float32)
    found = norms.measure_gains(model)["cosines"]
    assert len(found) == 3 and all(math.isnan(x) for x in found[0].values())  # a block of Mix-LN has no pre norm
    for i in (1, 2):
        gains = {part: getattr(model.blocks[i].attn.f, part).pre.gain.tolist() for part in "qkv"}
        dot = {a + b: sum(x * y for x, y in zip(gains[a], gains[b], strict=True)) for a in "qkv" for b in "qkv"}
        assert found[i].keys() == {"qk", "qv", "kv"}
        assert all(close(c, dot[ab] / math.sqrt(dot[ab[0] * 2] * dot[ab[1] * 2])) for ab, c in found[i].items())
    assert norms.measure_gains(build(S5))["cosines"] == []
