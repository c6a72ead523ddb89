"""studies/analysis/conditioning.py against its definitions: matrices built here, the reference, in
float64."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from studies.analysis import conditioning, streams
from studies.analysis.figure import BRANCHES
from support.analysis import NETS, batches_of, close
from support.models import S5, SCHEMES, build, floats, tokens

RUN = SimpleNamespace(generator=torch.Generator)


def statistics(*matrices, rank=None):
    """The worst of several matrices, in the order largest, condition, stable_rank."""
    spectra = [
        torch.linalg.svdvals(m)[: rank or torch.linalg.matrix_rank(m, rtol=1e-5)] for m in matrices
    ]
    norms = [(s.square().sum() / s[0] ** 2).item() for s in spectra]
    return [
        max(s[0].item() for s in spectra),
        max((s[0] / s[-1]).item() for s in spectra),
        min(norms),
    ]


def ours(found):
    return [found[name] for name in conditioning.TITLES]


@pytest.mark.parametrize("name", [*NETS, "sigmaReparam", "head size"])
def test_weights_are_those_of_the_matrices(name):
    """Without gains: HG's and the norms' are other than 1 here. A q head goes with the key head
    that it reads."""
    flags = dict(n_kv_head=2, head_size=20) if name == "head size" else (NETS | SCHEMES)[name][0]
    model = build(flags)
    found, weights = conditioning.weight_spectra(model.blocks[1]), floats(model)
    of = {n.removeprefix("blocks.1."): w for n, w in weights.items() if n.startswith("blocks.1.")}
    if name == "sigmaReparam":
        for n in [n.removesuffix(".u") for n in of if n.endswith(".u")]:
            of[f"{n}.weight"] = (
                of[f"{n}.sigma"] * (w := of[f"{n}.weight"]) / (of[f"{n}.u"] @ w @ of[f"{n}.v"])
            )
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


def branch(w, x):
    """A sub-layer's branch (T, C) as it is added, in torch's own words: x (T, C), w its weights by
    name."""

    def norm(name, y):
        return F.rms_norm(y, y.shape[-1:], w[f"{name}.gain"], 1e-2) if f"{name}.gain" in w else y

    u = norm("pre", x)
    if "f.up.weight" in w:
        y = F.gelu(u @ w["f.up.weight"].T, approximate="tanh") @ w["f.down.weight"].T
    else:
        q, k, v = (
            (u @ w[f"f.{part}.weight"].T).view(len(x), -1, 4).transpose(0, 1) for part in "qkv"
        )
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (norm("f.k_norm", k), v))
        logits = (norm("f.q_norm", q) @ k.mT / 2).masked_fill(
            torch.ones(len(x), len(x)).triu(1).bool(), -math.inf
        )
        y = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["f.o.weight"].T
    return norm("mid", y)


def parts_of(model, block):
    """{branch: its weights by name} of a block."""
    return {branch: floats(getattr(model.blocks[block], branch)) for branch in BRANCHES}


def test_conditioning_is_that_of_a_block_written_again():
    """With GQA, QK-norm and gains: Jacobians of one token by jacrev, in other norms than singular
    values: ‖J‖₂ ‖J⁺‖₂ and ‖J‖²/‖J‖₂²."""

    def numbers(m):
        two = torch.linalg.matrix_norm(m, 2)
        inverse = torch.linalg.matrix_norm(torch.linalg.pinv(m, rtol=1e-5), 2)
        return [two.item(), (two * inverse).item(), (m.square().sum() / two**2).item()]

    model, idx, wanted = build(dict(S5, n_kv_head=2)), tokens(2, 6), {}
    for row, t in enumerate((5, 2)):
        x, its = streams.collect_streams(model, [(idx[row : row + 1], None)]), parts_of(model, 1)
        x = next(x)[1][0]
        for kind, label in BRANCHES.items():

            def one(v, x=x, t=t, w=its[kind]):
                return branch(w, torch.cat((x[:t], v[None], x[t + 1 :])))[t]

            j = jacrev(one)(x[t])
            wanted.setdefault(label, []).append(numbers(j))
            wanted.setdefault(f"{label} + residual", []).append(numbers(j + torch.eye(16)))
            x = x + branch(its[kind], x)
    found = conditioning.jacobian_spectra(model, batches_of(idx), [5, 2])
    for label, values in wanted.items():
        assert close(
            torch.tensor(ours(found[label][1])).log(), torch.tensor(values).mean(0).log(), 1e-6
        ), label


def test_a_singular_matrix_has_the_condition_of_what_is_not_0():
    found = conditioning.spectrum(torch.diag(torch.tensor([4.0, 2.0, 1e-9, 0.0])))
    assert conditioning.spectrum(torch.diag(torch.tensor([1.0, 1e-6])))[
        "condition"
    ] == pytest.approx(1e6)
    assert found == pytest.approx(dict(largest=4, condition=2, stable_rank=1.25))
    assert math.isnan(conditioning.spectrum(torch.zeros(3, 2))["condition"])


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
