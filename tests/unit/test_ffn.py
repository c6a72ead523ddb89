"""The FFN whose products apply the activation (layers/ffn.py): its gradients, and the layouts that take it."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import AotEagerAndRecordGraphs

from layers import ffn
from support.depth import spread
from support.models import FIXUP, LAYERNORM, LLAMA, S5, batch, build, error, gradients, tokens
from support.operators import Watch, standing_for
from support.tolerances import as_near, shaken

HALF = torch.bfloat16
FIT = {
    "GPT-2": dict(norm="layernorm"),
    "DNT": S5,
    "LNS": dict(lns="norm"),
    "HG": dict(gain="branch"),
    "σReparam": dict(sigma_reparam=True),
}
OTHERS = {
    "SwiGLU": LLAMA,
    "biases": LAYERNORM,
    "Fixup": FIXUP,
    "exact GELU": dict(mlp="gelu_erf"),
    "a gain before the activation": dict(gain_out="scale"),
    "a norm before the activation": dict(gain_out="norm"),
    "rows of 20 bytes": dict(n_ff=10),
    "experts": dict(n_expert=4),
    "fp32": {},
    "one row": {},
}


def compiled_gradients(model, dtype, checkpointing=False, inputs=None) -> tuple:
    """Gradients of compiled code that may take the operators, and how often it calls each of the two."""
    traced = AotEagerAndRecordGraphs()
    torch._dynamo.reset()
    model.set_runtime(compute_dtype=dtype, kernels=("ffn",), checkpointing=checkpointing)
    compiled = torch.compile(model, backend=traced, fullgraph=True, dynamic=False)
    found = gradients(standing_for(model, compiled), *(inputs or batch()))[1]
    graphs = "".join(str(graph.graph) for graph in traced.fw_graphs + traced.bw_graphs)
    return found, [graphs.count(f".{name}.") for name in ("multiply_and_activate", "multiply_and_scale")]


def test_output_and_gradients_are_those_of_plain_code():
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 16), (24, 16), (16, 24), (5, 16)
    *inputs, grad = (torch.randn(s, generator=generator).double().requires_grad_() for s in shapes)
    x, up, down = inputs
    found, wanted = ffn.FFN.apply(*inputs), F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)
    results = [(y, *torch.autograd.grad(y, inputs, grad)) for y in (found, wanted)]
    assert all(error(*pair) < 1e-12 for pair in zip(*results, strict=True))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(ffn.FFN.apply(*inputs), x, grad, create_graph=True)


@pytest.mark.parametrize("name", spread(FIT, fast=("GPT-2", "DNT")))
def test_a_model_is_as_exact_as_its_dtype(name, monkeypatch):
    """Recomputed activations change no bit."""
    monkeypatch.setattr(ffn, "DTYPES", (torch.float32, HALF))
    L = 2 if name == "LNS" else 1
    exact = build(FIT[name], L).train()
    model = build(FIT[name], L, torch.float32).train()
    wanted = gradients(exact, *batch())[1]
    for dtype in ffn.DTYPES:
        found, calls = compiled_gradients(model, dtype)
        assert calls == [L, L]
        assert as_near(found, gradients(shaken(exact, dtype), *batch())[1], wanted, times=2)
    again, calls = compiled_gradients(model, dtype, checkpointing=True)
    assert calls == [2 * L, L] and all(torch.equal(again[key], found[key]) for key in found)


@pytest.mark.parametrize("name", spread(OTHERS, fast=("biases", "SwiGLU", "one row")))
def test_others_compute_as_before(name):
    """And so does eager code."""
    dtype = torch.float32 if name == "fp32" else HALF
    inputs = (tokens(2, 1), tokens(2, 1)) if name == "one row" else batch()
    model = build(OTHERS[name], 1, torch.float32).train()
    assert compiled_gradients(model, dtype, inputs=inputs)[1] == [0, 0]
    with Watch() as watch:
        gradients(model, *batch())
    assert not watch.calls["multiply_and_activate"]
