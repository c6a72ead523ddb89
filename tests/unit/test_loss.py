"""The loss that keeps no logits, compared with torch's cross-entropy over all logits; its precision
and its memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from layers import loss as loss_module
from layers.loss import linear_cross_entropy
from support.hypotheses import drawn
from support.models import POST, batch, build, error, gradients, tokens
from support.operators import (
    IGNORED,
    Watch,
    assert_same_gradients,
    batch_ignoring,
    plain_loss,
    with_plain_loss,
)
from support.tolerances import LOSS, roundings

NETS = {
    "tied": dict(),
    "untied, bias": dict(tie_weights=False, bias=True, norm="layernorm"),
    "no final norm, no padding": dict(POST, vocab_size=64),
}


@pytest.mark.parametrize("flags", NETS.values(), ids=NETS)
def test_loss_and_gradients_are_those_of_the_logits(flags):
    model = build(flags)
    for positions in IGNORED.values():
        idx, targets = batch_ignoring(positions)
        expected = gradients(with_plain_loss(model), idx, targets)
        for chunks in (0, 1, 2, 3, 100):
            model.runtime.loss_chunks = chunks
            assert_same_gradients(gradients(model, idx, targets), expected, 1e-11)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("chunks", (1, 3))
def test_without_targets_that_count_loss_and_gradients_are_zero(chunks, dtype):
    model = build(dict(tie_weights=False), dtype=torch.float32).set_runtime(compute_dtype=dtype)
    idx = tokens(2, 7)
    model.runtime.loss_chunks = chunks
    loss, grads = gradients(model, idx, torch.full((2, 7), -1))
    assert loss == 0
    assert [name for name, grad in grads.items() if grad.count_nonzero()] == []


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


@given(st.data())
@drawn(25, 150)
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
    """x (4, 64, 32), weight (256, 32), both numbers of `dtype`, and targets below 200, a fifth of
    them ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 32, generator=generator).to(dtype).float()
    weight = (torch.randn(256, 32, generator=generator) * size / 32**0.5).to(dtype).float()
    targets = torch.randint(200, (4, 64), generator=generator)
    return x, weight, targets.masked_fill(torch.rand(4, 64, generator=generator) < 0.2, -1)


@pytest.mark.parametrize("chunks", (1, 3, 256))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_low_precision_costs_no_more_than_rounding_the_logits(dtype, chunks):
    """Compared with float64 on the same rounded input. Torch's loss in this dtype has no smaller
    error.

    Each logit, of size 1.5, is rounded once: by 0.3 eps on average. So the mean of 200 losses is
    off by 0.3 eps / √200, three times that at most; gradients, which are rounded once more, by half
    an eps. Sums are fp32."""
    x, weight, targets = some_logits(dtype)
    exact = functional_plain(x.double(), weight.double(), targets, torch.float64, 200)
    ours = functional(x, weight, targets, dtype, 200, chunks)
    theirs = functional_plain(x, weight, targets, dtype, 200)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    assert abs(ours[0] - exact[0]) < roundings(3 * 0.3 / 200**0.5, dtype) + exact[0] * LOSS
    for a, b, c in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert (a - c).norm() < (roundings(1 / 2, dtype) + roundings(4)) * c.norm()
        assert (a - c).norm() < 1.1 * (b - c).norm() + roundings(4) * c.norm()


def test_fp16_gradients_of_many_equal_targets_are_finite():
    """The gradient is summed over tokens before it is divided by their number. That sum must not
    leave the range of fp16: the loss scale cannot undo an overflow."""
    x, weight = torch.full((64, 1024, 2), 2.0), torch.zeros(128, 2)
    targets = tokens(64, 1024, vocab=65).masked_fill_(tokens(64, 1024, vocab=10, seed=2) < 7, 1)
    _, dx, dw = functional(x, weight, targets, torch.float16, 65)
    exact = functional_plain(x, weight, targets, torch.float32, 65)[2]
    assert dx.isfinite().all() and dw.isfinite().all()
    assert error(dw, exact) < roundings(2, torch.float16)


def test_a_second_derivative_raises():
    """A wrong one would go unnoticed. It raises for the loss alone, and for blocks before another
    loss."""
    model, (idx, targets) = build(dict(n_layer=1)), batch()
    x, weight = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    own = linear_cross_entropy(x, weight, torch.tensor([[1, 2, 0]]), torch.float32, 5)
    for loss, inputs in (
        (plain_loss(model(idx)[0], targets), model.parameters()),
        (own, (x, weight)),
    ):
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(loss, list(inputs), create_graph=True)


# ------------------------------------------------------------------------------------------- memory


def test_the_loss_needs_a_fraction_of_the_memory():
    x, weight, targets = torch.randn(8, 128, 32), torch.randn(4096, 32), tokens(8, 128, vocab=4096)
    with Watch() as unchunked:
        functional_plain(x, weight, targets, torch.float32, 4096)
    with Watch() as chunked:
        functional(x, weight, targets, torch.float32, 4096, 4)
    # logits and their gradient: the watch sees them
    assert unchunked.peak > 2 * x.shape[0] * x.shape[1] * 4096 * 4
    assert 4 * chunked.peak < unchunked.peak
    with Watch() as evaluation, torch.no_grad():
        linear_cross_entropy(x, weight, targets, torch.float32, 4096, 4)
    assert evaluation.peak < chunked.peak
    # nothing is computed twice, and evaluation makes no gradients
    assert [watch.calls["mm"] for watch in (chunked, evaluation)] == [3 * 4, 4]


def test_chunks_bound_the_logits(monkeypatch):
    """By default so many chunks that the logits of one fit LOGITS_BYTES, else as many as asked for.
    From 128 rows on, a chunk is a multiple of 128 rows, within the limit."""
    weight, fp32, bf16 = torch.randn(128, 1), torch.float32, torch.bfloat16
    for dtype, chunks, limit, n, expected in (
        (fp32, 0, 2**30, 32, 64),
        (fp32, 0, 64 * 128 * 4 - 1, 32, 32),
        (bf16, 0, 10 * 128 * 2, 32, 10),
        (fp32, 3, 1, 32, 22),
        (fp32, 2, 2**30, 250, 256),
        (fp32, 0, 300 * 128 * 4, 140, 256),
    ):
        monkeypatch.setattr(loss_module, "LOGITS_BYTES", limit)
        with Watch() as watch:
            functional(torch.randn(2, n, 1), weight, tokens(2, n, vocab=128), dtype, 128, chunks)
        assert max(shape[0] for shape in watch.shapes if shape[1:] == (128,)) == expected, (
            dtype,
            chunks,
            limit,
            n,
        )


@pytest.mark.parametrize("vocab, sequences", ((50304, 32), (151936, 69)))
def test_a_gpu_never_has_2_to_the_31_logits(vocab, sequences):
    """Tensors without storage are chunked as on a GPU. 32 × 1024 tokens with GPT-2's vocabulary are
    one chunk."""
    weight, x = torch.empty(vocab, 2, device="meta"), torch.empty(sequences, 1024, 2, device="meta")
    with Watch() as watch:
        functional(
            x,
            weight,
            torch.zeros(sequences, 1024, dtype=torch.long, device="meta"),
            torch.bfloat16,
            vocab,
            0,
        )
    rows = max(shape[0] for shape in watch.shapes if shape[1:] == (vocab,))
    assert rows * vocab < 2**31 and (rows == 32 * 1024) == (sequences == 32)
