"""studies/analysis/conditioning.py against its definitions: matrices built here, the reference, in float64."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from studies.analysis import conditioning, streams
from studies.analysis.figure import BRANCHES
from support import reference
from support.analysis import NETS, batches_of, close, two_batches
from support.models import FIXUP, LLAMA, NET, POST, S5, SCHEMES, build, floats, tokens

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
        for n in [n.removesuffix(".u") for n in of if n.endswith(".u")]:
            of[f"{n}.weight"] = of[f"{n}.sigma"] * (w := of[f"{n}.weight"]) / (of[f"{n}.u"] @ w @ of[f"{n}.v"])
    for part in conditioning.WEIGHTS[:-1]:
        its = [w for n, w in of.items() if n.endswith(f".{part}.weight")]
        its = [m for w in its for m in (w if w.ndim == 3 else [w])]
        assert (part in found) == bool(its)
        assert not its or close(ours(found[part]), statistics(*its), 1e-9), part
    c, joint = model.config, []
    for head in range(c.n_head):
        q, k = (of[f"attn.f.{part}.weight"].split(c.head_dim) for part in "qk")
        joint.append(q[head].T @ k[head // (len(q) // len(k))])
    assert joint[0].shape == (16, 16)
    assert close(ours(found["WqᵀWk"]), statistics(*joint, rank=min(16, c.head_dim)), 1e-6)


def branch(w, x, eps=1e-2):
    """A sub-layer's branch (T, C) as it is added, in torch's own words: x (T, C), w its weights by name."""

    def norm(name, y):
        return F.rms_norm(y, y.shape[-1:], w[f"{name}.gain"], eps) if f"{name}.gain" in w else y

    u = norm("pre", x)
    if "f.up.weight" in w:
        y = F.gelu(u @ w["f.up.weight"].T, approximate="tanh") @ w["f.down.weight"].T
    else:
        q, k, v = ((u @ w[f"f.{part}.weight"].T).view(len(x), -1, 4).transpose(0, 1) for part in "qkv")
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (norm("f.k_norm", k), v))
        logits = (norm("f.q_norm", q) @ k.mT / 2).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        y = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["f.o.weight"].T
    return norm("mid", y)


def parts_of(model, block):
    """{branch: its weights by name} of a block, and as "" those of the model."""
    of = {name: t.detach().clone() for name, t in model.named_parameters()}
    found = {b: {n.split(f"{b}.", 1)[1]: t for n, t in of.items() if f"blocks.{block}.{b}." in n} for b in BRANCHES}
    return found | {"": of}


def test_conditioning_is_that_of_a_block_written_again():
    """With GQA, QK-norm and gains: Jacobians of one token by jacrev, WqᵀWk (C, C) of each head, in other norms than
    singular values: ‖J‖₂ ‖J⁺‖₂ and ‖J‖²/‖J‖₂²."""

    def numbers(m, rtol):
        two = torch.linalg.matrix_norm(m, 2)
        inverse = torch.linalg.matrix_norm(torch.linalg.pinv(m, rtol=rtol), 2)
        return [two.item(), (two * inverse).item(), (m.square().sum() / two**2).item()]

    model, idx, wanted = build(dict(S5, n_kv_head=2)), tokens(2, 6), {}
    for row, t in enumerate((5, 2)):
        x, its = streams.collect_streams(model, [(idx[row : row + 1], None)]), parts_of(model, 1)
        x = next(x)[1][0]
        for kind, label in BRANCHES.items():

            def one(v, x=x, t=t, w=its[kind]):
                return branch(w, torch.cat((x[:t], v[None], x[t + 1 :])))[t]

            j = jacrev(one)(x[t])
            wanted.setdefault(label, []).append(numbers(j, 1e-5))
            wanted.setdefault(f"{label} + residual", []).append(numbers(j + torch.eye(16), 1e-5))
            x = x + branch(its[kind], x)
    found = conditioning.jacobian_spectra(model, batches_of(idx), [5, 2], GENERATOR)
    for label, values in wanted.items():
        assert close(torch.tensor(ours(found[label][1])).log(), torch.tensor(values).mean(0).log(), 1e-6), label
    w = parts_of(model, 1)["attn"]
    q, k = (w[f"f.{part}.weight"].view(-1, 4, 16) for part in "qk")
    heads = torch.tensor([numbers(q[h].T @ k[h // 2], 1e-9) for h in range(4)], dtype=torch.float64)
    worst = torch.stack((*heads.amax(0)[:2], heads.amin(0)[2]))
    assert close(ours(conditioning.weight_spectra(model.blocks[1])["WqᵀWk"]), worst, 1e-9)


def test_a_singular_matrix_has_the_condition_of_what_is_not_0():
    found = conditioning.spectrum(torch.diag(torch.tensor([4.0, 2.0, 1e-9, 0.0])))
    assert conditioning.spectrum(torch.diag(torch.tensor([1.0, 1e-6])))["condition"] == pytest.approx(1e6)
    assert found == pytest.approx(dict(largest=4, condition=2, stable_rank=1.25, error=0))
    assert math.isnan(conditioning.spectrum(torch.zeros(3, 2))["condition"])


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


WRONG = [("S5", "BEHIND", "rmsnorm", 1), ("S1", "POWER", "v", 0), ("S1", "POWER", "up relu", 2)]


@pytest.mark.parametrize("name, table, key, value", WRONG)
def test_a_wrong_theory_is_found(monkeypatch, name, table, key, value):
    monkeypatch.setitem(getattr(conditioning, table), key, value)
    assert largest_miss(measure(LAWS[name][0])) > 0.4


@pytest.mark.parametrize("flags", [dict(), S5], ids=("Pre-LN", "S5"))
def test_ratios_are_those_of_whole_jacobians(flags):
    """All that is measured of q, v, up and down, also where there is no power law, by jacrev of one block written
    again, with GQA: ‖Jᵀ∂L/∂y‖ with the Jacobian of all tokens. The mean of two parts, one with ignored targets."""
    model = build(dict(flags, n_kv_head=2, tie_weights=False), 1)
    batches = [(tokens(1, 5, seed=3), tokens(1, 5, seed=4)), (tokens(1, 4, seed=5), torch.tensor([[7, -1, 9, -1]]))]
    types, whole = conditioning.measure_propositions(model, batches, RUN)["types"], parts_of(model, 0)[""]

    def loss(after, targets):
        logits = F.rms_norm(after, (16,), whole["final_norm.gain"], 1e-2) @ whole["head.weight"][:50].T
        return F.cross_entropy(logits, targets, ignore_index=-1)

    def numbers(kind, part, c, idx, targets, given):
        its = parts_of(model, 0)
        its[kind][name := f"f.{part}.weight"] *= c
        x = whole["wte.weight"][idx] + whole["wpe.weight"][: len(idx)]
        x = F.rms_norm(x, (16,), whole["input_norm.gain"], 1e-2) if "input_norm.gain" in whole else x
        x = x if kind == "attn" else x + branch(its["attn"], x)
        rest = (lambda z: z + branch(its["mlp"], z)) if kind == "attn" else (lambda z: z)
        y, behind = branch(its[kind], x), jacrev(lambda y: loss(rest(x + y), targets))(branch(its[kind], x))
        by_x, by_w = jacrev(lambda x, w: branch(its[kind] | {name: w}, x), (0, 1))(x, its[kind][name])
        back = [torch.tensordot(g, j, 2) for g, j in ((given, by_x), (given, by_w), (behind, by_w)) if g is not None]
        return behind, [t.norm().item() for t in (y, *back)]

    for kind, part in (("attn", "q"), ("attn", "v"), ("mlp", "up"), ("mlp", "down")):
        for c in (2, 0.5):
            wanted = []
            for idx, targets in batches:
                given, _ = numbers(kind, part, 1, idx[0], targets[0], None)
                (_, one), (_, its) = (numbers(kind, part, by, idx[0], targets[0], given) for by in (1, c))
                wanted.append([a / b for a, b in zip(its, one, strict=True)])
            row = types[f"{part} × {c:g}, Prop. {5 if part == 'q' else 3}"]
            found = [row[name] for name in ("output", "jacobian", "gradient", "loss_gradient")]
            assert close(found, torch.tensor(wanted).mean(0), 1e-6), (part, c)


def test_the_embedding_reaches_all_gradients_of_the_block():
    """DNT Prop. 1, by the equations: tokens and positions are scaled; with an untied head, which sees it through the
    stream alone."""
    model, net = build(dict(tie_weights=False), 1), replace(NET, blocks=1, tied=False)
    (idx, targets), _ = two_batches()
    types, norms = conditioning.measure_propositions(model, [(idx, targets)], RUN)["types"], []
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
    ((weights, *_), (*_, ranks), (jacobians, *_), _) = conditioning.draw_conditioning([dict(found, step=1)])
    assert ranks.lines[3][0][1] == [found["types"]["o"]["stable_rank"]]
    assert [how["label"] for _, how in weights.lines] == ["q", "k", "v", "o", "up", "down", "WqᵀWk"]
    assert jacobians.lines[0][0][1] == [its["largest"] for its in found["blocks"]["attention"]]
