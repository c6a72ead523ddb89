"""Parts of the model: matrices fused into one product, folded gains, σReparam, compute dtype,
dropout."""

import pytest
import torch

from layers.linear import Lookup, Product, SigmaReparam, fused_linear
from layers.slot import Normalise
from support import reference
from support.models import LLAMA, UNIFIED, batch, build, error, tokens
from support.operators import Watch
from support.tolerances import roundings

FUSED = {
    "shared": dict(),
    "no gains": dict(gain="none"),
    "LNS, bias": dict(bias=True, lns="norm"),
    "HG, ER, LNS": dict(gain="branch", gain_param="expmagdir", lns="norm"),
    "DP": dict(gain_out="scale", bias=True),
    "unified, bias": dict(UNIFIED, bias=True),
    "sigmaReparam": dict(sigma_reparam=True, bias=True, gain="branch"),
    "DyT": dict(norm="dyt"),
    "Fixup": dict(norm="none", fixup=True),
}


@pytest.mark.parametrize("flags", FUSED.values(), ids=FUSED)
def test_one_product_is_the_separate_ones(flags):
    """Also where the gradients of their outputs are not joined, and for one token at a time, where
    the gains multiply the activations instead of the weights."""
    model = build(dict(flags, n_kv_head=2, mlp="swiglu", n_ff=24))  # q, k and v differ in size
    generator = torch.Generator().manual_seed(5)
    for branch, names in (("attn", "q k v"), ("mlp", "gate up")):
        residual = getattr(model.blocks[1], branch)
        matrices = [getattr(residual.f, name) for name in names.split()]
        x = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        parameters = [
            x,
            *{id(p): p for m in (residual.pre, *matrices) for p in m.parameters()}.values(),
        ]
        found = []
        for way in ("separate", "fused", "not joined", "single"):
            u, gain = residual.pre(x), residual.pre.factor_for_weight()
            if way == "separate":
                ys = [m(u, gain) for m in matrices]
                noise = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in ys]
            else:
                parts, joins = u.split(1, 1) if way == "single" else (u,), way != "not joined"
                pieces = [
                    fused_linear(matrices, part, gain, joins_gradients=joins) for part in parts
                ]
                ys = [torch.cat(tokens, 1) for tokens in zip(*pieces, strict=True)]
            total = sum((y * n).sum() for y, n in zip(ys, noise, strict=True))
            found.append([*ys, *torch.autograd.grad(total, parameters)])
        assert len({y.shape for y in found[0][: len(matrices)]}) == 1 + (branch == "attn")
        for ours in found[1:]:
            for t, expected in zip(ours, found[0], strict=True):
                assert expected.count_nonzero()
                torch.testing.assert_close(t, expected, rtol=1e-10, atol=1e-10)


def test_gate_and_up_are_one_product():
    model, idx = build(LLAMA, n_layer=1), tokens(2, 7)
    with Watch() as watch, torch.no_grad():
        model(idx)
    # q, k, v, o, gate up, down, head
    assert watch.calls["mm"] + watch.calls["addmm"] == 7, watch.calls


