"""What makes a step fast and small, each against the plain way of doing the same: the loss that keeps no logits,
matrices in one product, compiled activations, checkpointed blocks, batches read ahead, a step that waits for nothing.
"""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_run, column, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import LLAMA, POST, S4, S5, SIZE, batch, build, error, gradients, tokens
from test_train import refusal
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
import rundir
import runtime
import train
from model import GPT, GPTConfig, KVCache, gelu, linear_cross_entropy, tanh, together
from optim import fill_defaults, make_optimizer
from runtime import Env, Prefetch
from train import TrainConfig, training_step

UNIFIED = dict(gain="branch", gain_out="norm", gain_param="magdir")
NETS = {
    "tied": dict(),
    "untied, bias": dict(tie_weights=False, bias=True, norm="layernorm"),
    "llama": LLAMA,
    "DNT, LNS, OR": dict(S5, lns="norm", gain_param="magdir"),
    "no final norm": dict(POST, bias=True, norm="layernorm"),
    "unified": UNIFIED,
    "DyT": dict(norm="dyt", dyt_bias=True),
    "no padding": dict(vocab_size=64),
}
HOST_SYNCS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero")  # operators that wait for a GPU


@pytest.fixture(scope="module", autouse=True)
def quick(one_thread):
    """Runs on one thread, without drawing loss.png."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        yield


@pytest.fixture
def fresh_compiler():
    """Nothing compiled before, and a graph break or a second compilation is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Watch(TorchDispatchMode):
    """Sees every operator: `calls` counts them, `shapes` has the shapes of their results, and `peak` is the largest
    number of bytes alive at a time, of what was made meanwhile."""

    def __init__(self):
        super().__init__()
        self.calls, self.shapes, self.live, self.peak = Counter(), set(), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.calls[func.overloadpacket.__name__] += 1
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.shapes.add(t.shape)
                storage = t.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def plain_loss(logits, targets):
    """The mean over the targets that count, 0 if none does, by way of all logits and torch's cross-entropy."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return total / (targets != -1).sum().clamp(min=1)


def standing_for(model, f):
    """f, with what `gradients` wants of a model."""

    def call(*args):
        return f(*args)

    call.zero_grad, call.named_parameters = model.zero_grad, model.named_parameters
    return call


def plain(model):
    """The model with its loss by way of all logits."""
    return standing_for(model, lambda idx, targets: (None, plain_loss(model(idx)[0], targets)))


def assert_close(ours, theirs, tolerance):
    """(loss, gradients) of two models, each tensor relative to its largest entry, those of no size to the largest."""
    assert error(ours[0], theirs[0]) <= tolerance
    assert ours[1].keys() == theirs[1].keys()
    largest = max(g.abs().max().item() for g in theirs[1].values())
    for name, grad in ours[1].items():
        assert error(grad, theirs[1][name], floor=1e-3 * largest) <= tolerance, name


def saved_for_backward(f) -> list:
    """Entries of each tensor that f() keeps for the backward pass."""
    sizes = []

    def note(t):
        sizes.append(t.numel())
        return t

    with saved_tensors_hooks(note, lambda t: t):
        f()
    return sizes


# --------------------------------------------------------------------------------------- 1. the loss, without logits

# of the 14 targets of a batch of 2 × 7
IGNORED = {"none": [], "some": [3, 7], "a whole chunk": list(range(7)), "all but one": [*range(5), *range(6, 14)]}


def ignoring(places):
    idx, targets = tokens(2, 7), tokens(2, 7, seed=2)
    targets.view(-1)[places] = -1
    return idx, targets


@pytest.mark.parametrize("flags", NETS.values(), ids=NETS)
def test_loss_and_gradients_are_those_of_the_logits(flags):
    model = build(flags)
    for places in IGNORED.values():
        idx, targets = ignoring(places)
        expected = gradients(plain(model), idx, targets)
        for chunks in (0, 1, 2, 3, 100):
            model.loss_chunks = chunks
            assert_close(gradients(model, idx, targets), expected, 1e-11)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("chunks", (1, 3))
def test_without_targets_that_count_loss_and_gradients_are_zero(chunks, dtype):
    model, idx = build(dict(tie_weights=False), dtype=torch.float32).set_compute_dtype(dtype), tokens(2, 7)
    model.loss_chunks = chunks
    loss, grads = gradients(model, idx, torch.full((2, 7), -1))
    assert loss == 0
    assert [name for name, grad in grads.items() if grad.count_nonzero()] == []


def test_gradients_scale_and_add_up_as_others_do():
    """By a factor (of accumulation, of fp16's scaler), over several backward passes, and through what follows."""
    model, (idx, targets) = build(dict()), batch()
    loss, once = gradients(plain(model), idx, targets)
    for f, factor in ((lambda x: 0.25 * x, 0.25), (lambda x: x * 65536, 65536), (lambda x: x.square(), 2 * loss)):
        model.zero_grad()
        f(model(idx, targets)[1]).backward()
        ours = {name: p.grad / factor for name, p in model.named_parameters()}
        assert_close((loss, ours), (loss, once), 1e-11)
        f(model(idx, targets)[1]).backward()
        ours = {name: p.grad / (2 * factor) for name, p in model.named_parameters()}
        assert_close((loss, ours), (loss, once), 1e-11)


def functional(x, weight, targets, dtype, vocab_size, chunks=0):
    """(loss, gradient of x, gradient of weight) by linear_cross_entropy."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, dtype, vocab_size, chunks)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def functional_plain(x, weight, targets, dtype, vocab_size):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(x.to(dtype), weight.to(dtype))[..., :vocab_size]
    loss = plain_loss(logits if dtype == torch.float64 else logits.float(), targets)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_shape_is_the_cross_entropy(data):
    b, t, c, vocab_size, padding, chunks = (
        data.draw(st.integers(*ends)) for ends in ((1, 4), (1, 6), (1, 9), (1, 70), (0, 5), (0, 30))
    )
    targets = data.draw(st.lists(st.integers(-1, vocab_size - 1), min_size=b * t, max_size=b * t))
    targets = torch.tensor(targets).view(b, t)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(b, t, c, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size + padding, c, generator=generator, dtype=torch.float64)
    ours = functional(x, weight, targets, torch.float64, vocab_size, chunks)
    theirs = functional_plain(x, weight, targets, torch.float64, vocab_size)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert not ours[2][vocab_size:].count_nonzero()


def some_logits(dtype, size=1.5):
    """x (4, 64, 32), weight (256, 32), both numbers of `dtype`, and targets below 200, a fifth of them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 32, generator=generator).to(dtype).float()
    weight = (torch.randn(256, 32, generator=generator) * size / 32**0.5).to(dtype).float()
    targets = torch.randint(200, (4, 64), generator=generator)
    return x, weight, targets.masked_fill(torch.rand(4, 64, generator=generator) < 0.2, -1)


