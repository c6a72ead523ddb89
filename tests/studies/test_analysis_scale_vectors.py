"""studies/analysis/scale_vectors.py against matrices built by hand, finite steps of gradient descent, quadrature."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanodnt.settings import TrainConfig
from studies.analysis import scale_vectors
from studies.analysis.figure import NotApplicable
from studies.analysis.gradients import compute_gradients
from support.analysis import NETS, two_batches
from support.models import LAYERNORM, LLAMA, NONE, UNIFIED, build, floats
from support.optimizers import filled

pytestmark = pytest.mark.usefixtures("one_thread")

TYPES = dict(q="q", k="k", v="v", o="o", gate="w1", up="w1", down="w2")
LAYOUTS = {
    "Pre-LN": dict(),
    "LNS, Mix-LN": dict(lns="norm", post_norm_blocks=1),
    "S5": NETS["DNT S5"][0],
    "HG, DP, LNS, llama": dict(LLAMA, gain="branch", gain_out="scale", lns="norm"),
    "unified, llama": dict(LLAMA, **UNIFIED),
    "ER, DP, llama": dict(LLAMA, gain_param="expmagdir", gain_out="scale"),
    "LayerNorm with biases": LAYERNORM,
    "HG, LayerNorm, LNS": dict(LAYERNORM, gain="branch", lns="norm"),
    "experts": NETS["experts"][0],
    "experts, HG, DP": NETS["experts, HG, DP"][0],
}


def products(model, weights):
    """{name of a matrix: (name of the slot with its gain, gain as it acts (n_in,), the factor beside it)}, by hand."""
    c, found = model.config, {}
    for i in range(c.n_layer):
        for name in [n for n in weights if n.startswith(f"blocks.{i}.") and n.endswith(".weight")]:
            name, part = name.removesuffix(".weight"), name.split(".")[-2]
            if part == "router":
                continue
            branch = name.split(".")[2]
            pre = f"blocks.{i}.{branch}.pre"
            if part in ("o", "down"):
                slot = f"{name.rpartition('.')[0]}.{'v' if part == 'o' else 'up'}.out"
                slot = slot if part == "o" or c.mlp == "swiglu" else ""
            else:
                slot = f"{name}.pre" if c.gain == "branch" else pre
            if f"{slot}.gain" in weights:
                gain = weights[f"{slot}.gain"]
            elif f"{slot}.direction" in weights:
                size, direction = weights[f"{slot}.magnitude"], weights[f"{slot}.direction"]
                size = size.exp() if c.gain_param == "expmagdir" else size
                gain = size * direction / ((direction**2).sum() / len(direction)) ** 0.5
            else:
                continue
            if part == "o":  # of each head of v, for the heads of q that read it
                gain = torch.cat(
                    [h for h in gain.split(c.head_dim) for _ in range(c.n_head // (c.n_kv_head or c.n_head))]
                )
            factor = (i + 1) ** -0.5 if c.lns == "norm" and part not in ("o", "down") else 1.0
            found[name] = slot, gain, factor
    return found


def gradients_by_product(model, its, batches):
    """{name of a matrix: ∂L/∂V, V = W diag(c γ)}, by a network with gains of 1 and V / c for W: the same function."""
    weights = floats(model)
    moved, gradients = dict(weights), {}
    for name, (slot, gain, _) in its.items():
        moved[f"{name}.weight"] = weights[f"{name}.weight"] * gain
        if name.endswith("up") and slot.endswith("mlp.pre") and (router := f"{slot[:-4]}.f.router.weight") in weights:
            moved[router] = weights[router] * gain  # it reads the same gain
        for part, one in (("gain", 1), ("direction", 1), ("magnitude", model.config.gain_param == "magdir")):
            if f"{slot}.{part}" in weights:
                moved[f"{slot}.{part}"] = torch.full_like(weights[f"{slot}.{part}"], one)
        if f"{slot}.bias" in weights:
            moved[f"{slot}.bias"] = weights[f"{slot}.bias"] / gain
    model.load_state_dict(moved)
    found = compute_gradients(model, batches)
    for name, (_, _, factor) in its.items():
        gradients[name] = found[f"{name}.weight"] / factor
        bias = ".".join(name.split(".")[:3]) + ".pre.bias"
        if bias in moved and not name.endswith((".o", ".down")):  # what the norm's bias adds to the gradient
            gradients[name] = gradients[name] - torch.outer(found[f"{name}.bias"], moved[bias])
    model.load_state_dict(weights)
    return gradients


def joint(tensors):
    """The L2 norm of all of them as one."""
    return math.sqrt(sum(t.square().sum().item() for t in tensors))


@pytest.mark.parametrize("name", LAYOUTS)
def test_eigenvalues_and_steps_are_those_of_explicit_matrices(name):
    model, batches = build(LAYOUTS[name]), two_batches()
    weights, gradients = floats(model), compute_gradients(model, batches)
    its = products(model, weights)
    by_v = gradients_by_product(model, its, batches)
    stepped = {n: w - 1e-7 * gradients[n] if n in gradients else w for n, w in weights.items()}
    after = products(model, stepped)
    found = scale_vectors.precondition(model, gradients)
    assert found.keys() == {TYPES[n.split(".")[-1]] for n in its}
    for kind, numbers in found.items():
        for block in range(2):
            names = [n for n in its if n.startswith(f"blocks.{block}.") and TYPES[n.split(".")[-1]] == kind]
            values = {key: its[block] for key, its in numbers.items()}
            if not names:
                assert all(map(math.isnan, values.values()))
                continue
            pairs, fixed, trained = [], [], []
            for n in names:
                (_, gain, c), w, d_w = its[n], weights[f"{n}.weight"], gradients[f"{n}.weight"]
                for matrix in w if w.ndim == 3 else [w]:
                    for column, s in zip(matrix.T, c * gain, strict=True):
                        p = s**2 * torch.eye(len(column)).double() + c**2 * torch.outer(column, column)
                        pairs.append(torch.linalg.eigvalsh(p)[[0, -1]].tolist())
                fixed.append(d_w * c * gain)
                trained.append((w * c * gain - stepped[f"{n}.weight"] * c * after[n][1]) / 1e-7)
            low, high = map(sorted, zip(*pairs, strict=True))
            middle = (len(low) - 1) // 2
            wanted = dict(low=low[middle], high=high[middle], condition=high[-1] / low[0])
            wanted |= {"gain": torch.cat([its[n][1] ** 2 for n in names]).mean().item()}
            wanted |= {"fixed": joint(fixed) / joint(by_v[n] for n in names)}
            wanted |= {"trained": joint(trained) / joint(by_v[n] for n in names)}
            assert {key: pytest.approx(wanted[key], rel=1e-5) for key in values} == values, (kind, block)
            assert abs(wanted["trained"] / wanted["fixed"] - 1) > 1e-3  # so that a γ held fixed would show


def test_a_norms_bias_without_one_of_the_matrix_leaves_the_step_open():
    found = scale_vectors.precondition(
        model := build(dict(norm="dyt", dyt_bias=True)), compute_gradients(model, two_batches())
    )
    assert all(map(math.isnan, found["q"]["trained"] + found["w1"]["fixed"])) and min(found["q"]["high"]) > 0


def test_decay_and_length_of_a_run_and_what_does_not_apply():
    """A constant rate of 0.01 after 10 steps of warm-up from 0.001: t = 0.055 + 90 · 0.01."""
    model = build(dict(LLAMA, **UNIFIED))
    changes = dict(decay_gains="input", input_gains="up,final", weight_decay=0.2, schedule="constant", max_iters=100)
    train = vars(filled(**changes, learning_rate=0.01, warmup_iters=10)) | {"of_an_older_version": 1}
    of_gains, time = scale_vectors.decays(model, SimpleNamespace(train_config=train))
    assert of_gains == dict(q=0.2, k=0.2, v=0.2, w1=0.2, o=0.0, w2=0.2) and time == pytest.approx(2 * 0.2 * 0.955)
    assert scale_vectors.decays(model, SimpleNamespace())[0] == {}
    run = SimpleNamespace(train_config=vars(TrainConfig()))
    for flags, words in (
        (NONE, "no scale vector"),
        (dict(gain="none"), "no scale"),
        (dict(sigma_reparam=True), "σRep"),
    ):
        with pytest.raises(NotApplicable, match=words):
            scale_vectors.measure_preconditioner(build(flags), two_batches(), run)


# ------------------------------------------------------------------------------------------------------- the process


def gibbs(mu, noise=1.0):
    """E γ² under exp(−2U/q), on a grid over γ and w."""
    x = torch.linspace(-20, 20, 1001).double()
    gain, w = x[:, None], x[None]
    density = torch.exp(-((gain * w - 1) ** 2 + mu * gain**2 + 0.1 * w**2) / noise)
    return ((gain**2 * density).sum() / density.sum()).item()


def test_with_decay_the_process_ends_in_its_stationary_distribution():
    process = scale_vectors.process(0.1, 0.1, (4000,), seed=1)
    for _ in range(500):  # 2µt = 10
        gain, w = next(process)
    for x in (gain, w):
        mean, error = np.square(x).mean(), np.square(x).std() / 4000**0.5
        assert abs(mean - scale_vectors.stationary(0.1)) < 4 * error
        for wrong in (gibbs(0.2), gibbs(0.05), gibbs(0.1, noise=0.5), scale_vectors.bound(0.1, 50.0)):
            assert abs(mean - wrong) > 4 * error
    for mu in (0.05, 0.1, 0.4):
        assert scale_vectors.stationary(mu) == pytest.approx(gibbs(mu), rel=1e-4)
        assert scale_vectors.stationary(mu) < scale_vectors.bound(mu, 1e9) == pytest.approx(1.5 / (2 * mu))


@pytest.mark.parametrize("mu", (0.0, 0.1))
def test_the_process_moves_as_the_papers_equations_say(mu):
    """d/dt E γ² = −2µ E γ² − 2 E a (a − a⋆) + q (eq. 30), the same for w with λ, and not without one of the terms."""
    dt, process = 0.01, scale_vectors.process(mu, 0.01, (3000,), seed=2)
    start = next(process)
    sums = np.zeros((4, 3000))  # integrals over t of 1, γ², w², a (a − a⋆)
    for _ in range(400):
        end = next(process)
        gain, w = end
        terms = np.stack([np.ones_like(gain), gain**2, w**2, gain * w * (gain * w - 1)])
        sums += dt * terms
    for x, first, decay, squares in zip(end, start, (mu, 0.1), (1, 2), strict=True):
        rest = x**2 - first**2 - sums[0] + 2 * decay * sums[squares] + 2 * sums[3]

        def is_zero(values):
            return abs(values.mean()) < 4 * values.std() / 3000**0.5

        assert is_zero(rest) and not is_zero(rest + sums[0]) and not is_zero(rest - 2 * sums[3])
        assert not decay or not is_zero(rest - 2 * decay * sums[squares])


def test_without_decay_it_grows_on_and_the_figures_lines_say_so():
    free, held = scale_vectors.simulate(0.0), scale_vectors.simulate(0.1)
    quarters = free["mean"][12::12]
    assert quarters == sorted(quarters) and quarters[-1] > 5 * held["limit"] > 5 * 0.9 * held["mean"][-1]
    for found in (free, held):
        assert found["time"][-1] == pytest.approx(10) and len(found["mean"]) == 51
        errors = 4 * np.array(found["std"]) / 32**0.5
        assert (np.array(found["mean"]) < np.array(found["bound"]) + errors + 1e-9).all()
    assert free["limit"] is None and free["bound"][-1] == pytest.approx(1 + 1.5 * 50)
