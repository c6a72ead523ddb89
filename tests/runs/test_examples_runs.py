"""Runs on examples: every loss is the mean over its counted tokens, each document read by
itself, however a batch is split."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from nanodnt.engine import Trainer, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.settings import TrainConfig
from nanodnt.weights import model_from_checkpoint
from support.examples import UNEVEN, documents, mean_loss, write_examples
from support.models import LLAMA, S5, SIZE, error, perturb, tokens
from support.prepared import open_prepared
from support.runs import column, run
from support.tolerances import LOSS, roundings

pytestmark = pytest.mark.usefixtures("quick")

T, EOT = 32, 256
FLAGS = dict(
    doc_mask=True, batch_size=12, max_iters=12, eval_interval=6, eval_tokens=0, learning_rate=5e-3
)


def exact(path):
    """The model of a checkpoint in float64."""
    return model_from_checkpoint(load_checkpoint(path)).double().eval()


def examples_of(x) -> list:
    """The examples (ids, marks) of which these rows are: each begins with end of text, which no
    other token of it is but the last, its target. End of text after end of text is padding."""
    known, found = {tuple(ids[1:-1]): (ids, marks) for ids, marks in UNEVEN["train"]}, []
    for row in x.tolist():
        begins = [*(i for i, token in enumerate(row) if token == EOT), len(row)]
        found += [known[tuple(row[a + 1 : b])] for a, b in pairwise(begins) if b > a + 1]
    return found


# --------------------------------------------------------------------------------- what the loss is


def test_losses_are_those_of_examples_by_themselves(tmp_path):
    """Of training steps, at the start and later, and of validation."""
    folder = write_examples(tmp_path / "data", **UNEVEN)
    assert run(out_dir=tmp_path / "run", dataset=folder, keep_every=4, **FLAGS) == 0
    data, losses = open_prepared(folder, T), column(tmp_path / "run", "train_loss")
    for step in (0, 4, 8):
        by_hand = mean_loss(
            exact(tmp_path / "run" / f"step_{step}.pt"), examples_of(data.batch(step, 12)[0])
        )
        assert losses[step + 1] == pytest.approx(by_hand, rel=LOSS), step
    val_losses = column(tmp_path / "run", "val_loss")
    by_hand = mean_loss(exact(tmp_path / "run" / "last.pt"), UNEVEN["val"])
    # it learns
    assert val_losses[12] == pytest.approx(by_hand, rel=LOSS) and val_losses[12] < val_losses[0] - 1


@pytest.mark.parametrize("flags", (dict(), dict(LLAMA, **S5)), ids=("learned", "llama, S5"))
def test_a_step_is_the_mean_over_its_counted_targets(flags):
    """Also with a micro batch of which nothing counts; and gradients are those of single
    documents."""
    rows = [[0, 1, 2, 3, 0, 1, 0, 1, 2], [*range(9)], [0, 1, 0, 1, 0, 1, 0, 1, 2]]
    idx, targets, positions = tokens(6, 9), tokens(6, 9, seed=3), torch.tensor(rows * 2)
    targets[0, 1:], targets[2:4], targets[5, 4:] = -1, -1, -1
    counted = int((targets != -1).sum())
    model = perturb(GPT(GPTConfig(**SIZE | dict(n_layer=1) | flags))).double().train()
    config = TrainConfig(grad_clip=0.0)
    fill_defaults(config)
    optimizer, scaler = make_optimizer(model, config), torch.amp.GradScaler("cpu", enabled=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.0

    def step(micro, counted):
        trainer = Trainer(model, optimizer, scaler, micro, config.grad_clip)
        loss, norm, _ = training_step(trainer, (idx, targets, positions), counted)
        return loss, norm, {name: p.grad.clone() for name, p in model.named_parameters()}

    found = [step(micro, counted) for micro in (6, 3, 2, 1)]
    assert error(step(2, None)[0], found[0][0]) > 0.01
    model.zero_grad()
    total = 0.0
    for row, part in documents(positions):
        logits = model(idx[row : row + 1, part])[0][0]
        total = (
            total
            + F.cross_entropy(logits, targets[row, part], ignore_index=-1, reduction="sum")
            / counted
        )
    total.backward()
    for loss, norm, gradients in found:
        assert error(loss, total.detach()) < roundings(8)  # shares of the batch are fp32
        assert error(
            norm, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        ) < roundings(8)
        assert all(
            error(gradients[name], p.grad, floor=1e-3) < roundings(8)
            for name, p in model.named_parameters()
        )