@pytest.mark.parametrize("chunks", (1, 3, 256))
@pytest.mark.parametrize(
    "dtype, loss_bound, grad_bound",  # 1.5 times what was measured; that of gradients is the rounding of the dtype
    ((torch.float32, 5e-6, 5e-7), (torch.bfloat16, 2e-4, 3.5e-3), (torch.float16, 3e-5, 4.5e-4)),
    ids=str,
)
def test_low_precision_costs_no_more_than_rounding_the_logits(dtype, loss_bound, grad_bound, chunks):
    """Against float64, with the same rounded input; and no more than torch's loss on logits of that dtype."""
    x, weight, targets = some_logits(dtype)
    exact = functional_plain(x.double(), weight.double(), targets, torch.float64, 200)
    ours = functional(x, weight, targets, dtype, 200, chunks)
    theirs = functional_plain(x, weight, targets, dtype, 200)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    assert abs(ours[0] - exact[0]) < loss_bound
    for a, b, c in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert (a - c).norm() / c.norm() < grad_bound
        assert (a - c).norm() < 1.1 * (b - c).norm() + 1e-7 * c.norm()


@pytest.mark.parametrize("dtype, bound", ((torch.bfloat16, 0.05), (torch.float16, 0.008)), ids=str)
def test_gradients_of_a_half_precision_model_are_close_to_fp32(dtype, bound):
    """fp16 with its loss scaled by 65536, as at the start of a run."""
    model, (idx, targets) = GPT(GPTConfig(**SIZE, n_layer=2)), batch()
    model.loss_chunks = 3
    loss, expected = gradients(model, idx, targets)
    model.set_compute_dtype(dtype).zero_grad()
    scaled = model(idx, targets)[1] * 65536
    scaled.backward()
    assert error(scaled.detach() / 65536, loss) < bound / 4
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all(), name
        assert (p.grad / 65536 - expected[name]).norm() < bound * expected[name].norm(), name


