"""studies/analysis/streams.py against its definitions: the reference's equations, finite differences, cases by hand."""

import math
from dataclasses import replace

import pytest
import torch

from layers.ops import rotary
from nanodnt.run import tracking
from nanodnt.weights import without_block
from studies.analysis import conditioning, gradients, norms, streams
from support import reference
from support.analysis import IN_PARTS, NETS, batches_of, close, solve, two_batches
from support.models import LLAMA, NET, POST, S5, SCHEMES, build, error, floats, tokens
from support.tolerances import FORWARD, roundings


def mean_variance(x):
    """Over the channels of each token, divided by their number; the mean over tokens."""
    return ((x - x.mean(-1, keepdim=True)) ** 2).mean().item()


@IN_PARTS
@pytest.mark.parametrize("name", NETS)
def test_streams_and_variances_are_those_of_the_equations(name, rows):
    net = solve(name, 3)
    parts = zip(*streams.collect_streams(net.model, batches_of(net.idx, rows)), strict=True)
    assert all(error(torch.cat(a), b) < FORWARD for a, b in zip(parts, net.streams, strict=True))
    found = streams.stream_variance(net.model, batches_of(net.idx, rows))
    assert found.keys() == {"stream", "stream_global", "attn", "mlp", "theory"}
    assert bool(found["theory"]) == (name in ("Pre-LN", "LNS", "experts", "experts, HG, DP"))
    assert not found["theory"] or found["theory"]["law"][:2] == pytest.approx(found["stream"][1:3])
    assert close(found["stream"], [mean_variance(x) for x in net.streams])
    assert close(found["stream_global"], [((x - x.mean()) ** 2).mean().item() for x in net.streams])
    assert close(found["attn"], [mean_variance(y) for _, y in net.terms[::2]])
    assert close(found["mlp"], [mean_variance(y) for _, y in net.terms[1::2]])


@pytest.mark.parametrize("lns", (False, True))
def test_growth_by_the_theory(lns):
    """The equations of the LNS paper's appendix, block by block."""
    x = [2.0, 3.0, 5.0, 6.0, 6.5]  # after blocks 1 … 5, so x_2 … x_6 of the paper
    scale = [math.sqrt(block) if lns else 1 for block in range(2, 6)]
    c = (x[1] / x[0] - 1) * scale[0] * math.sqrt(x[0])
    wanted = {name: [x[0]] for name in ("Θ(L)", "lower bound", "law", "upper bound")}
    for i, s in enumerate(scale):
        term = c / (s * math.sqrt(x[i]))
        wanted["Θ(L)"].append(wanted["Θ(L)"][-1] + 1.0)
        wanted["law"].append(wanted["law"][-1] * (1 + term))
        wanted["lower bound"].append(wanted["lower bound"][-1] * math.exp(term - term**2 / 2))
        wanted["upper bound"].append(wanted["upper bound"][-1] * (1 + c / math.sqrt(x[0])))
    if lns:  # a + b ℓ^1.5 through x_2 and x_3
        b = 1.0 / (3**1.5 - 2**1.5)
        wanted["upper bound"] = [2.0 + b * (depth**1.5 - 2**1.5) for depth in range(2, 7)]
    config = build(dict(lns="norm") if lns else {}).config
    found = streams.theory_curves(config, x)
    assert found.keys() == wanted.keys() and all(close(found[name], curve, 1e-12) for name, curve in wanted.items())
    its = x[:1]  # a stream that obeys the law: this is where the other curves must be bounds
    for s in scale:
        its.append(its[-1] * (1 + 0.7 / (s * math.sqrt(its[-1]))))
    found_of, (_, *rest) = streams.theory_curves(config, its), its
    assert close(found_of["law"], its, 1e-12) and len(rest) == 4
    assert all(a < b for a, b in zip(found_of["lower bound"][1:], rest, strict=True))
    assert all(a < b * (1 + 1e-9) for a, b in zip(rest, found_of["upper bound"][1:], strict=True))
    for flat in ([2.0], [2.0, 2.0, 3.0], [0.0, 1.0]):
        assert streams.theory_curves(config, flat) == {}
    measured = dict(stream=[1e-9, *x], stream_global=[1.0] * 6, attn=x, mlp=x, step=3)
    far = found | {"upper bound": [2.0, 3.0, 60.0, 70.0, 1e9]}
    ((*_, panel),) = streams.draw_variance([measured | {"theory": far}])
    assert [how["label"] for _, how in panel.lines] == ["Θ(L)", "lower bound", "law", "upper bound", "measured"]
    assert panel.lines[3][0][1][:3] == [2.0, 3.0, 60.0] and all(map(math.isnan, panel.lines[3][0][1][3:]))  # far off
    assert "beside" in panel.title and list(panel.lines[4][0][0]) == [1, 2, 3, 4, 5]
    ((*_, panel),) = streams.draw_variance([measured | {"theory": {}}])
    assert "outside" in panel.title and len(panel.lines) == 1


