"""studies/analysis/scale_vectors.py against the reference's derivatives, a simulation in small steps, quadrature."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanodnt.settings import TrainConfig
from studies.analysis import scale_vectors
from studies.analysis.figure import NotApplicable
from studies.analysis.gradients import compute_gradients
from support import reference
from support.analysis import NETS, two_batches
from support.models import LLAMA, NET, NONE, UNIFIED, build, floats, joined, tokens
from support.optimizers import filled
from support.tolerances import GRADIENTS

TYPES = dict(q="q", k="k", v="v", o="o", gate="w1", up="w1", down="w2")
QKV = {f"attn.f.{part}": "attn.pre" for part in "qkv"}
UP, GATE = {"mlp.f.up": "mlp.pre"}, {"mlp.f.gate": "mlp.pre"}
STACKS = {f"mlp.f.{name}": "mlp.pre" for name in ("experts.gate", "experts.up", "shared.gate", "shared.up")}
OUT = {"attn.f.o": "attn.f.v.out", "mlp.f.down": "mlp.f.up.out"}
OWN = {name: f"{name}.pre" for name in QKV | UP | GATE}
EXPERTS = {name: f"{name}.pre" for name in QKV | {"mlp.f.experts.up": "", "mlp.f.shared.up": ""}}
READS = {  # {matrix of a block: slot of the gain on its input}
    "Mix-LN + LNS": QKV | UP,
    "S5": QKV,
    "llama + HG + DP + LNS": OWN | OUT,
    "llama + HG + DNP + OR": OWN | OUT,
    "llama + ER + DP": QKV | UP | GATE | OUT,
    "LN": QKV | UP,
    "LN + HG + LNS + swiglu": OWN,
    "experts": QKV | STACKS,
    "experts, HG, DP": EXPERTS | {"attn.f.o": "attn.f.v.out"},
}
LAYOUTS = joined(" | ".join(name for name in READS if "experts" not in name)) | NETS  # flags, and support.reference's


def products(weights, reads, net):
    """{matrix: (gain on its input, as it acts, times the constant; V = W times that)}."""
    found = {}
    for name, slot in reads.items():
        if f"{slot}.gain" in weights:
            gain = weights[f"{slot}.gain"]
        else:
            size, direction = weights[f"{slot}.magnitude"], weights[f"{slot}.direction"]
            gain = (size.exp() if net.gain_kind == "expmagdir" else size) * direction / direction.square().mean().sqrt()
        if name.endswith(".o"):  # head h reads head h // (heads / kv_heads) of v
            gain = torch.cat([gain.chunk(net.kv_heads)[h * net.kv_heads // net.heads] for h in range(net.heads)])
        if net.lns and not slot.endswith(".out"):
            gain = gain * (int(name.split(".")[1]) + 1) ** -0.5
        found[name] = gain, weights[f"{name}.weight"] * gain
    return found


def without_gains(weights, reads, net):
    """The weights of the same function with V in place of W, gains of 1, no biases of the norms; and those V."""
    its, moved = products(weights, reads, net), dict(weights)
    for name, slot in reads.items():
        (gain, v), pre = its[name], ".".join(name.split(".")[:3]) + ".pre"
        its[name], c = v.requires_grad_(), (int(name.split(".")[1]) + 1) ** -0.5 if net.lns else 1.0
        moved[f"{name}.weight"] = v if slot.endswith(".out") else v / c
        for part, one in (("gain", 1.0), ("direction", 1.0), ("magnitude", float(net.gain_kind == "magdir"))):
            if f"{slot}.{part}" in weights:
                moved[f"{slot}.{part}"] = torch.full_like(weights[f"{slot}.{part}"], one)
        if net.norm_bias:
            read = weights[f"{pre}.bias"] * (c / gain if slot == pre else 1.0)
            moved[f"{name}.bias"], moved[f"{pre}.bias"] = weights[f"{name}.bias"] + v.detach() @ read, 0 * read.detach()
        if slot == pre and (router := f"{slot[:-4]}.f.router.weight") in weights:  # it reads the same gain
            moved[router] = weights[router] * gain
    return moved, its


@pytest.mark.parametrize("name", READS)
def test_eigenvalues_and_steps_are_those_of_the_equations(name):
    """P = J Jᵀ of one column's J = ∂v/∂(w, γ), by its singular values; the step by differences along the gradients of
    the equations; ∂L/∂V by a network that has V and no gain."""
    (flags, words), parts = LAYOUTS[name], READS[name]
    model, net, idx, targets = build(flags), replace(NET, **dict(words, blocks=2)), tokens(2, 5), tokens(2, 5, seed=2)
    weights = floats(model)
    reads = {f"blocks.{i}.{n}": f"blocks.{i}.{slot}" for i in range(2) for n, slot in parts.items()}
    reads = {n: slot for n, slot in reads.items() if {f"{slot}.gain", f"{slot}.direction"} & weights.keys()}

    def derivatives(weights, by):
        loss = reference.forward(net, weights, idx, targets)[1]
        return loss.item(), dict(zip(by, torch.autograd.grad(loss, by.values(), materialize_grads=True), strict=True))

    moved, products_of = without_gains(weights, reads, net)
    loss, by_v = derivatives(moved, products_of)
    weights = {n: w.requires_grad_() for n, w in weights.items()}
    same, gradients = derivatives(weights, weights)
    assert loss == pytest.approx(same, rel=1e-12)
    weights = {n: w.detach() for n, w in weights.items()}
    its = products(weights, reads, net)
    back, on = (products({n: w + t * gradients[n] for n, w in weights.items()}, reads, net) for t in (-1e-6, 1e-6))

    found = scale_vectors.precondition(model, compute_gradients(model, [(idx, targets)]))
    assert found.keys() == {TYPES[n.split(".")[-1]] for n in reads}
    for kind, block in product(found, range(2)):
        values = {key: numbers[block] for key, numbers in found[kind].items()}
        names = [n for n in reads if n.startswith(f"blocks.{block}.") and TYPES[n.split(".")[-1]] == kind]
        if not names:
            assert all(map(math.isnan, values.values()))
            continue
        eigenvalues, gains, sums = [], [], torch.zeros(3).double()
        for n in names:
            w, gain = weights[f"{n}.weight"], its[n][0]
            c = (block + 1) ** -0.5 if net.lns and not reads[n].endswith(".out") else 1.0
            diagonals = torch.diag_embed(gain[:, None].expand(-1, w.shape[-2])).expand(*w.shape[:-2], -1, -1, -1)
            eigenvalues += torch.linalg.svdvals(torch.cat((diagonals, c * w.mT[..., None]), -1)).square().flatten(0, -2)
            gains.append((gain / c).square())
            parts = (on[n][1] - back[n][1]) / 2e-6, gradients[f"{n}.weight"] * gain, by_v[n]
            sums += torch.stack([part.square().sum() for part in parts])
        high, low = torch.stack([e[[0, -1]] for e in eigenvalues]).T
        trained, fixed = (sums[:2] / sums[2]).sqrt()
        wanted = dict(low=low.median(), high=high.median(), condition=high.max() / low.min())
        wanted |= dict(gain=torch.cat(gains).mean(), trained=trained, fixed=fixed)
        wanted = {key: pytest.approx(value.item(), rel=GRADIENTS) for key, value in wanted.items()}
        assert values == wanted, (kind, block)
        assert abs(values["trained"] / values["fixed"] - 1) > 1e-3  # so that a γ held fixed would show


def test_a_norms_bias_without_one_of_the_matrix_leaves_the_step_open():
    model = build(dict(norm="dyt", dyt_bias=True))
    found = scale_vectors.precondition(model, compute_gradients(model, two_batches()))
    assert all(map(math.isnan, found["q"]["trained"] + found["w1"]["fixed"])) and min(found["q"]["high"]) > 0


def test_decay_and_length_of_a_run_and_what_does_not_apply():
    """A constant rate of 0.01 after 10 steps of warm-up from 0.001: t = 0.055 + 90 · 0.01."""
    model = build(dict(LLAMA, **UNIFIED))
    changes = dict(decay_gains="input", input_gains="up,final", weight_decay=0.2, schedule="constant", max_iters=100)
    train = vars(filled(**changes, learning_rate=0.01, warmup_iters=10)) | {"of_an_older_version": 1}
    of_gains, time = scale_vectors.decays(model, train)
    assert of_gains == dict(q=0.2, k=0.2, v=0.2, w1=0.2, o=0.0, w2=0.2) and time == pytest.approx(2 * 0.2 * 0.955)
    assert scale_vectors.decays(model, {})[0] == {}
    run = SimpleNamespace(train_config=vars(TrainConfig()))
    for flags, words in ((NONE, "no scale"), (dict(gain="none"), "no scale"), (dict(sigma_reparam=True), "σRep")):
        with pytest.raises(NotApplicable, match=words):
            scale_vectors.measure_preconditioner(build(flags), two_batches(), run)


# ------------------------------------------------------------------------------------------------------- the process


def gibbs(mu, noise=1.0):
    """E γ² under exp(−2U/q), on a grid over γ and w."""
    x = torch.linspace(-20, 20, 1001).double()
    gain, w = x[:, None], x[None]
    density = torch.exp(-((gain * w - 1) ** 2 + mu * gain**2 + 0.1 * w**2) / noise)
    return ((gain**2 * density).sum() / density.sum()).item()


def paths(mu, t, size=20000, dt=0.01):
    """γ and w at time t, by small steps along the equations and their noise."""
    random, gain, w = np.random.default_rng(5), np.ones(size), np.ones(size)
    for _ in range(round(t / dt)):
        off, noise = gain * w - 1, dt**0.5 * random.standard_normal((2, size))
        gain, w = gain - dt * (w * off + mu * gain) + noise[0], w - dt * (gain * off + 0.1 * w) + noise[1]
    return gain, w


@pytest.mark.parametrize("mu", (0.0, 0.3))
def test_the_process_moves_as_the_papers_equations_say(mu):
    steps = scale_vectors.process(mu, 0.05, (20000,), seed=1)
    for ours, theirs in zip([next(steps) for _ in range(61)][-1], paths(mu, 3.0), strict=True):
        for power in (1, 2):
            error = 4 * math.hypot(*((x**power).std() for x in (ours, theirs))) / 20000**0.5
            assert abs((ours**power).mean() - (theirs**power).mean()) < error + 0.01 < 0.2


def test_with_decay_the_process_ends_in_its_stationary_distribution():
    process = scale_vectors.process(0.1, 0.1, (4000,), seed=1)
    for _ in range(500):  # 2µt = 10
        gain, w = next(process)
    for x in (gain, w):
        mean, error = np.square(x).mean(), np.square(x).std() / 4000**0.5
        assert abs(mean - gibbs(0.1)) < 4 * error
        for wrong in (gibbs(0.2), gibbs(0.05), gibbs(0.1, noise=0.5), scale_vectors.bound(0.1, 50.0)):
            assert abs(mean - wrong) > 4 * error


def test_without_decay_it_grows_on_and_the_figures_lines_say_so():
    free, held = scale_vectors.simulate(0.0), scale_vectors.simulate(0.1)
    quarters = free["mean"][12::12]
    assert quarters == sorted(quarters) and quarters[-1] > 5 * gibbs(0.1) > 5 * 0.9 * held["mean"][-1]
    for found, mu in ((free, 0.0), (held, 0.1)):
        assert found["time"][-1] == pytest.approx(10) and len(found["mean"]) == len(found["bound"]) == 51
        assert (np.array(found["mean"])[1:] < np.array(found["bound"])[1:]).all()
        limit = [1.0]
        for _ in range(50_000):  # eq. 30 with −2 aᵀ(a − a⋆) at its largest, 1/2, in steps of 0.001
            limit.append(limit[-1] + 0.001 * (1.5 - 2 * mu * limit[-1]))
        assert found["bound"] == pytest.approx(limit[::1000], rel=1e-3)