def test_fp16_gradients_of_many_equal_targets_are_finite():
    """A gradient summed over tokens before it is divided by their number must not leave the range of fp16: no scale
    of the loss would bring it back."""
    x, weight = torch.full((64, 1024, 8), 2.0), torch.zeros(128, 8)
    targets = tokens(64, 1024, vocab=65).masked_fill_(tokens(64, 1024, vocab=10, seed=2) < 7, 1)
    _, dx, dw = functional(x, weight, targets, torch.float16, 65)
    exact = functional_plain(x, weight, targets, torch.float32, 65)[2]
    assert dx.isfinite().all() and dw.isfinite().all()
    assert error(dw, exact) < 1e-2


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_large_logits_do_not_overflow(dtype):
    x, weight, targets = some_logits(dtype)
    x = (x * 3e3).to(dtype).float()
    exact = functional_plain(x.double(), weight.double(), targets, torch.float64, 200)
    assert (x.flatten(0, 1) @ weight.T).abs().max() > 1e4
    loss, dx, dw = functional(x, weight, targets, dtype, 200, 2)
    assert error(loss, exact[0]) < 1e-3
    for a, b in ((dx, exact[1]), (dw, exact[2])):
        assert a.isfinite().all()
        assert (a - b).norm() < 0.1 * b.norm()  # a softmax of such logits is 0 or 1: near ties turn


def test_a_second_derivative_raises():
    """Never a wrong one: not of the loss alone, and not where the blocks before it have one of their own."""
    model, (idx, targets) = build(dict(n_layer=1)), batch()
    parameters = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(plain_loss(model(idx)[0], targets), parameters, create_graph=True)
        assert torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        with pytest.raises(RuntimeError):
            first = torch.autograd.grad(model(idx, targets)[1], parameters, create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    x, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with pytest.raises(RuntimeError):
        loss = linear_cross_entropy(x, weight, torch.tensor([[1, 2, 0]]), torch.float32, 5)
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        torch.autograd.grad(first[0].sum(), weight)


def test_padding_rows_get_no_gradient_in_any_dtype():
    for dtype in (None, torch.bfloat16):
        model, (idx, targets) = build(dict(tie_weights=False), dtype=torch.float32).set_compute_dtype(dtype), batch()
        for chunks in (1, 4):
            model.loss_chunks = chunks
            _, grads = gradients(model, idx, targets)
            for name in ("head.weight", "wte.weight"):
                assert grads[name].shape == (64, 16)
                assert not grads[name][50:].count_nonzero() and grads[name][:50].count_nonzero()


WIDE = dict(vocab_size=250, block_size=48)  # 2 × 48 tokens × 256 logits: larger than any other tensor of the model


def test_no_logits_are_kept_for_the_backward_pass():
    model, (idx, targets) = build(WIDE), (tokens(2, 48), tokens(2, 48, seed=2))
    assert max(saved_for_backward(lambda: plain(model)(idx, targets))) >= 2 * 48 * 250
    for chunks in (1, 3):
        model.loss_chunks = chunks
        assert max(saved_for_backward(lambda: model(idx, targets))) < 2 * 48 * 250 / chunks


def test_no_logits_leave_the_compiled_forward(fresh_compiler):
    model, (idx, targets), outputs = build(WIDE), (tokens(2, 48), tokens(2, 48, seed=2)), []

    def note(graph, example):
        outputs.extend(node.meta["val"].numel() for node in graph.graph.output_node().args[0])
        return graph

    partition = dict(partition_fn=min_cut_rematerialization_partition)  # as inductor's
    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda graph, example: graph, **partition)
    torch.compile(model, backend=backend, dynamic=False)(idx, targets)
    assert 0 < max(outputs) < 2 * 48 * 250


def test_the_loss_needs_a_fraction_of_the_memory():
    x, weight, targets = torch.randn(8, 128, 32), torch.randn(4096, 32), tokens(8, 128, vocab=4096)
    with Watch() as whole:
        functional_plain(x, weight, targets, torch.float32, 4096)
    with Watch() as chunked:
        functional(x, weight, targets, torch.float32, 4096, 4)
    assert whole.peak > 2 * x.shape[0] * x.shape[1] * 4096 * 4  # logits and their gradient: the watch sees them
    assert 4 * chunked.peak < whole.peak
    with Watch() as evaluation, torch.no_grad():
        linear_cross_entropy(x, weight, targets, torch.float32, 4096, 4)
    assert evaluation.peak < chunked.peak
    assert [w.calls["mm"] for w in (chunked, evaluation)] == [3 * 4, 4]  # nothing is computed twice, or for nothing


def test_chunks_bound_the_logits(monkeypatch):
    """By default as many as keep those of one to LOGITS_BYTES, else as many as asked for; from 128 rows on in tiles."""
    weight = torch.randn(128, 1)

    def rows(dtype, chunks, n=32):
        x, targets = torch.randn(2, n, 1), tokens(2, n, vocab=128)
        with Watch() as watch:
            functional(x, weight, targets, dtype, 128, chunks)
        return max(shape[0] for shape in watch.shapes if shape[1:] == (128,))

    for dtype, chunks, limit, expected in (
        (torch.float32, 0, 2**30, 64),
        (torch.float32, 0, 64 * 128 * 4, 64),
        (torch.float32, 0, 64 * 128 * 4 - 1, 32),
        (torch.bfloat16, 0, 64 * 128 * 2, 64),
        (torch.bfloat16, 0, 10 * 128 * 2, 10),
        (torch.bfloat16, 0, 1, 1),
        (torch.float32, 4, 2**30, 16),
        (torch.float32, 3, 1, 22),
        (torch.float32, 1000, 2**30, 1),
    ):
        monkeypatch.setattr(model_module, "LOGITS_BYTES", limit)
        assert rows(dtype, chunks) == expected, (dtype, chunks, limit)
    monkeypatch.setattr(model_module, "LOGITS_BYTES", 2**30)
    assert [rows(torch.float32, chunks, n=250) for chunks in (1, 2, 3, 4)] == [500, 256, 256, 125]


