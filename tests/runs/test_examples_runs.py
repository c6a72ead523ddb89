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
from support.runs import (
    column,
    load,
    metrics,
    patched,
    run,
)
from support.tracked import tracks

pytestmark = pytest.mark.usefixtures("quick", "one_thread")

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
        assert losses[step + 1] == pytest.approx(by_hand, rel=2e-6), step
    val_losses = column(wholes[kind], "val_loss")
    assert val_losses[12] == pytest.approx(validation_by_hand(kind, data, exact(wholes[kind] / "last.pt")), rel=2e-6)
    assert val_losses[12] < val_losses[0] - 1  # it learns


def test_without_doc_mask_an_example_reads_those_before_it(folders, wholes, tmp_path):
    """And still its answers alone count: against all logits of whole rows."""
    assert run(out_dir=tmp_path, dataset=folders["examples"], keep_every=4, **COMMON | dict(doc_mask=False)) == 0
    data = open_prepared(folders["examples"], T)
    x, y = map(torch.from_numpy, data.batch(8, 12))
    counted = sum(sum(mark == 1 for mark in marks) for _, marks in examples_of(x))
    assert counted == (y != -1).sum()
    logits = exact(tmp_path / "step_8.pt")(x)[0]
    by_hand = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum") / counted
    losses = [column(out, "train_loss") for out in (tmp_path, wholes["examples"])]
    assert losses[0][9] == pytest.approx(by_hand.item(), rel=2e-6)
    assert losses[0][1] != pytest.approx(losses[1][1], rel=1e-5)


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
    assert error(step(2, 0)[0], found[0][0]) > 0.01
    model.zero_grad()
    total = 0.0
    for row, part in documents(positions):
        logits = model(idx[row : row + 1, part])[0][0]
        total = total + F.cross_entropy(logits, targets[row, part], ignore_index=-1, reduction="sum") / counted
    total.backward()
    for loss, norm, gradients in found:
        assert error(loss, total.detach()) < 1e-6  # shares of the batch are fp32
        assert error(norm, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) < 1e-6
        assert all(error(gradients[name], p.grad, floor=1e-3) < 1e-6 for name, p in model.named_parameters())


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
    assert column(tmp_path, "train_loss")[9] == pytest.approx(by_hand, rel=2e-6)


# -------------------------------------------------------------------------------------------------- what is recorded


def measured(model, documents) -> tuple:
    """([largest |q·k|/√head_dim of each layer over pairs of a query and the keys up to it], variance of the stream at
    the end over channels, mean over tokens). q and k are those that attention is called with."""
    attention, pairs, ends = F.scaled_dot_product_attention, [], []

    def note(q, k, v, **options):
        pairs.append((q, k))
        return attention(q, k, v, **options)

    largest = [0.0] * model.config.n_layer
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", note)
        for ids in documents:
            pairs.clear()
            ends += model.stream(torch.tensor([ids]))[0].var(-1, correction=0).tolist()
            for layer, (q, k) in enumerate(pairs):
                logits = (q @ k.mT).tril() / q.shape[-1] ** 0.5
                largest[layer] = max(largest[layer], logits.abs().max().item())
    return largest, sum(ends) / len(ends)


def test_what_is_tracked_is_of_documents_by_themselves(folders, wholes, tmp_path):
    """Of the first validation rows, as many as a step has, with their padding. Tracking changes nothing in the run."""
    assert run(out_dir=tmp_path, dataset=folders["examples"], track_interval=4, keep_every=4, **COMMON) == 0
    data, others = open_prepared(folders["examples"], T, doc_mask=True), []
    x, _, positions = data.val_batch(data.validation()[:12], 12)
    parts = [x[row, part].tolist() for row, part in documents(positions)]
    assert len(parts) > 20 and [*tracks(tmp_path)] == [4, 8, 12]
    for step, track in tracks(tmp_path).items():
        model = exact(tmp_path / f"step_{step}.pt")
        logits, variance = measured(model, parts)
        assert track["logit_max"] == pytest.approx(logits, rel=1e-5)
        assert track["stream_var"][-1] == pytest.approx(variance, rel=1e-5)
        others.append(measured(model, x.tolist()))
        assert others[-1][1] != pytest.approx(variance, rel=1e-4)
    found = [track["logit_max"] for track in tracks(tmp_path).values()]
    assert not np.allclose(found, [logits for logits, _ in others], rtol=1e-3)
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert column(tmp_path, name) == column(wholes["examples"], name)