def test_power_iteration_finds_the_spectral_norm():
    model = build(dict(sigma_reparam=True), 1)
    matrices = [m for m in model.modules() if isinstance(m, SigmaReparam)]
    norms, distances = [torch.linalg.matrix_norm(m.weight, 2) for m in matrices], []
    for _ in range(100):
        model.power_iteration()
        assert all(abs(t.norm() - 1) < 1e-12 for m in matrices for t in (m.u, m.v))
        distances.append(
            max(
                (1 - m.u @ m.weight @ m.v / norm).item()
                for m, norm in zip(matrices, norms, strict=True)
            )
        )
    assert distances[0] > 1e-3 and -1e-12 < distances[-1] < 1e-3 and len(matrices) == 6
    assert all(b <= a + 1e-12 for a, b in zip(distances, distances[1:], strict=False))


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize(
    "site", ("embedding", "attention weights", "attention branch", "ffn branch")
)
def test_each_dropout_site_acts_alone(site):
    model, idx = build(dict(dropout=0.5), n_layer=1).train(), batch()[0]
    block, undropped = model.blocks[0], build(dict(), n_layer=1)(idx)[0]
    modules = {"embedding": model, "attention branch": block.attn, "ffn branch": block.mlp}
    for name, module in modules.items():
        module.dropout.p = 0.5 if name == site else 0.0
    block.attn.f.dropout = 0.5 if site == "attention weights" else 0.0
    torch.manual_seed(0)
    assert error(model(idx)[0], undropped) > 1e-2
    assert torch.equal(model.eval()(idx)[0], undropped)
    model.train()
    # with every site off no dropout is left, so there are only these four
    for module in modules.values():
        module.dropout.p = 0.0
    block.attn.f.dropout = 0.0
    assert torch.equal(model(idx)[0], undropped)


@pytest.mark.parametrize("centre", (False, True))
def test_the_gradient_of_a_norm(centre):
    """Its backward pass is written by hand, from its output: against finite differences. No second
    derivative."""
    x = torch.randn(
        3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )

    def norm(x):
        return Normalise.apply(x, 1e-2, centre, torch.float64)

    expected = reference.standardise(x, 1e-2) if centre else reference.rms(x, 1e-2)
    assert error(norm(x), expected) < 1e-12
    assert torch.autograd.gradcheck(norm, x)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.gradgradcheck(norm, x)


@pytest.mark.parametrize("sizes", ([24], [12, 8, 4]), ids=str)
def test_a_product_whose_weight_gradient_is_not_rounded(sizes, monkeypatch):
    """What compiled code on CUDA runs, with its one operator that a CPU lacks written out. With a
    bf16 weight, and a bias, their gradients are rounded once."""
    multiply = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda a, b, out_dtype=torch.bfloat16: multiply(a.to(out_dtype), b.to(out_dtype)),
    )
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 7, n, generator=generator).bfloat16() for n in (16, 24))
    x, rows = x.requires_grad_(), x.double().flatten(0, 1)
    for dtype, bias in (
        (torch.float32, None),
        (torch.bfloat16, torch.zeros(24).bfloat16().requires_grad_()),
    ):
        weight = torch.randn(24, 16, generator=generator).to(dtype).requires_grad_()
        ys = Product.apply(x, weight, bias, sizes)
        assert [y.shape for y in ys] == [(2, 7, n) for n in sizes]
        leaves = [t for t in (x, weight, bias) if t is not None]
        dx, dw, *db = torch.autograd.grad(ys, leaves, dy.split(sizes, -1))
        assert (ys[0].dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, dtype)
        exact, dy64 = weight.detach().bfloat16().double(), dy.double()
        assert error(torch.cat(ys, -1), x.double() @ exact.T) < roundings(1, torch.bfloat16)
        # the sum so far is rounded each time
        assert error(dx, dy64 @ exact) < roundings(len(sizes), torch.bfloat16)
        # bf16 would be 1e-3 off
        rounded_once = roundings(8) if dtype == torch.float32 else roundings(1, dtype)
        assert error(dw, dy64.flatten(0, 1).T @ rows) < rounded_once
        assert all(error(d, dy64.sum((0, 1))) < roundings(1, torch.bfloat16) for d in db)


def test_a_table_looked_up_and_multiplied_by_has_one_gradient():
    """By finite differences; a token that occurs twice counts twice, and either use may be
    missing."""
    table = torch.randn(
        5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    idx = torch.tensor([[0, 3, 3], [4, 0, 3]])
    for use in (
        lambda rows, head: (rows @ head.T).tanh(),
        lambda rows, head: rows.exp(),
        lambda rows, head: head**2,
    ):
        assert torch.autograd.gradcheck(lambda t, use=use: use(*Lookup.apply(t, idx)), table)