# --------------------------------------------------------------------------------------- 2. matrices in one product

TOGETHER = {
    "shared": dict(),
    "no gains": dict(gain="none"),
    "LNS, bias": dict(bias=True, lns="norm"),
    "HG": dict(gain="branch"),
    "HG, ER, LNS": dict(gain="branch", gain_param="expmagdir", lns="norm"),
    "DP": dict(gain_out="scale", bias=True),
    "DP, OR": dict(gain_out="scale", gain_param="magdir"),
    "DNP": dict(gain_out="norm"),
    "unified, bias": dict(UNIFIED, bias=True),
    "sigmaReparam": dict(sigma_reparam=True, bias=True, gain="branch"),
    "DyT": dict(norm="dyt"),
    "Fixup": dict(norm="none", fixup=True),
}


@pytest.mark.parametrize("flags", TOGETHER.values(), ids=TOGETHER)
def test_one_product_is_the_separate_ones(flags):
    """Also for one token at a time, whose gains go to the activations."""
    model = build(dict(flags, n_kv_head=2, mlp="swiglu", n_ff=24))  # q, k, v of other sizes
    generator = torch.Generator().manual_seed(5)
    for branch, names in (("attn", "q k v"), ("mlp", "gate up")):
        residual = getattr(model.blocks[1], branch)
        matrices = [getattr(residual.f, name) for name in names.split()]
        x = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        parameters = [x, *{id(p): p for m in (residual.pre, *matrices) for p in m.parameters()}.values()]

        def outputs(f, x=x, residual=residual):
            u, scale = residual.pre(x), residual.pre.folded()
            return f(u, scale)

        whole = outputs(lambda u, scale, ms=matrices: together(ms, u, scale))
        separate = outputs(lambda u, scale, ms=matrices: [m(u, scale) for m in ms])
        single = outputs(
            lambda u, scale, ms=matrices: zip(*(together(ms, t, scale) for t in u.split(1, 1)), strict=True)
        )
        single = [torch.cat(tokens, 1) for tokens in single]
        noise = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in separate]
        assert len({y.shape for y in separate}) == 1 + (branch == "attn")
        wanted = torch.autograd.grad(sum((y * n).sum() for y, n in zip(separate, noise, strict=True)), parameters)
        for ys in (whole, single):
            for y, expected in zip(ys, separate, strict=True):
                torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
            grads = torch.autograd.grad(sum((y * n).sum() for y, n in zip(ys, noise, strict=True)), parameters)
            for grad, expected in zip(grads, wanted, strict=True):
                assert expected.count_nonzero()
                torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)


def test_q_k_v_and_gate_up_are_one_product_each():
    model, idx = build(LLAMA, n_layer=1), tokens(2, 7)
    with Watch() as watch, torch.no_grad():
        model(idx)
    assert watch.calls["mm"] + watch.calls["addmm"] == 5, watch.calls  # q k v, o, gate up, down, head


@pytest.mark.parametrize("flags", (dict(), dict(gain_out="norm", bias=True)), ids=str)
def test_one_product_has_the_compute_dtype(flags):
    model = build(dict(flags, n_kv_head=2), dtype=torch.float32).set_compute_dtype(torch.bfloat16)
    f, x = model.blocks[0].attn.f, torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    for m, y in zip((f.q, f.k, f.v), together((f.q, f.k, f.v), x), strict=True):
        assert y.dtype == torch.bfloat16
        assert error(y, m(x)) < 2**-7


# ------------------------------------------------------------------------------------------------------ 3. compiled


