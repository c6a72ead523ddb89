"""studies/analysis/conditioning.py against its definitions: matrices built here, the reference, in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from studies.analysis import conditioning
from support import reference
from support.analysis import NETS, batches_of, close, two_batches
from support.models import FIXUP, LLAMA, LLAMA_NET, NET, POST, S5, SCHEMES, build, floats, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
GENERATOR = torch.Generator().manual_seed(0)
RUN = SimpleNamespace(generator=lambda *_: GENERATOR)


def statistics(*matrices, rank=None):
    """The worst of several matrices, in the order largest, condition, stable_rank."""
    spectra = [torch.linalg.svdvals(m)[: rank or torch.linalg.matrix_rank(m, rtol=1e-5)] for m in matrices]
    norms = [(s.square().sum() / s[0] ** 2).item() for s in spectra]
    return [max(s[0].item() for s in spectra), max((s[0] / s[-1]).item() for s in spectra), min(norms)]


def ours(found):
    return [found[name] for name in conditioning.TITLES]


@pytest.mark.parametrize("name", [*NETS, "sigmaReparam", "head size"])
def test_weights_are_those_of_the_matrices(name):
    """Without gains: HG's and the norms' are other than 1 here. A q head goes with the key head that it reads."""
    flags = dict(n_kv_head=2, head_size=20) if name == "head size" else (NETS | SCHEMES)[name][0]
    model = build(flags)
    found, weights = conditioning.weight_spectra(model.blocks[1]), floats(model)
    of = {n.removeprefix("blocks.1."): w for n, w in weights.items() if n.startswith("blocks.1.")}
    if name == "sigmaReparam":
        parts = [n.removesuffix(".u") for n in of if n.endswith(".u")]
        of |= {
            f"{n}.weight": of[f"{n}.sigma"] * w / (of[f"{n}.u"] @ w @ of[f"{n}.v"])
            for n in parts
            for w in [of[f"{n}.weight"]]
        }
    for part in conditioning.KINDS[:-1]:
        its = [w for n, w in of.items() if n.endswith(f".{part}.weight")]
        its = [m for w in its for m in (w if w.ndim == 3 else [w])]
        assert (part in found) == bool(its)
        assert not its or close(ours(found[part]), statistics(*its), 1e-9), part
    c, joint = model.config, []
    for head in range(c.n_head):
        q, k = (of[f"attn.f.{part}.weight"].split(c.head_dim) for part in "qk")
        joint.append(q[head].T @ k[head // (len(q) // len(k))])
    assert joint[0].shape == (16, 16) and close(
        ours(found["WqᵀWk"]), statistics(*joint, rank=min(16, c.head_dim)), 1e-6
    )


JACOBIANS = {
    "Pre-LN": NETS["Pre-LN"],
    "Post-LN": NETS["Post-LN"],
    "mid, QK, llama, HG": (
        dict(LLAMA, qk_norm=True, mid_norm="both", gain="branch"),
        dict(LLAMA_NET, attn="pre mid", mlp="pre mid", qk_norm=True, gains="branch"),
    ),
    "DyT, LNS": (dict(norm="dyt", lns="branch"), dict(kind="dyt", lns="branch")),
}


@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_are_those_of_the_equations(name):
    """Of two tokens, by autograd through the equations. With e the embedding of a token, which no other token has:
    ∂y/∂e = J ∂x/∂e, and x is e before the first block."""
    flags, words = JACOBIANS[name]
    model, net, idx, positions = (
        build(flags),
        replace(NET, blocks=2, **words),
        torch.tensor([[3, 9, 4, 7, 1]] * 2),
        [3, 1],
    )
    weights, wanted = floats(model), {}
    for row, t in enumerate(positions):

        def terms(e, row=row, t=t):
            table, seen = weights["wte.weight"].index_put((idx[row, t],), e), []
            reference.forward(net, weights | {"wte.weight": table}, idx[row : row + 1], seen=seen)
            return *(part[0, t] for pair in seen[:2] for part in pair), seen[2][0][0, t]

        e = weights["wte.weight"][idx[row, t]]
        _, attn, between, mlp, after = torch.autograd.functional.jacobian(terms, e, vectorize=True)
        back = torch.linalg.inv(between)
        its = {"attention": attn, "attention + residual": between, "FFN": mlp @ back, "FFN + residual": after @ back}
        for kind, j in its.items():
            wanted.setdefault(kind, []).append(statistics(j))
    for rows in (2, 1):
        found = conditioning.jacobian_spectra(model, batches_of(idx, rows), positions, GENERATOR)
        assert found.keys() == wanted.keys() and all(len(its) == 2 for its in found.values())
        for kind, its in wanted.items():
            assert close(torch.tensor(ours(found[kind][0])).log(), torch.tensor(its).mean(0).log(), 1e-5), kind


def test_a_singular_matrix_has_the_condition_of_what_is_not_0():
    found = conditioning.spectrum_statistics(torch.tensor([4.0, 2.0, 1e-9, 0.0]))
    assert conditioning.spectrum_statistics(torch.tensor([1.0, 1e-6]))["condition"] == pytest.approx(1e6)
    assert found == dict(largest=4, condition=2, stable_rank=1.25, error=0)
    assert math.isnan(conditioning.spectrum_statistics(torch.zeros(3))["condition"])


def test_the_estimate_is_as_near_as_it_says(monkeypatch):
    """On Jacobians that are wider than its space of 48 directions; and one with too little work says so."""
    model = build(dict(S5, pos="rope", n_embd=96), dtype=torch.float64)
    batches = batches_of(tokens(1, 7))
    exact, found = (conditioning.jacobian_spectra(model, batches, [5], GENERATOR, limit) for limit in (96, 95))
    for kind, blocks in exact.items():
        for j, guess in zip(blocks, found[kind], strict=True):
            below = 1 - guess["largest"] / j["largest"]
            assert -1e-9 < below < min(1e-3, guess["error"]) and guess["error"] < 0.1 and j["error"] == 0, kind
            assert 0.6 < guess["stable_rank"] / j["stable_rank"] < 1.6 and math.isnan(guess["condition"])
    monkeypatch.setattr(conditioning, "PASSES", 1)
    poor = conditioning.jacobian_spectra(model, batches, [5], GENERATOR, 0)["FFN + residual"][1]
    assert poor["error"] > 0.1 and poor["largest"] < 0.99 * exact["FFN + residual"][1]["largest"]


# name: (flags, p of c^p for emb, q and k, v, o, gate, up, down, by the papers' equations; None: no power of c)
LAWS = {
    "S1": (dict(mlp="relu"), (1, None, 1, 1, None, 1, 1)),
    "S1, GELU": (dict(), (1, None, 1, 1, None, None, 1)),
    "S5": (dict(S5, mlp="relu"), (0, 0, 0, 0, None, 0, 0)),
    "S5, llama": (dict(S5, **LLAMA), (0, 0, 0, 0, None, 0, 0)),
    "Post-LN": (dict(POST, mlp="relu2"), (1, None, 1, 1, None, 2, 1)),
    "LNS": (dict(lns="norm", mlp="relu", n_expert=3), (1, None, 1, 1, None, 1, 1)),
    "DyT": (dict(norm="dyt", qk_norm=True, mlp="relu"), (1, 0, 1, 1, None, 1, 1)),
    "DyT, S5": (dict(S5, norm="dyt", mlp="relu"), (None, 0, None, None, None, None, None)),
    "biases": (dict(norm="layernorm", bias=True, mlp="relu"), (1, None, None, 1, None, None, 1)),
    "DNP": (dict(gain_out="norm", mlp="swiglu"), (1, 0, 0, 1, 0, 0, 1)),
    "sigmaReparam": (dict(sigma_reparam=True, bias=True), (1, 0, 0, 0, None, 0, 0)),
    "Fixup": (FIXUP, (1, None, None, None, None, None, None)),
}


def measure(flags, n_layer=1):
    return conditioning.measure_propositions(build(dict(flags, norm_eps=1e-12), n_layer), two_batches(), RUN)["types"]


def largest_miss(types):
    """The largest distance of a ratio from its theory, where there is one."""
    pairs = (("output", "theory"), ("jacobian", "theory"), ("gradient", "gradient_theory"))
    misses = [abs(its[a] - its[b]) for its in types.values() for a, b in pairs]
    return max(miss for miss in misses if not math.isnan(miss))


@pytest.mark.parametrize("name", LAWS)
def test_ratios_are_what_theory_says(name):
    flags, (emb, qk, v, o, gate, up, down) = LAWS[name]
    types, laws = measure(flags), dict(emb=emb, q=qk, k=qk, v=v, o=o, gate=gate, up=up, down=down)
    assert largest_miss(types) < 1e-6
    assert len(types) == (16 if flags.get("mlp") == "swiglu" else 14)
    for row, its in types.items():
        (part, c), p = row.split(",")[0].split(" × "), laws[row.split()[0]]
        assert f"Prop. {dict(emb=1, q=5, k=5).get(part, 3)}" in row
        wanted = (math.nan, math.nan) if p is None else (float(c) ** p, float(c) ** (p - 1))
        assert (its["theory"], its["gradient_theory"]) == pytest.approx(wanted, nan_ok=True), row
        assert math.isnan(its["jacobian"]) == (part == "emb")
        if p == 0 and part != "emb":  # nothing changes, so the loss has the same gradient
            assert its["loss_gradient"] == pytest.approx(1 / float(c), rel=1e-6), row
        if p is None and name == "S1, GELU":
            assert abs(its["output"] - float(c)) > 0.01 and abs(its["output"] - 1) > 0.01, row


def test_mix_ln_has_the_law_of_each_block():
    types = measure(dict(mid_norm="both", post_norm_blocks=1, mlp="relu"), 2)
    assert types["o × 2, Prop. 3"]["theory"] == 1.5 and largest_miss(types) < 1e-6


WRONG = [("S5", "BEHIND", "rmsnorm", 1), ("S1", "POWER", "v", 0), ("S1", "POWER_UP", "relu", 2)]


@pytest.mark.parametrize("name, table, key, value", WRONG)
def test_a_wrong_theory_is_found(monkeypatch, name, table, key, value):
    monkeypatch.setitem(getattr(conditioning, table), key, value)
    assert largest_miss(measure(LAWS[name][0])) > 0.4


def test_ratios_are_those_of_the_equations():
    """One block with GELU, GQA and an untied head, in two batches with ignored targets; for the reference in one."""
    flags, words = dict(n_kv_head=2, tie_weights=False), dict(kv_heads=2, tied=False)
    model, net, batches = build(flags, 1), replace(NET, blocks=1, **words), two_batches()
    types = conditioning.measure_propositions(model, batches, RUN)["types"]
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for index, branch, part in ((0, "attn", "q"), (0, "attn", "v"), (1, "mlp", "up"), (1, "mlp", "down")):
        name, found, given = f"blocks.0.{branch}.f.{part}.weight", [], None
        for c in (1, 2, 0.5):
            weights, seen = floats(model), []
            w = weights[name] = (c * weights[name]).requires_grad_()
            loss, y = reference.forward(net, weights, idx, targets, seen)[1], seen[index][1]
            upstream, full = torch.autograd.grad(loss, (y, w), retain_graph=True)
            given = upstream if given is None else given
            found.append([t.norm().item() for t in (y, torch.autograd.grad(y, w, given)[0], full)])
        for c, its in ((2, found[1]), (0.5, found[2])):
            ratios = types[f"{part} × {c:g}, Prop. {5 if part == 'q' else 3}"]
            wanted = [a / b for a, b in zip(its, found[0], strict=True)]
            assert close([ratios[key] for key in ("output", "gradient", "loss_gradient")], wanted, 1e-9), (part, c)


def test_the_embedding_reaches_all_gradients_of_the_block():
    """DNT Prop. 1, by the equations: tokens and positions are scaled; with an untied head, which sees it through the
    stream alone."""
    model, net, batches = build(dict(tie_weights=False), 1), replace(NET, blocks=1, tied=False), two_batches()
    types = conditioning.measure_propositions(model, batches, RUN)["types"]
    idx, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    norms = []
    for c in (1, 2, 0.5):
        weights = {name: w * c if name in ("wte.weight", "wpe.weight") else w for name, w in floats(model).items()}
        inside = [w.requires_grad_() for name, w in weights.items() if name.startswith("blocks.")]
        its = torch.autograd.grad(reference.forward(net, weights, idx, targets)[1], inside)
        norms.append(torch.cat([g.flatten() for g in its]).norm().item())
    found = [types[f"emb × {c:g}, Prop. 1"]["loss_gradient"] for c in (2, 0.5)]
    assert close(found, [norms[1] / norms[0], norms[2] / norms[0]], 1e-9) and found[0] < 0.9


def test_blocks_are_in_their_order():
    class Parts(list):
        length, starts = 7, range(3)

    model = build(dict(), 3)
    found = conditioning.measure_conditioning(model, Parts(batches_of(tokens(3, 7))), RUN)
    assert len(found["positions"]) == 3
    for kind in ("o", "WqᵀWk"):
        its = [conditioning.weight_spectra(block)[kind] for block in model.blocks]
        assert found["blocks"][kind] == its and its[0] != its[2]
        assert found["types"][kind]["stable_rank"] == min(one["stable_rank"] for one in its)
    ((weights, *_), (jacobians, *_)) = conditioning.draw_conditioning([dict(found, step=1)])
    assert [how["label"] for _, how in weights.lines] == ["q", "k", "v", "o", "up", "down", "WqᵀWk"]
    assert jacobians.lines[0][0][1] == [its["largest"] for its in found["blocks"]["attention"]]


def test_nothing_is_left_behind():
    """No weight is another one afterwards, also where the forward fails."""
    model, batches = build(dict(S5, n_expert=3), 1, torch.float32), two_batches()
    before, parameters = {n: t.clone() for n, t in model.state_dict().items()}, list(model.blocks[0].parameters())
    conditioning.measure_propositions(model, batches, RUN)
    conditioning.jacobian_spectra(model, batches[1:], [2], GENERATOR, 0)
    with pytest.raises(KeyError), conditioning.multiplied(parameters, 3.0):
        assert torch.equal(
            parameters[0], 3 * before["blocks.0." + next(iter(dict(model.blocks[0].named_parameters())))]
        )
        raise KeyError
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
