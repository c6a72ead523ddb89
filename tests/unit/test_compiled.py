"""torch.compile: one graph without a break, the same loss and gradients as without it."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils.checkpoint import checkpoint

from layers import ops
from layers.ops import gelu, namespace_of, tanh
from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.run.compilation import compile_parts
from nanodnt.run.parallel import block_matrices
from nanodnt.settings import TrainConfig
from support.depth import spread
from support.models import (
    FIXUP,
    LLAMA,
    MANY_GAINS,
    NONE,
    PARTS,
    QK_FULL,
    S4,
    S5,
    SIZE,
    UNIFIED,
    batch,
    build,
    gradients,
)
from support.operators import (
    IGNORED,
    Watch,
    assert_same_gradients,
    batch_ignoring,
    compiled_and_kept,
    fresh_compiler,
    standing_for,
)
from support.tolerances import as_near, roundings


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.deep)))
@fresh_compiler()
def test_compiled_activations_are_the_same_functions(backend):
    """Against float64, in value and gradient, relative to the larger of 1 and the value.

    Compiled tanh is a difference of two numbers near 1, each off by up to three roundings: so is
    its error, whatever the size of x. GELU's gradient multiplies that of tanh by up to 8."""
    powers = 10.0 ** torch.arange(-10, 12.5, 0.5)
    x = torch.cat((torch.linspace(-30, 30, 6001), powers, -powers, torch.zeros(1)))

    def both(x, gelu=gelu, tanh=tanh):
        return gelu(x), tanh(x)

    def torchs(x):
        return both(x, lambda x: F.gelu(x, approximate="tanh"), torch.tanh)

    def values(f, x):
        x, found = x.clone().requires_grad_(), []
        for i in range(2):
            y = f(x)[i]
            found += [y.detach().double(), torch.autograd.grad(y.sum(), x)[0].double()]
        return found

    exact = values(torchs, x.double())
    ours = values(torch.compile(both, backend=backend, fullgraph=True, dynamic=False), x)
    for y, wanted, bound in zip(ours, exact, (4, 32, 3, 6), strict=True):
        assert y.isfinite().all()
        assert ((y - wanted).abs() / wanted.abs().clamp(min=1)).max() < roundings(bound), backend
    for y, wanted in zip(values(both, x), values(torchs, x), strict=True):
        assert torch.equal(y, wanted)  # not compiled: torch's own


def assert_compiled_is_eager(model, backend, tolerance):
    """Loss and gradients, with other ignored targets each time, of one graph that is compiled once,
    whatever weights and learning rate."""
    torch._dynamo.utils.counters.clear()
    compiled = standing_for(
        model, torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    )
    config = TrainConfig()
    fill_defaults(config)
    optimizer = make_optimizer(model, config)
    for step, positions in enumerate(list(IGNORED.values())[:3]):
        idx, targets = batch_ignoring(positions)
        assert_same_gradients(
            gradients(compiled, idx, targets), gradients(model, idx, targets), tolerance
        )
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        model.power_iteration()
    nothing = torch.full((2, 7), -1)
    loss, grads = gradients(compiled, idx, nothing)
    assert loss == 0 and not any(grad.count_nonzero() for grad in grads.values())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("kernels", ((), ("cross_entropy",)), ids=str)
@fresh_compiler()
def test_the_compiled_model_is_one_graph_and_the_same(kernels):
    """The loss's operator runs once a chunk, but not in eager code, nor without gradients.
    test_layout_properties.py has other layouts, without learning."""
    model, traced = build(UNIFIED, n_layer=1).train(), AotEagerAndRecordGraphs()
    model.set_runtime(loss_chunks=2, kernels=kernels)
    assert_compiled_is_eager(model, traced, 1e-10)
    with Watch() as eager:
        gradients(model, *batch())
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=traced)(*batch())
    calls = [str(graph.graph).count(".cross_entropy.") for graph in traced.fw_graphs]
    assert calls == [2 * len(kernels), 0] and not eager.calls["cross_entropy"]


@pytest.mark.deep  # tests/runs/test_tasks.py has whole runs, compiled by inductor
@pytest.mark.parametrize("kernels", ((), ("cross_entropy", "qkv")), ids=str)
@pytest.mark.parametrize("dtype, tolerance", ((None, 5e-6), (torch.bfloat16, 0.01)), ids=str)
@fresh_compiler()
def test_the_model_that_inductor_compiles_is_the_same(dtype, tolerance, kernels):
    """A fused loss that goes wrong when compiled has been seen with ignored targets. All that
    depends on the scheme is in the trace, which test_layout_properties.py compares for each."""
    flags = (
        dict(S4, sigma_reparam=True)
        if dtype is None
        else dict(norm="dyt", tie_weights=False, mlp="swiglu", **UNIFIED)
    )
    model = GPT(GPTConfig(**SIZE | dict(flags, n_layer=1))).set_runtime(compute_dtype=dtype)
    assert_compiled_is_eager(
        model.set_runtime(loss_chunks=2, kernels=kernels), "inductor", tolerance
    )