def test_compiled_activations_are_the_same_functions(fresh_compiler):
    """Against float64, in value and gradient, relative to the larger of 1 and the value.

    Compiled tanh is a difference of numbers near 1: its error may be 2e-7, whatever the size of x, so 2e-7/|x| of a
    small tanh x."""
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
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        ours = values(torch.compile(both, backend=backend, fullgraph=True, dynamic=False), x)
        for y, wanted, bound in zip(ours, exact, (5e-7, 4e-6, 3e-7, 6e-7), strict=True):
            assert y.isfinite().all()
            assert ((y - wanted).abs() / wanted.abs().clamp(min=1)).max() < bound, backend
        y, _, z, _ = ours
        for end, gelu_end, tanh_end in ((x >= 15, x.double(), 1.0), (x <= -15, torch.zeros(()), -1.0)):
            assert (y == gelu_end)[end].all() and (z == tanh_end)[end].all()
        small = (x.abs() < 0.1) & (x != 0)
        assert ((y - exact[0]).abs() / exact[0].abs())[small].max() < 3e-7
        assert ((z - exact[2]).abs() * x.abs() / exact[2].abs())[small].max() < 2e-7
    for y, wanted in zip(values(both, x), values(torchs, x), strict=True):
        assert torch.equal(y, wanted)  # not compiled: torch's own


def test_compiled_gelu_of_bf16_is_rounded_once(fresh_compiler):
    x = torch.linspace(-8, 8, 4001).bfloat16()
    y = torch.compile(gelu, backend="aot_eager", fullgraph=True)(x)
    assert y.dtype == torch.bfloat16
    assert error(y, F.gelu(x.double(), approximate="tanh")) < 2**-9


COMPILED = {
    "Pre-LN": dict(norm="layernorm", bias=True),
    "DNT": dict(S5, pos="rope"),
    "LNS": dict(LLAMA, lns="norm"),
    "DyT": dict(norm="dyt", sigma_reparam=True),
    "unified": UNIFIED,
}


def filled(**settings) -> TrainConfig:
    config = TrainConfig(**settings)
    fill_defaults(config)
    return config


def assert_compiled_is_eager(model, backend, tolerance, steps=3):
    """Loss and gradients, with other ignored targets each time, of one graph that is compiled once, whatever weights
    and learning rate."""
    torch._dynamo.utils.counters.clear()
    compiled = standing_for(model, torch.compile(model, backend=backend, fullgraph=True, dynamic=False))
    optimizer = make_optimizer(model, filled())
    for step, places in zip(range(steps), IGNORED.values(), strict=False):
        idx, targets = ignoring(places)
        assert_close(gradients(compiled, idx, targets), gradients(model, idx, targets), tolerance)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        model.power_iteration()
    nothing = torch.full((2, 7), -1)
    loss, grads = gradients(compiled, idx, nothing)
    assert loss == 0 and not any(grad.count_nonzero() for grad in grads.values())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("flags", COMPILED.values(), ids=COMPILED)
def test_the_compiled_model_is_one_graph_and_the_same(flags, fresh_compiler):
    model = build(flags, n_layer=1).train()
    model.loss_chunks = 2
    assert_compiled_is_eager(model, "aot_eager", 1e-10)


def test_the_compiled_checkpointed_model_is_the_same(fresh_compiler):
    model = build(LLAMA).train()
    model.checkpointing = True
    assert_compiled_is_eager(model, "aot_eager", 1e-10, steps=2)


@pytest.mark.parametrize("dtype, tolerance", ((None, 5e-6), (torch.bfloat16, 0.01)), ids=str)
def test_the_model_that_inductor_compiles_is_the_same(dtype, tolerance, fresh_compiler):
    """A fused loss that goes wrong when compiled has been seen with ignored targets."""
    flags = dict(n_layer=1, mlp="gelu", **S4) if dtype is None else dict(n_layer=1, norm="dyt", tie_weights=False)
    model = GPT(GPTConfig(**SIZE | flags)).set_compute_dtype(dtype)
    model.loss_chunks = 2
    assert_compiled_is_eager(model, "inductor", tolerance)


# ----------------------------------------------------------------------------------------- 4. checkpointed blocks


def with_and_without(model, f) -> tuple:
    """f() with and without checkpointed blocks, on the same random numbers."""
    results = []
    for model.checkpointing in (True, False):
        torch.manual_seed(11)
        results.append(f())
    return results


@pytest.mark.parametrize(
    "flags", (dict(), LLAMA, dict(S5, dropout=0.3), dict(LLAMA, dropout=0.3, sigma_reparam=True)), ids=str
)
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
def test_checkpointing_changes_no_bit(flags, dtype):
    model, (idx, targets) = build(flags, dtype=torch.float32).train().set_compute_dtype(dtype), batch()
    ours, plain = with_and_without(model, lambda: gradients(model, idx, targets))
    assert torch.equal(ours[0], plain[0])
    assert [name for name, grad in ours[1].items() if not torch.equal(grad, plain[1][name])] == []
    sizes = with_and_without(model, lambda: saved_for_backward(lambda: model(idx, targets)))
    assert 2 * sum(sizes[0]) < sum(sizes[1]) and len(sizes[0]) < len(sizes[1])


