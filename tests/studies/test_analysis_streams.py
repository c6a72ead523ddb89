"""studies/analysis/streams.py against its definitions: the reference's equations, finite
differences, cases by hand."""

import math
from dataclasses import replace

import pytest
import torch

from layers.ops import rotary
from nanodnt.run import tracking
from studies.analysis import conditioning, gradients, norms, streams
from support import reference
from support.analysis import NETS, batches_of, close, solve, two_batches
from support.models import LLAMA, NET, POST, S5, SCHEMES, build, error, floats, tokens
from support.tolerances import FORWARD, roundings


def mean_variance(x):
    """Over the channels of each token, divided by their number; the mean over tokens."""
    return ((x - x.mean(-1, keepdim=True)) ** 2).mean().item()


@pytest.mark.parametrize("name", NETS)
def test_streams_and_variances_are_those_of_the_equations(name):
    net = solve(name, 3)
    batches = batches_of(net.idx, 2)  # of different size
    parts = zip(*streams.collect_streams(net.model, batches), strict=True)
    assert all(error(torch.cat(a), b) < FORWARD for a, b in zip(parts, net.streams, strict=True))
    found = streams.stream_variance(net.model, batches)
    assert found.keys() == {"stream", "attn", "mlp"}
    assert close(found["stream"], [mean_variance(x) for x in net.streams])
    assert close(found["attn"], [mean_variance(y) for _, y in net.terms[::2]])
    assert close(found["mlp"], [mean_variance(y) for _, y in net.terms[1::2]])


def test_angular_distance_of_a_model_is_that_of_the_equations():
    """LNS eq. 1 on every token, between what enters the blocks and what leaves the last; in parts
    of different size."""
    net = solve("LNS", 3, tokens(5, 7))
    wanted = torch.empty(4, 4, dtype=torch.float64)
    for a, x in enumerate(net.streams):
        for b, y in enumerate(net.streams):
            cosine = (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()
            wanted[a, b] = (cosine.clamp(-1, 1).arccos() / math.pi).mean()
    found = torch.tensor(
        streams.angular_distance(net.model, batches_of(net.idx, 3)), dtype=torch.float64
    )
    assert (found - wanted).abs().max() < 1e-6 and wanted[0, 3] > 0.05


def test_angular_distance():
    """Of known angles in a plane, and of directions that nearly agree, however long."""
    turns = torch.tensor([0.0, 20, 125, 180]).deg2rad()
    a, b = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    plane = (
        torch.stack((turns.cos(), turns.sin()), -1)[:, None]
        * torch.tensor([1.0, 1e-9, 0.1, 3e9])[:, None, None]
    )
    found = streams.token_angles(list(plane))[..., 0]
    assert (found - (turns[:, None] - turns).abs() / math.pi).abs().max() < 1e-7
    found = streams.token_angles([a, a + 1e-2 * b, a * (1 + 1e-7), 1e-9 * a])
    assert not found.isnan().any() and found[0, 1].max() < 1e-2 and found[0, 2:].max() < 1e-6


# name: (flags, the whole network of 3 blocks, what differs in the network with one block less)
CUT = {
    "LNS": (*NETS["LNS"], dict()),
    "LNS residual": (*SCHEMES["LNS residual"], dict()),
    "S5": (*NETS["DNT S5"], dict()),
    "experts": (*NETS["experts"], dict()),
    # its factor is that of the whole depth
    "DeepNorm": (*SCHEMES["DeepNorm"], dict(deepnorm=False, skip=6**0.25)),
}


@pytest.mark.parametrize("name", CUT)
def test_removal_is_the_network_without_the_block(name):
    flags, words, cut = CUT[name]
    model, net, batches = (
        build(flags, 3, torch.float32),
        replace(NET, blocks=3, **words),
        two_batches(),
    )
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    weights = floats(model)
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
    assert (
        max(abs(d - (loss - whole)) for d, loss in zip(found["drop"], losses, strict=True))
        < whole * FORWARD
    )
    assert min(abs(loss - whole) for loss in losses) > 1e-3


JACOBIAN = {
    "Pre-LN": dict(),
    "S5, llama": dict(LLAMA, **S5),
    "Post-LN": POST,
    "DyT, LNS": dict(norm="dyt", lns="norm"),
}
JACOBIAN |= {"experts": NETS["experts"][0]}


@pytest.mark.parametrize("name", JACOBIAN)
@pytest.mark.parametrize("branch", ("attn", "mlp"))
@torch.no_grad()
def test_jacobian_against_differences(name, branch):
    model, idx, positions = build(JACOBIAN[name]), tokens(3, 7), torch.tensor([0, 6, 3])
    (one, block), c, rows, step = model.blocks, model.config, torch.arange(3), 1e-5
    rope = (
        None
        if model.wpe
        else tuple(r.double() for r in rotary(torch.arange(7), c.head_dim, c.rope_theta))
    )
    x = one(model.input_norm(model.wte(idx) + (model.wpe.weight[:7] if model.wpe else 0)), rope)
    x, function = (
        (x, lambda x: block.attn(x, rope)) if branch == "attn" else (block.attn(x, rope), block.mlp)
    )
    wanted = torch.empty(16, 16, dtype=torch.float64)  # [i, j]: of output i by input j
    for j in range(16):
        shift = torch.zeros_like(x)
        shift[rows, positions, j] = step
        change = function(x + shift) - function(x - shift)
        wanted[:, j] = change[rows, positions].mean(0) / (2 * step)
    found = streams.residual_jacobian(model, batches_of(idx, 2), positions, 1, branch)
    assert found.shape == (16, 16) and error(found, wanted) < roundings(8)


def test_deviation_from_the_identity():
    assert streams.deviation(torch.eye(2)) == 0
    # ‖J − I‖² = 2, over C = 2
    assert close(streams.deviation(torch.tensor([[2.0, 1.0], [0.0, 1.0]])), 1)
    assert close(streams.deviation(torch.tensor([[0.0, 3.0], [-4.0, 0.0]])), 13.5**0.5)


def test_logit_max_is_the_trackers_over_all_parts():
    """tests/runs/test_tracking.py has its number against the equations."""
    model, idx = build(dict(S5, **LLAMA), 3, torch.float32), tokens(3, 9)
    wanted = torch.tensor(
        [torch.stack(tracking.probe(model, part)["logit_max"]).tolist() for part in idx.split(1)]
    )
    assert close(streams.largest_logits(model, batches_of(idx, 2))["layers"], wanted.amax(0))


def test_nothing_is_left_behind():
    """No parameter, gradient, hook, mode, or random state is another one afterwards."""
    model = build(dict(LLAMA, norm="dyt", n_expert=4, balance="bias"), dtype=torch.float32)
    generator, batches = torch.Generator(), two_batches()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    gradients.compute_gradients(model, batches)
    gradients.estimate_sharpness(model, batches, 2, generator)
    for function in (
        streams.stream_variance,
        streams.angular_distance,
        norms.measure_alpha,
        streams.largest_logits,
    ):
        function(model, batches)
    norms.measure_norms(model)
    streams.removal_drop(model, batches)
    norms.norm_scatter(model, batches, "final_norm", 10, generator)
    for branch in ("attn", "mlp"):
        streams.residual_jacobian(model, batches, torch.tensor([1, 2, 0, 3]), 0, branch)
    conditioning.jacobian_spectra(model, batches[1:], [2])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(*batches[0])[1].requires_grad
