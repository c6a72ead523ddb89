"""Runs on examples and on documents kept apart: every loss is the mean over its counted tokens, each document read by
itself, however a batch is split."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig
from nanodnt.data.examples import PreparedExamples
from nanodnt.engine import Trainer, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.settings import TrainConfig
from nanodnt.weights import model_from_checkpoint
from support.examples import UNEVEN, documents, mean_loss, write_documents, write_examples
from support.models import LLAMA, S5, SIZE, error, perturb, tokens
from support.prepared import open_prepared
from support.runs import column, load, metrics, run
from support.strikes import patched
from support.tolerances import LOSS, roundings

pytestmark = pytest.mark.usefixtures("quick")

T, EOT = 32, 256
COMMON = dict(doc_mask=True, batch_size=12, max_iters=12, eval_interval=6, eval_tokens=0, learning_rate=5e-3)
KINDS = {"examples": dict(), "text": dict(pos="rope", n_kv_head=1)}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: prepared folder}."""
    folder = tmp_path_factory.mktemp("documents")
    return {"examples": write_examples(folder / "a", **UNEVEN), "text": write_documents(folder / "b")}


@pytest.fixture(scope="module")
def wholes(folders, tmp_path_factory):
    """{kind: run directory} of runs without interruption, which keep a checkpoint of every fourth step."""
    outs = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, out in outs.items():
        assert run(out_dir=out, dataset=folders[kind], keep_every=4, **COMMON | KINDS[kind]) == 0
    return outs


def exact(path):
    """The model of a checkpoint in float64."""
    return model_from_checkpoint(load_checkpoint(path)).double().eval()


def examples_of(x) -> list:
    """The examples (ids, marks) of which these rows are: each begins with end of text, which no other token of it is
    but the last, its target. End of text after end of text is padding."""
    known, found = {tuple(ids[1:-1]): (ids, marks) for ids, marks in UNEVEN["train"]}, []
    assert len(known) == len(UNEVEN["train"])
    for row in x.tolist():
        begins = [*(i for i, token in enumerate(row) if token == EOT), len(row)]
        assert begins[0] == 0
        found += [known[tuple(row[a + 1 : b])] for a, b in zip(begins, begins[1:], strict=False) if b > a + 1]
    return found


def documents_of(ids) -> list:
    """The documents (ids, marks) of a window of T + 1 tokens of a text: a new one begins at every end of text among
    its inputs. All targets count, so that of a new document is read before it."""
    ends = [0, *(i for i in range(1, T) if ids[i] == EOT), T]
    return [(ids[a : b + 1], [2] + [1] * (b - a)) for a, b in zip(ends, ends[1:], strict=False)]


def step_by_hand(kind, data, step, model) -> float:
    """The loss of batch `step`."""
    x, y = data.batch(step, COMMON["batch_size"])[:2]
    if kind == "examples":
        return mean_loss(model, examples_of(x))
    rows = np.concatenate((x, y[:, -1:]), 1).tolist()
    return mean_loss(model, [document for row in rows for document in documents_of(row)])


def validation_by_hand(kind, data, model) -> float:
    if kind == "examples":
        return mean_loss(model, UNEVEN["val"])
    ids = np.fromfile(data.files["val"].name, "<u2").tolist()
    windows = [ids[i : i + T + 1] for i in range(0, len(ids) - T, T)]
    return mean_loss(model, [document for window in windows for document in documents_of(window)])


# ------------------------------------------------------------------------------------------------- what the loss is


@each_kind
def test_losses_are_those_of_documents_by_themselves(kind, folders, wholes):
    """Of training steps, at the start and later, and of validation."""
    data, losses = open_prepared(folders[kind], T), column(wholes[kind], "train_loss")
    for step in (0, 4, 8):
        by_hand = step_by_hand(kind, data, step, exact(wholes[kind] / f"step_{step}.pt"))
        assert losses[step + 1] == pytest.approx(by_hand, rel=LOSS), step
    val_losses = column(wholes[kind], "val_loss")
    assert val_losses[12] == pytest.approx(validation_by_hand(kind, data, exact(wholes[kind] / "last.pt")), rel=LOSS)
    assert val_losses[12] < val_losses[0] - 1  # it learns


@pytest.mark.parametrize("flags", (dict(), dict(LLAMA, **S5)), ids=("learned", "llama, S5"))
def test_a_step_is_the_mean_over_its_counted_targets(flags):
    """Also with a micro batch of which nothing counts; and gradients are those of single documents."""
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
        total = total + F.cross_entropy(logits, targets[row, part], ignore_index=-1, reduction="sum") / counted
    total.backward()
    for loss, norm, gradients in found:
        assert error(loss, total.detach()) < roundings(8)  # shares of the batch are fp32
        assert error(norm, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) < roundings(8)
        assert all(error(gradients[name], p.grad, floor=1e-3) < roundings(8) for name, p in model.named_parameters())


def other_targets(batch):
    """Examples.batch, but in batch 8 the targets that count are others."""

    def tampered(self, step, *args):
        x, y, positions = batch(self, step, *args)
        return x, np.where(y == -1, -1, 255) if step == 8 else y, positions

    return tampered


def test_after_a_rollback_the_later_batch_and_its_number_of_targets_go_together(folders, wholes, tmp_path):
    config = COMMON | dict(loss_spike=0.3, save_interval=4, keep_every=4)
    with patched(PreparedExamples, "batch", other_targets):
        assert run(out_dir=tmp_path, dataset=folders["examples"], **config) == 0
    rows = [row for row in metrics(tmp_path) if "train_loss" in row]
    assert [row["step"] for row in rows] == [*range(1, 9), *range(9, 13)] and load(tmp_path / "last.pt")["shift"] == 1
    data = open_prepared(folders["examples"], T)
    assert data.loss_tokens(8, 12) != data.loss_tokens(9, 12)
    by_hand = step_by_hand("examples", data, 9, exact(tmp_path / "step_8.pt"))
    assert column(tmp_path, "train_loss")[9] == pytest.approx(by_hand, rel=LOSS)
