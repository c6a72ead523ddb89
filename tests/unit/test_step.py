"""One training step: it waits for no device and reports its phases in order. Arrays on a device,
and attention."""

from copy import deepcopy

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.engine import Trainer, training_step
from nanodnt.optim import make_optimizer
from support.models import LLAMA, NGPT, S5, SIZE, error, gradients, off_unit, tokens
from support.operators import NoWaiting, with_plain_loss
from support.optimizers import filled
from support.runs import different
from support.tolerances import LOSS, roundings


def make_trainer(flags, optimizer, grad_clip, fp16=False, **settings) -> Trainer:
    """Of a tiny model, in micro batches of 2 rows."""
    model = GPT(GPTConfig(**SIZE | dict(n_layer=1) | flags)).train()
    model.set_runtime(compute_dtype=torch.float16 if fp16 else None)
    optimizer = make_optimizer(model, filled(optimizer=optimizer))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    scaler = torch.amp.GradScaler("cpu", enabled=fp16, init_scale=1024)
    return Trainer(model, optimizer, scaler, 2, grad_clip, **settings)


@pytest.mark.parametrize("grad_clip", (1.0, pytest.param(0.0, marks=pytest.mark.deep)))
@pytest.mark.parametrize(
    "optimizer, flags",
    (
        ("adamw", dict()),
        ("msgdw", S5),
        ("muon", dict(sigma_reparam=True, dropout=0.1)),
        ("adam_mini", LLAMA),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("fp16", (False, True), ids=("fp32", "fp16"))
def test_a_step_waits_for_nothing(optimizer, flags, grad_clip, fp16):
    trainer = make_trainer(flags, optimizer, grad_clip, fp16)
    x = tokens(6, 9)
    y = tokens(6, 9, seed=2)
    y[0, :4] = -1
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with NoWaiting() as watch:
        for _ in range(2):
            loss, norm, found_inf = training_step(trainer, (x, y))
    assert watch.calls and not found_inf and loss.isfinite() and norm > 0
    assert [
        name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])
    ] == []
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        loss.item()


def test_unit_rows_after_a_step_and_a_skipped_one():
    trainer, rows = make_trainer(NGPT, "adamw", 1.0), (tokens(6, 9), tokens(6, 9, seed=2))
    weights = trainer.model.state_dict()
    training_step(trainer, rows)
    assert off_unit(weights) < roundings(SIZE["n_embd"])
    before = deepcopy(weights)
    trainer.model.wte.weight.register_hook(lambda grad: grad * torch.nan)
    assert training_step(trainer, rows).found_inf and different(weights, before) == []


def test_a_step_tells_of_its_phases_in_order():
    seen, x, y = [], tokens(6, 9), tokens(6, 9, seed=2)

    def note(phase):
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append((phase, bool(grads) and torch.nn.utils.get_total_norm(grads).item()))

    trainer = make_trainer(dict(), "adamw", 1e-3, on_phase_end=note)
    model, weights = trainer.model, [p.detach().clone() for p in trainer.model.parameters()]
    loss, norm, _ = training_step(trainer, (x, y))
    phases, norms = zip(*seen, strict=True)
    assert phases == ("forward", "backward") * 3 + ("clip", "optimizer")
    assert norms[0] is False and norms[1] > 0  # the gradients of the step before are gone
    assert norms[5] == pytest.approx(norm.item(), rel=roundings(8))
    assert norms[6] == norms[5]  # the optimizer clips
    assert norms[7] == pytest.approx(1e-3, rel=1e-3)
    for p, old in zip(model.parameters(), weights, strict=True):
        p.data = old
    expected, grads = gradients(with_plain_loss(model), x, y)
    assert error(loss, expected) < LOSS
    assert error(norm, torch.nn.utils.get_total_norm(grads.values())) < roundings(8)