def test_checkpointing_keeps_one_stream_a_block():
    idx, targets = batch()
    kept = []
    for layers in (2, 5):
        model = build(dict(), n_layer=layers)
        model.checkpointing = True
        kept.append(sum(saved_for_backward(lambda model=model: model(idx, targets))))
    assert kept[1] - kept[0] == 3 * 2 * 7 * 16


def test_checkpointing_has_no_effect_without_gradients(monkeypatch):
    model, (idx, targets) = build(LLAMA), batch()
    evaluated = with_and_without(model, lambda: model(idx, targets)[1].detach())  # eval(), though gradients are on
    assert torch.equal(*evaluated)

    def forbidden(*args, **kwargs):
        raise AssertionError("checkpointed without need")

    monkeypatch.setattr(model_module, "checkpoint", forbidden)
    with torch.no_grad():
        assert torch.equal(*with_and_without(model, lambda: model(idx, targets)[1]))
        assert torch.equal(*with_and_without(model, lambda: model.train()(idx)[0]))
    assert torch.equal(*with_and_without(model, lambda: model.eval().generate(idx, 6, temperature=0)))


def test_checkpointing_leaves_the_cache_alone():
    """Even where a caller did not switch gradients off."""
    model, idx = build(LLAMA), tokens(2, 7)

    def by_steps():
        cache = [KVCache() for _ in model.blocks]
        logits = [model(part, cache=cache)[0] for part in (idx[:, :4], idx[:, 4:5], idx[:, 5:6])]
        return torch.cat(logits, 1).detach()

    ours, plain = with_and_without(model, by_steps)
    assert error(plain, model(idx)[0][:, :6]) < 1e-11
    assert error(ours, plain) < 1e-11


# ----------------------------------------------------------------------------------- 5. batches read ahead, devices


def test_prefetch_gives_the_step_asked_for():
    steps = [0, 1, 2, 2, 2, 7, 3, 4, 100, 0, 1]
    ahead = Prefetch(lambda step: ("batch", step))
    assert [ahead(step) for step in steps] == [("batch", step) for step in steps]


def test_prefetch_reads_each_batch_once():
    fetched, tenth = [], threading.Event()

    def fetch(step):
        fetched.append(step)
        if step == 10:
            tenth.set()
        return np.full(3, step)  # without a truth value

    ahead = Prefetch(fetch)
    for step in range(10):
        assert (ahead(step) == step).all()
    assert tenth.wait(30)
    assert fetched == list(range(11))


def test_prefetch_works_while_the_step_is_made():
    """fetch(step + 1) has begun, elsewhere, when the batch of `step` is there, and nobody waits for it."""
    begun, may_end = threading.Event(), threading.Event()

    def fetch(step):
        if step == 4:
            begun.set()
            assert may_end.wait(30)
        return step, threading.get_ident()

    ahead = Prefetch(fetch)
    step, thread = ahead(3)
    assert step == 3 and thread != threading.get_ident()
    assert begun.wait(30)
    may_end.set()
    assert ahead(4)[0] == 4


