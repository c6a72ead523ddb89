"""The FFN whose products apply GELU (layers/ffn.py): it is eager code's, and the layouts that take
it."""

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs

from layers import ffn
from support.depth import spread
from support.models import FIXUP, LAYERNORM, LLAMA, S5, batch, build, gradients, tokens
from support.operators import Watch, assert_same_gradients, standing_for

CASES = {  # flags, whether it is taken
    "GPT-2": (dict(norm="layernorm"), True),
    "DNT": (S5, True),
    "LNS": (dict(lns="norm"), True),
    "HG": (dict(gain="branch"), True),
    "σReparam": (dict(sigma_reparam=True), True),
    "SwiGLU": (LLAMA, False),
    "GEGLU": (LLAMA | dict(mlp="geglu"), False),
    "biases": (LAYERNORM, False),
    "Fixup": (FIXUP, False),
    "exact GELU": (dict(mlp="gelu_erf"), False),
    "a gain before the activation": (dict(gain_out="scale"), False),
    "a norm before the activation": (dict(gain_out="norm"), False),
    "rows of 20 bytes": (dict(n_ff=10), False),
    "experts": (dict(n_expert=8), False),
    "one row": ({}, False),
    "float64": ({}, False),
}


@pytest.mark.parametrize("name", spread(CASES, fast=("GPT-2", "DNT", "GEGLU", "float64")))
def test_compiled_code_takes_it_and_is_eager_code(name, monkeypatch):
    """In float64. test_compiled.py has it in bf16. With checkpointing activations are computed
    again."""
    flags, taken = CASES[name]
    monkeypatch.setattr(ffn, "DTYPES", ffn.DTYPES if name == "float64" else (torch.float64,))
    inputs = (tokens(2, 1), tokens(2, 1)) if name == "one row" else batch()
    model = build(flags, 1).train().set_runtime(kernels=("ffn",), compute_dtype=torch.float64)
    with Watch() as eager:
        wanted = gradients(model, *inputs)
    assert not eager.calls["multiply_and_activate"]
    for model.runtime.checkpointing in (False, True):
        traced = AotEagerAndRecordGraphs()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=traced, fullgraph=True, dynamic=False)
        assert_same_gradients(gradients(standing_for(model, compiled), *inputs), wanted, 1e-10)
        graphs = "".join(str(graph.graph) for graph in traced.fw_graphs + traced.bw_graphs)
        calls = [
            graphs.count(f".{operator}.")
            for operator in ("multiply_and_activate", "multiply_and_scale")
        ]
        assert calls == [taken * (1 + model.runtime.checkpointing), taken]


def test_it_has_no_second_derivatives():
    x, up, down = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(ffn.FFN.apply(x, up, down).sum(), x, create_graph=True)