OUTSIDE = [dict(lns="norm", lns_power=1.0), dict(lns="norm", lns_branches="mlp"), dict(lns="norm", lns_learn=True)]
OUTSIDE += [dict(pre_norm="attn"), dict(mid_norm="mlp"), dict(norm="dyt"), dict(post_norm_blocks=1), POST]
OUTSIDE += [dict(lns="branch"), dict(branch_scale="layerscale")]


@pytest.mark.parametrize("flags", OUTSIDE, ids=str)
def test_the_theory_is_of_two_layouts(flags):
    assert streams.theory_curves(build(flags).config, [2.0, 3.0]) == {}


def test_angular_distance_of_a_model_is_that_of_the_equations(monkeypatch):
    """LNS eq. 1 on every token, between what enters the blocks and what leaves the last; in parts of different size, at
    once and, as wide models need it, four tokens at a time."""
    net = solve("LNS", 3, tokens(5, 7))
    wanted = torch.empty(4, 4, dtype=torch.float64)
    for a, x in enumerate(net.streams):
        for b, y in enumerate(net.streams):
            cosine = (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()
            wanted[a, b] = (cosine.clamp(-1, 1).arccos() / math.pi).mean()
    for rows, numbers in ((5, 1 << 24), (3, 1 << 24), (3, 4 * 4 * 16 + 9)):
        monkeypatch.setattr(streams, "MAX_UNIT", numbers)
        found = torch.tensor(streams.angular_distance(net.model, batches_of(net.idx, rows)), dtype=torch.float64)
        assert (found - wanted).abs().max() < 1e-6 and wanted[0, 3] > 0.05


def test_angular_distance():
    def noise(seed):
        return torch.empty(4, 9, 32).normal_(generator=torch.Generator().manual_seed(seed))

    a, b = noise(0), noise(1)
    a[..., 16:] = 0
    orthogonal = a.roll(16, dims=-1)
    mixed = torch.cat((3 * a[:, :2], -a[:, 2:]), dim=1)  # 2 of 9 tokens alike, the others opposite
    xs = [a, orthogonal, -2 * a, mixed, b, a + 1e-2 * b, a * (1 + 1e-7), 1e-9 * a, 1e9 * b]
    found = streams.token_angles(xs).mean(-1)
    assert found.shape == (9, 9) and not found.isnan().any()
    assert (found[0, :4] - torch.tensor((0, 0.5, 1, 7 / 9))).abs().max() < 5e-4


CUT = {  # name: (flags, the whole network of 3 blocks, what differs in the network with one block less)
    "LNS": (*NETS["LNS"], dict()),
    "LNS residual": (*SCHEMES["LNS residual"], dict()),
    "S5": (*NETS["DNT S5"], dict()),
    "experts": (*NETS["experts"], dict()),
    "DeepNorm": (*SCHEMES["DeepNorm"], dict(deepnorm=False, skip=6**0.25)),  # its factor is that of the whole depth
}


@pytest.mark.parametrize("name", CUT)
def test_removal_is_the_network_without_the_block(name):
    flags, words, cut = CUT[name]
    model, net, batches = build(flags, 3, torch.float32), replace(NET, blocks=3, **words), two_batches()
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    before, weights = [p.clone() for p in model.parameters()], floats(model)
    whole, losses = reference.forward(net, weights, idx, targets)[1].item(), []
    for gone in range(3):
        kept = [i for i in range(3) if i != gone]
        left = {n: w for n, w in weights.items() if not n.startswith("blocks.")}
        for new, old in enumerate(kept):
            mine = [n for n in weights if n.startswith(f"blocks.{old}.")]
            left |= {n.replace(f"blocks.{old}.", f"blocks.{new}."): weights[n] for n in mine}
        shorter = replace(net, blocks=2, numbers=tuple(i + 1 for i in kept), **cut)
        losses.append(reference.forward(shorter, left, idx, targets)[1].item())
    found = streams.removal_drop(model, batches)
    assert close(found["loss"], whole) and len(found["drop"]) == 3
    assert max(abs(d - (loss - whole)) for d, loss in zip(found["drop"], losses, strict=True)) < whole * FORWARD
    assert min(abs(loss - whole) for loss in losses) > 1e-3
    with pytest.raises(KeyError), without_block(model, 2):
        raise KeyError
    assert len(model.blocks) == 3 and all(map(torch.equal, before, model.parameters()))
    assert close(model(idx, targets)[1].item(), whole)


JACOBIAN = {"Pre-LN": dict(), "S5, llama": dict(LLAMA, **S5), "Post-LN": POST, "DyT, LNS": dict(norm="dyt", lns="norm")}
JACOBIAN |= {"experts": NETS["experts"][0]}


@pytest.mark.parametrize("name", JACOBIAN)
@pytest.mark.parametrize("branch", ("attn", "mlp"))
@torch.no_grad()
def test_jacobian_against_differences(name, branch):
    model, idx, positions = build(JACOBIAN[name]), tokens(3, 7), torch.tensor([0, 6, 3])
    (one, block), c, rows, step = model.blocks, model.config, torch.arange(3), 1e-5
    rope = None if model.wpe else tuple(r.double() for r in rotary(torch.arange(7), c.head_dim, c.rope_theta))
    x = one(model.input_norm(model.wte(idx) + (model.wpe.weight[:7] if model.wpe else 0)), rope)
    x, function = (x, lambda x: block.attn(x, rope)) if branch == "attn" else (block.attn(x, rope), block.mlp)
    wanted = torch.empty(16, 16, dtype=torch.float64)  # [i, j]: of output i by input j
    for j in range(16):
        shift = torch.zeros_like(x)
        shift[rows, positions, j] = step
        change = function(x + shift) - function(x - shift)
        wanted[:, j] = change[rows, positions].mean(0) / (2 * step)
    for size in (3, 1):  # all sequences in one batch, then each in its own
        found = streams.residual_jacobian(model, batches_of(idx, size), positions, 1, branch)
        assert found.device.type == "cpu" and found.shape == (16, 16) and error(found, wanted) < roundings(8)
    with pytest.raises(ValueError, match="shorter|longer"):
        streams.residual_jacobian(model, batches_of(idx), positions[:2], 1, branch)


def test_jacobian_statistics():
    def found(rows):
        return streams.jacobian_statistics(torch.tensor(rows))

    assert found([[1.0, 0.0], [0.0, 1.0]]) == dict(deviation=0, off_diagonal=0)
    assert close(list(found([[2.0, 1.0], [0.0, 1.0]]).values()), [1, 1 / 6])  # ‖J − I‖² = 2, over C = 2
    assert close(list(found([[0.0, 3.0], [-4.0, 0.0]]).values()), [13.5**0.5, 1])
    assert close(list(found([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0], [0.0, 0.0, 1.0]]).values()), [(13 / 3) ** 0.5, 4 / 22])