def test_what_fetch_raises_arrives_with_its_step():
    errors = {3: OSError("the disk is gone"), 6: ValueError("bad token")}

    def fetch(step):
        if step in errors:
            raise errors[step]
        return step

    ahead = Prefetch(fetch)
    assert [ahead(step) for step in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead(3)
    assert [ahead(4), ahead(5), ahead(7)] == [4, 5, 7]  # the error of 6, not asked for, is nobody's
    del errors[3]
    assert ahead(3) == 3


def test_a_run_reads_the_batches_it_would_read_directly(dataset, tmp_path, monkeypatch):
    config = dict(dataset=dataset, max_iters=12, micro_batch_size=4, dropout=0.1)
    assert run(out_dir=tmp_path / "ahead", **config) == 0
    used = []

    def direct(fetch):
        def call(step):
            used.append(step)
            return fetch(step)

        return call

    monkeypatch.setattr(train, "Prefetch", direct)
    assert run(out_dir=tmp_path / "direct", **config) == 0
    assert used == list(range(12))
    assert_same_run(tmp_path / "ahead", tmp_path / "direct")


def test_an_error_in_reading_ahead_ends_the_run_in_one_line(dataset, tmp_path, monkeypatch, capsys):
    batch = train.Dataset.batch

    def fail(self, step, *args):
        if step == 5:
            raise OSError("the disk is gone")
        return batch(self, step, *args)

    monkeypatch.setattr(train.Dataset, "batch", fail)
    code = run(dataset=dataset, out_dir=tmp_path, max_iters=12)
    refusal(capsys, code, "the disk is gone")
    assert list(column(tmp_path, "train_loss")) == [1, 2, 3, 4, 5]


CPU = Env(0, 1, torch.device("cpu"), torch.float32, False)
GPU = Env(0, 1, torch.device("cuda", 0), torch.bfloat16, False)


def test_arrays_arrive_as_they_are_in_one_layout():
    array = np.arange(24).reshape(4, 6)
    for a in (array, array[:, 1:4], array[::2], array.T):
        (there,) = CPU.put(*CPU.pin(a))
        assert there.is_contiguous() and there.dtype == torch.int64 and np.array_equal(there.numpy(), a)


@pytest.mark.parametrize("flags", (dict(), dict(n_kv_head=2), dict(block_size=512)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_attention_that_is_named_is_the_one_that_runs(flags, dtype):
    config = GPTConfig(**SIZE | dict(n_layer=1) | flags)
    backend, named = runtime.attention_backend(config, Env(0, 1, torch.device("cpu"), dtype, False)).split(", ")
    model, seen = GPT(config).set_compute_dtype(dtype), []
    attention = F.scaled_dot_product_attention

    def note(q, k, v, **kwargs):
        seen.append(str(q.dtype).removeprefix("torch."))
        return attention(q, k, v, **kwargs)

    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(F, "scaled_dot_product_attention", note)
        model(tokens(2, config.block_size), tokens(2, config.block_size))
    assert seen == [named]
    assert [backend] == ["flash" if watch.calls["_scaled_dot_product_flash_attention_for_cpu"] else "math"]


# ----------------------------------------------------------------------------------------------- 6. the whole step


class NoWaiting(Watch):
    """Fails where the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in HOST_SYNCS, func
        return super().__torch_dispatch__(func, types, args, kwargs)


def step_parts(flags, optimizer, fp16=False, **settings):
    """(model, optimizer, scaler, config) of a tiny run."""
    config = filled(optimizer=optimizer, **settings)
    model = GPT(GPTConfig(**SIZE | dict(n_layer=1) | flags)).set_compute_dtype(torch.float16 if fp16 else None).train()
    made = make_optimizer(model, config)
    for group in made.param_groups:
        group["lr"] = 1e-2
    return model, made, torch.amp.GradScaler("cpu", enabled=fp16, init_scale=1024), config


@pytest.mark.parametrize("grad_clip", (1.0, 0.0))
@pytest.mark.parametrize(
    "optimizer, flags",
    (("adamw", dict()), ("msgdw", S5), ("muon", dict(sigma_reparam=True, dropout=0.1)), ("adam_mini", LLAMA)),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("fp16", (False, True), ids=("fp32", "fp16"))
def test_a_step_waits_for_nothing(optimizer, flags, grad_clip, fp16):
    model, made, scaler, config = step_parts(flags, optimizer, fp16, grad_clip=grad_clip)
    x, y = tokens(6, 9), tokens(6, 9, seed=2)
    y[0, :4] = -1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with NoWaiting() as watch:
        for _ in range(2):
            loss, norm, bad = training_step(model, model, made, scaler, x, y, 2, config)
    assert watch.calls and not bad and loss.isfinite() and norm > 0
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        loss.item()


def test_a_step_tells_of_its_parts_in_order():
    model, made, scaler, config = step_parts(dict(), "adamw", grad_clip=1e-3)
    seen, state = [], {}
    x, y = tokens(6, 9), tokens(6, 9, seed=2)

    def lap(part):
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append(part)
        state[len(seen), part] = bool(grads) and torch.nn.utils.get_total_norm(grads).item()

    weights = [p.detach().clone() for p in model.parameters()]
    loss, norm, _ = training_step(model, model, made, scaler, x, y, 2, config, lap)
    assert seen == ["forward", "backward"] * 3 + ["clip", "optimizer"]
    assert state[1, "forward"] is False and state[2, "backward"] > 0  # gradients of the step before are gone
    assert state[6, "backward"] == pytest.approx(norm.item(), rel=1e-5)
    assert state[7, "clip"] == pytest.approx(1e-3, rel=1e-3)
    with torch.no_grad():
        for p, old in zip(model.parameters(), weights, strict=True):
            p.copy_(old)
    expected, grads = gradients(plain(model), x, y)
    assert error(loss, expected) < 1e-6
    assert error(norm, torch.nn.utils.get_total_norm(grads.values())) < 1e-5


# -------------------------------------------------------------------------------------------------- 7. the knobs


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """(flags, run directory) of 10 plain steps."""
    config, out = dict(dataset=dataset, max_iters=10, micro_batch_size=4, dropout=0.2), tmp_path_factory.mktemp("base")
    assert run(out_dir=out, **config) == 0
    return config, out


def test_activation_checkpointing_is_the_same_run(base, tmp_path, monkeypatch):
    calls, checkpoint = [], model_module.checkpoint

    def note(*args, **kwargs):
        calls.append(args)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(model_module, "checkpoint", note)
    assert run(out_dir=tmp_path, activation_checkpointing=True, **base[0]) == 0
    assert len(calls) == 10 * 2 * 2  # steps, micro batches, blocks
    assert_same_run(tmp_path, base[1])


def test_loss_chunks_is_the_same_run_but_for_rounding(base, tmp_path, monkeypatch):
    asked, fused = set(), model_module.linear_cross_entropy

    def note(x, weight, targets, dtype, vocab_size, chunks):
        asked.add(chunks)
        return fused(x, weight, targets, dtype, vocab_size, chunks)

    monkeypatch.setattr(model_module, "linear_cross_entropy", note)
    assert run(out_dir=tmp_path, loss_chunks=3, **base[0]) == 0
    assert asked == {3}
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert column(tmp_path, name) == pytest.approx(column(base[1], name), rel=1e-4)


def test_negative_loss_chunks_are_refused(dataset, tmp_path, capsys):
    code = run(dataset=dataset, out_dir=tmp_path / "run", loss_chunks=-1)
    refusal(capsys, code, "loss_chunks=-1", "must not be negative")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("compile", (True, False, "auto"))
def test_cuda_graphs_are_refused_on_a_cpu(compile, dataset, tmp_path, capsys):
    code = run(dataset=dataset, out_dir=tmp_path / "run", cuda_graphs=True, compile=compile)
    refusal(capsys, code, "cuda_graphs", "CUDA GPU", "leave it out")
    assert not (tmp_path / "run" / "last.pt").exists()


@pytest.mark.parametrize(
    "compiled, accumulation, world, words",
    (
        (True, 1, 1, None),
        (False, 1, 1, "cuda_graphs needs one CUDA GPU and compile=True"),
        (True, 1, 2, "cuda_graphs needs one CUDA GPU"),
        (True, 3, 1, "cuda_graphs needs one micro batch a step, not 3: raise micro_batch_size"),
    ),
)
def test_cuda_graphs_need_one_compiled_micro_batch_on_one_gpu(compiled, accumulation, world, words):
    env = Env(0, world, GPU.device, GPU.dtype, world > 1)
    if words is None:
        runtime.check_cuda_graphs(compiled, accumulation, env)
    else:
        with pytest.raises(ValueError, match=words):
            runtime.check_cuda_graphs(compiled, accumulation, env)


@pytest.mark.parametrize("graphs, mode", ((True, "reduce-overhead"), (False, None)))
def test_cuda_graphs_is_a_mode_of_the_compiler(graphs, mode, monkeypatch):
    asked = []

    def note(model, **options):
        asked.append(options)
        return model

    monkeypatch.setattr(torch, "compile", note)
    model = build(dict(), dtype=torch.float32)
    assert runtime.compile_model(model, TrainConfig(cuda_graphs=graphs), batch(), CPU) is model
    assert [options["mode"] for options in asked] == [mode]
    assert all(p.grad is None for p in model.parameters())


def test_a_resumed_run_compiles_as_the_whole_one_does(dataset, tmp_path, monkeypatch):
    asked = []

    def note(setting, device, training_flops):
        asked.append((setting, device, training_flops))
        return False, "a test"

    monkeypatch.setattr(runtime, "choose_compile", note)
    config = dict(dataset=dataset, out_dir=tmp_path, compile="auto", lr_decay_iters=20, batch_size=8, block_size=32)
    assert run(**config, max_iters=20, overwrite=True) == 0
    assert run(**config, max_iters=10, overwrite=True) == 0
    assert run(**config, max_iters=20, init_from="resume") == 0
    whole, half, resumed = asked
    assert whole == resumed and whole[2] == 2 * half[2]
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=50))
    assert whole[2] == pytest.approx(20 * 8 * 32 * model.flops_per_token())
    assert run(**config, eval_only=True, init_from="resume") == 0
    assert asked[3][2] == 0


def test_nothing_is_left_to_compile_in_a_run(base, tmp_path, monkeypatch, fresh_compiler):
    """Two graphs, of evaluation and of training, are there before the first step. The run needs no other."""
    compile_, compile_model, counts = torch.compile, runtime.compile_model, []
    graphs = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="aot_eager", **options))

    def note(*args):
        with torch._dynamo.config.patch(error_on_recompile=False):
            compiled = compile_model(*args)
        counts.append(graphs["unique_graphs"])
        return compiled

    monkeypatch.setattr(runtime, "compile_model", note)
    graphs.clear()
    assert run(out_dir=tmp_path, **base[0] | dict(compile=True)) == 0
    assert counts == [2] and graphs["unique_graphs"] == 2
    for name in ("train_loss", "val_loss"):
        assert column(tmp_path, name) == pytest.approx(column(base[1], name), rel=1e-4)
