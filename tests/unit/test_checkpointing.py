"""Activation checkpointing: no bit of the result changes, and only the stream between blocks is
kept."""

import pytest
import torch

import model as model_module
from nanodnt.generate import generate
from support.models import LLAMA, S5, batch, build, gradients
from support.operators import saved_for_backward


def with_and_without(model, f) -> tuple:
    """f() with and without checkpointed blocks, with the same random numbers."""
    results = []
    for model.runtime.checkpointing in (True, False):
        torch.manual_seed(11)
        results.append(f())
    return results


EXPERTS = dict(LLAMA, gain="branch", bias=True, n_expert=3, n_expert_shared=1, balance="bias")
FLAGS = (
    dict(),
    LLAMA,
    dict(S5, dropout=0.2, drop_path=0.5),
    dict(LLAMA, dropout=0.3, sigma_reparam=True),
    EXPERTS,
)
FLAGS += (dict(n_expert=4),)  # with a balance loss


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
def test_checkpointing_changes_no_bit(flags, dtype):
    model = build(flags, dtype=torch.float32).train().set_runtime(compute_dtype=dtype)
    idx, targets = batch()
    # documents
    for given in (
        (idx, targets),
        (idx, targets, torch.tensor([[0, 1, 2, 0, 1, 2, 3], [*range(6), 0]])),
    ):
        ours, plain = with_and_without(model, lambda given=given: gradients(model, *given))
        assert torch.equal(ours[0], plain[0])
        assert [
            name for name, grad in ours[1].items() if not torch.equal(grad, plain[1][name])
        ] == []
        sizes = with_and_without(
            model, lambda given=given: saved_for_backward(lambda: model(*given))
        )
        assert 2 * sum(sizes[0]) < sum(sizes[1]) and len(sizes[0]) < len(sizes[1])


def test_checkpointing_keeps_one_stream_a_block():
    idx, targets = batch()
    kept = []
    for layers in (2, 5):
        model = build(dict(), n_layer=layers)
        model.runtime.checkpointing = True
        kept.append(sum(saved_for_backward(lambda model=model: model(idx, targets))))
    assert kept[1] - kept[0] == 3 * 2 * 7 * 16


def test_checkpointing_has_no_effect_without_gradients(monkeypatch):
    model, (idx, targets) = build(LLAMA), batch()
    # in eval mode, with gradients on
    evaluated = with_and_without(model, lambda: model(idx, targets)[1].detach())
    assert torch.equal(*evaluated)

    def forbidden(*args, **kwargs):
        raise AssertionError("checkpointed without need")

    monkeypatch.setattr(model_module, "checkpoint", forbidden)
    with torch.no_grad():
        assert torch.equal(*with_and_without(model, lambda: model(idx, targets)[1]))
        assert torch.equal(*with_and_without(model, lambda: model.train()(idx)[0]))
    assert torch.equal(
        *with_and_without(model, lambda: generate(model.eval(), idx, 6, temperature=0))
    )
