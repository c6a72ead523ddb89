"""studies/analysis/scale_vectors.py: the preconditioner's eigenvalues as singular values of a
Jacobian, in float64."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from studies.analysis import scale_vectors
from studies.analysis.figure import NotApplicable
from support.analysis import NETS
from support.models import NET, NONE, build, floats, joined

TYPES = dict(q="q", k="k", v="v", o="o", gate="w1", up="w1", down="w2")
QKV = {f"attn.f.{part}": "attn.pre" for part in "qkv"}
UP, GATE = {"mlp.f.up": "mlp.pre"}, {"mlp.f.gate": "mlp.pre"}
STACKS = {
    f"mlp.f.{name}": "mlp.pre"
    for name in ("experts.gate", "experts.up", "shared.gate", "shared.up")
}
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
# flags, and support.reference's
LAYOUTS = joined(" | ".join(name for name in READS if "experts" not in name)) | NETS
SIGMA = dict(sigma_reparam=True)


@pytest.mark.parametrize("name", READS)
def test_eigenvalues_are_those_of_the_equations(name):
    """P = J Jᵀ of one column's J = ∂v/∂(w, γ), by its singular values."""
    flags, words = LAYOUTS[name]
    model, net = build(flags), replace(NET, **dict(words, blocks=2))
    weights = floats(model)
    reads = {
        f"blocks.{i}.{matrix}": f"blocks.{i}.{slot}"
        for i in range(2)
        for matrix, slot in READS[name].items()
    }
    reads = {
        n: slot
        for n, slot in reads.items()
        if {f"{slot}.gain", f"{slot}.direction"} & weights.keys()
    }
    found = scale_vectors.precondition(model)
    assert found.keys() == {TYPES[n.split(".")[-1]] for n in reads}
    for kind, block in product(found, range(2)):
        values = {key: numbers[block] for key, numbers in found[kind].items()}
        names = [
            n for n in reads if n.startswith(f"blocks.{block}.") and TYPES[n.split(".")[-1]] == kind
        ]
        if not names:
            assert all(map(math.isnan, values.values()))
            continue
        eigenvalues, gains = [], []
        for n in names:
            w, gain = weights[f"{n}.weight"], gain_of(weights, reads[n], net)
            if n.endswith(".o"):  # head h reads head h // (heads / kv_heads) of v
                gain = torch.cat(
                    [
                        gain.chunk(net.kv_heads)[h * net.kv_heads // net.heads]
                        for h in range(net.heads)
                    ]
                )
            c = (block + 1) ** -0.5 if net.lns and not reads[n].endswith(".out") else 1.0
            diagonals = torch.diag_embed(c * gain[:, None].expand(-1, w.shape[-2])).expand(
                *w.shape[:-2], -1, -1, -1
            )
            eigenvalues += (
                torch.linalg.svdvals(torch.cat((diagonals, c * w.mT[..., None]), -1))
                .square()
                .flatten(0, -2)
            )
            gains.append(gain.square())
        high, low = torch.stack([e[[0, -1]] for e in eigenvalues]).T
        wanted = dict(low=low.median(), high=high.median(), condition=high.max() / low.min())
        wanted |= dict(gain=torch.cat(gains).mean())
        assert values == {
            key: pytest.approx(value.item(), rel=1e-9) for key, value in wanted.items()
        }, (kind, block)


def gain_of(weights, slot, net):
    """The gain of a slot, as it acts, from the parameters."""
    if f"{slot}.gain" in weights:
        return weights[f"{slot}.gain"]
    size, direction = weights[f"{slot}.magnitude"], weights[f"{slot}.direction"]
    size = size.exp() if net.gain_kind == "expmagdir" else size
    return size * direction / direction.square().mean().sqrt()


@pytest.mark.parametrize(
    "flags, words", ((NONE, "no scale"), (dict(gain="none"), "no scale"), (SIGMA, "σRep"))
)
def test_what_does_not_apply(flags, words):
    with pytest.raises(NotApplicable, match=words):
        scale_vectors.measure_preconditioner(build(flags))
