"""The residual stream: its dtype, what is stored of it, and what is kept for the backward pass."""

import copy
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from layers import ops
from nanodnt.engine import choose_stream_dtype
from nanodnt.run.environment import Env
from support.depth import spread
from support.models import LAYOUTS, LLAMA, batch, build, error, gradients
from support.operators import fresh_compiler, saved_for_backward
from support.tolerances import FORWARD, as_near, flat, roundings, shaken

BF16 = torch.bfloat16


def with_stream(flags, dtype, n_layer=2):
    return (
        build(flags, n_layer=n_layer, dtype=torch.float32).train().set_runtime(stream_dtype=dtype)
    )


@pytest.mark.parametrize(
    "name", spread(LAYOUTS, fast=("S5", "post + LN", "llama + S5", "S5 + dyt + beta"))
)
def test_a_bf16_stream_is_the_same_function_but_for_rounding(name):
    """It is as far off as if each weight were rounded, at most."""
    single, model = (with_stream(LAYOUTS[name][0], dtype) for dtype in (None, BF16))
    exact = copy.deepcopy(single).double()
    idx, targets = batch()
    assert single.stream(idx).dtype == torch.float32
    assert model.stream(idx).dtype == BF16
    seen = []
    for block in model.blocks:
        for part in (block.attn, block.mlp):
            part.register_forward_hook(lambda part, args, x: seen.extend((args[0].dtype, x.dtype)))
    loss, grads = gradients(model, idx, targets)
    assert set(seen) == {BF16}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    (right, wanted), (usual, moved) = (
        gradients(m, idx, targets) for m in (exact, shaken(exact, BF16))
    )
    numbers, moved_numbers = flat(model(idx)[0], loss), flat(shaken(exact, BF16)(idx)[0], usual)
    assert as_near(numbers, moved_numbers, flat(exact(idx)[0], right), times=1 / 2)
    matrices = [name for name, grad in wanted.items() if grad.ndim == 2]
    ours, moved, wanted = (
        flat(*(some[name] for name in matrices)) for some in (grads, moved, wanted)
    )
    assert as_near(ours, moved, wanted, times=1 / 2)
    assert error(ours, wanted) > roundings(1 / 8, BF16)  # it was rounded


def test_sums_on_a_bf16_stream_are_fp32():
    """1 + 1/512 + 1/512 in bf16 steps of 1/128: each sum is rounded once, from fp32 operands."""
    x, y = torch.tensor([1.0]).to(BF16), torch.tensor([3 / 512])
    assert ops.add(x, y, BF16).item() == 1 + 1 / 128
    assert ops.add(x, y, None).item() == 1 + 3 / 512
    # and a little more, which bf16 would lose: the sum would be 1
    half_a_step = torch.tensor([1 / 256 + 2**-16])
    assert ops.add(x, half_a_step, BF16).item() == 1 + 1 / 128
    x, y = x.requires_grad_(), y.requires_grad_()
    ops.add(x, y, BF16).backward(torch.tensor([3.0], dtype=BF16))
    assert (x.grad.dtype, y.grad.dtype, x.grad.item(), y.grad.item()) == (
        BF16,
        torch.float32,
        3.0,
        3.0,
    )


@pytest.mark.parametrize(
    "setting, device, dtype, chosen",
    [
        ("auto", "cuda", BF16, BF16),
        ("auto", "meta", BF16, BF16),
        ("auto", "cuda", torch.float32, None),
        ("auto", "cpu", BF16, None),
        ("float32", "cuda", BF16, None),
    ],
)
def test_on_a_gpu_it_follows_the_products(setting, device, dtype, chosen):
    assert choose_stream_dtype(setting, Env(0, 1, torch.device(device), dtype, False)) is chosen


@pytest.mark.parametrize("flags", (dict(), dict(norm="layernorm")), ids=str)
def test_a_pre_norm_keeps_no_fp32_copy(flags):
    """In bf16 what goes into a product is kept once, as the product has it, and of the norm one
    number a token."""
    model = with_stream(flags, None, n_layer=1).set_runtime(compute_dtype=BF16)
    idx, targets = batch()
    slot, x = model.blocks[0].attn.pre, torch.randn(2, 7, 16, requires_grad=True)
    assert saved_for_backward(lambda: slot(x)) == [x.numel(), 2 * 7]
    assert slot(x).dtype == BF16
    assert model(idx, targets)[1].isfinite()


@pytest.mark.deep
@fresh_compiler()
def test_inductor_computes_the_rotary_angles_once():
    """Whatever the number of layers, in value and in code."""
    torch._inductor.config.force_disable_caches = True
    codes = {}
    for n_layer in (1, 2):
        torch._dynamo.reset()
        model, (idx, targets) = with_stream(LLAMA, None, n_layer), batch()
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        (_, loss), code = run_and_get_code(
            lambda compiled=compiled, at=(idx, targets): compiled(*at)
        )
        assert error(loss, model(idx, targets)[1]) < FORWARD
        codes[n_layer] = sum(len(re.findall(r"\b(cos|sin)\(", text)) for text in code)
    torch._inductor.config.force_disable_caches = False
    assert codes[1] == codes[2] > 0