BRANCHES = {
    f"lns={where}": dict(lns=where, residual_init="plain")
    for where in ("branch", "residual", "input")
}
NAMES = "S1, S5, LNS, dyt, post, Mix-LN, DeepNorm, mid, LN, no norm, LayerScale, SkipInit, "
NAMES += "Derf, GPAS, sigmaReparam, HG, DP, DNP, OR, nGPT"
ALL_LAYOUTS = {name: PARTS[name][0] for name in NAMES.split(", ")}
ALL_LAYOUTS |= BRANCHES | {"drop_path": dict(S5, drop_path=0.6), "fixup": FIXUP}
ALL_LAYOUTS["lns_learn"] = dict(lns="norm", lns_learn=True)
DEPTH = 4  # Mix-LN's first block, and the last one of Post-LN, are kinds of their own
KINDS = {"Mix-LN": 2, "post": 1, "DeepNorm": 1}


@pytest.mark.parametrize("name", spread(tuple(ALL_LAYOUTS), fast=("Mix-LN",)))
def test_blocks_of_one_kind_share_a_graph(name, monkeypatch):
    """Also where a constant differs from block to block, as LNS's factor does."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    model = compile_parts(build(ALL_LAYOUTS[name], n_layer=DEPTH).train())
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model(*batch())[1].backward()
    # embedding and loss
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == KINDS.get(name, 1) + 2
    torch._dynamo.reset()


QKV = {
    "LLaMA": dict(lns="norm", bias=True, qk_norm=True, **LLAMA),
    "S5": S5,
    "many gains": MANY_GAINS,
}
QKV |= {
    "unified": UNIFIED,
    "none": NONE,
    "norms on all three": dict(QK_FULL, v_norm=True, n_kv_head=2),
    "sigmaReparam": dict(sigma_reparam=True, gain="branch", n_kv_head=1),
}
QKV["rotated without a norm"] = LLAMA


@pytest.mark.parametrize("name", spread(tuple(QKV), fast=("LLaMA", "rotated without a norm")))
@fresh_compiler()
def test_q_k_and_v_as_one_product_have_the_gradients_of_three(name):
    """In float64 the same; in bf16 as near to float64 as those of three products. Where q and k are
    rotated without a norm there are three, since one would keep q, k and v once more."""
    model = build(QKV[name], n_layer=1).train().set_runtime(kernels=("qkv",))
    traced = AotEagerAndRecordGraphs()
    exact = gradients(model, *batch())[1]
    assert_compiled_is_eager(copy.deepcopy(model), traced, 1e-10)
    assert str(traced.bw_graphs[0].graph).count(".sum_of_products") == (QKV[name] is not LLAMA)
    torch._dynamo.reset()
    model.float().set_runtime(compute_dtype=torch.bfloat16)
    separate = gradients(model, *batch())[1]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert as_near(gradients(standing_for(model, compiled), *batch())[1], separate, exact, times=2)


GATHERED = {
    "S5": S5,
    "LLaMA": dict(lns="norm", **LLAMA),
    "many gains": MANY_GAINS,
    "unified": UNIFIED,
    "none": NONE,
}
GATHERED["plain"] = {}
GATHERED["experts"] = dict(n_expert=4, n_expert_active=2, mlp="swiglu")


@pytest.mark.parametrize("kernels", ((), ("qkv", "ffn")), ids=str)
@pytest.mark.parametrize("name", spread(tuple(GATHERED), fast=("LLaMA", "experts", "plain")))
@fresh_compiler()
def test_compiled_blocks_keep_no_copy_of_a_gathered_weight(name, kernels):
    """FSDP gathers bf16 weights and frees them; weight times gain is computed again. Gradients are
    those of eager code, and of a block whose activations are recomputed."""
    has_kernel = "ffn" in kernels  # which rounds other numbers than eager code, as often
    model = (
        build(GATHERED[name], n_layer=1)
        .float()
        .set_runtime(compute_dtype=torch.bfloat16, kernels=kernels)
    )
    for weight in block_matrices(model):
        weight.data = weight.data.bfloat16()
    x, rope = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)), None
    if model.config.pos == "rope":
        rope = ops.rotary(torch.arange(9), model.config.head_dim, 100.0)

    def gradients(block) -> list:
        model.zero_grad()
        block(x.requires_grad_(), rope).square().sum().backward()
        return [p.grad for p in model.blocks.parameters()]

    block = model.blocks[0]
    (compiled, kept), wanted = compiled_and_kept(block), gradients(block)
    for way in (compiled, lambda *args: checkpoint(compiled, *args, use_reentrant=False)):
        for grad, right in zip(gradients(way), wanted, strict=True):
            assert (grad - right).norm() <= roundings(
                2 if has_kernel else 1, torch.bfloat16
            ) * right.norm()
    large = [t.shape for t in kept if t.numel() >= 16 * 16]
    assert large and all({9, 18, 36} & set(shape) for shape in large)


@pytest.mark.deep
def test_compiled_code_is_found_again(tmp_path, monkeypatch):
    """By the next start, forward and backward; an operator that does something else has another
    name."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found, counters = {}, torch._dynamo.utils.counters
    for start in ("first", "second"):
        torch._dynamo.reset()
        counters.clear()
        model = build(S4, n_layer=1).train()
        torch.compile(model, dynamic=False)(*batch())[1].backward()
        found[start] = {
            key: counters["aot_autograd"][f"autograd_cache_{key}"] for key in ("miss", "hit")
        }
    assert found == dict(first=dict(miss=1, hit=0), second=dict(miss=0, hit=1))
    (tmp_path / "ops.py").write_bytes(Path(ops.__file__).read_bytes())
    assert namespace_of(tmp_path / "ops.py") == ops.NAMESPACE
    (tmp_path / "ops.py").write_text("another operator")
    assert namespace_of(tmp_path / "ops.py") != ops.NAMESPACE