def test_logit_max_is_the_trackers_over_all_parts():
    """tests/runs/test_tracking.py has its number against the equations."""
    model, idx = build(dict(S5, **LLAMA), 3, torch.float32), tokens(3, 9)
    wanted = [tracking.fetch_numbers(tracking.probe(model, part))["logit_max"] for part in idx.split(1)]
    assert len(wanted[0]) == 3 and len(set(map(tuple, wanted))) == 3
    for rows in (3, 1):
        found = streams.largest_logits(model, batches_of(idx, rows))["layers"]
        assert close(found, [max(by_block) for by_block in zip(*wanted, strict=True)])


def test_nothing_is_left_behind():
    """No parameter, gradient, hook, mode, or random state is another one afterwards."""
    model = build(dict(LLAMA, norm="dyt", n_expert=4, balance="bias"), dtype=torch.float32)
    generator, batches = torch.Generator(), two_batches()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    gradients.compute_gradients(model, batches)
    gradients.estimate_sharpness(model, batches, 2, generator)
    for function in (streams.stream_variance, streams.angular_distance, norms.measure_alpha, streams.largest_logits):
        function(model, batches)
    norms.measure_norms(model)
    streams.removal_drop(model, batches)
    norms.norm_scatter(model, batches, "final_norm", 10, generator)
    for branch in ("attn", "mlp"):
        streams.residual_jacobian(model, batches, torch.tensor([1, 2, 0, 3]), 0, branch)
    conditioning.measure_propositions(model, batches, None)
    conditioning.jacobian_spectra(model, batches[1:], [2], generator, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(*batches[0])[1].requires_grad
