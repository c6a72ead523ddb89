"""The training loop on tiny runs: what it logs and records, what its numbers mean, and what must
not change them."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from model import GPT, GPTConfig
from nanodnt.data.windows import PreparedText
from nanodnt.run import directory
from nanodnt.run.directory import copy_code, read_end, run_record
from nanodnt.run.metrics import draw_loss, training_seconds
from nanodnt.weights import load_trained, model_from_checkpoint
from support.prepared import load_script
from support.runs import (
    ROOT,
    TINY,
    assert_same_run,
    column,
    contents,
    different,
    evaluated,
    load,
    metrics,
    run,
)
from support.strikes import at_row, kill_me
from support.tolerances import FORWARD, LOSS

pytestmark = pytest.mark.usefixtures("quick")

# -------------------------------------------------------------------- what must not change training

UNRELATED = dict(
    eval_interval=6, log_interval=7, eval_tokens=0, save_interval=3, peak_flops=1e12, max_skipped=2
)


def training(out):
    return {
        row["step"]: [row[k] for k in ("train_loss", "lr", "grad_norm")]
        for row in metrics(out)
        if "lr" in row
    }


@pytest.fixture(scope="module")
def with_dropout(dataset, tmp_path_factory):
    """A run whose steps draw random numbers."""
    out = tmp_path_factory.mktemp("dropout")
    assert run(out_dir=out, dataset=dataset, dropout=0.3) == 0
    return out


def test_evaluation_and_logging_leave_training_alone(with_dropout, dataset, tmp_path):
    assert run(out_dir=tmp_path, dataset=dataset, dropout=0.3, **UNRELATED) == 0
    expected, got = training(with_dropout), training(tmp_path)
    assert list(expected) == list(range(1, 21)) and got == {
        step: expected[step] for step in (6, 7, 12, 14, 18, 20)
    }
    assert (
        different(load(tmp_path / "last.pt")["model"], load(with_dropout / "last.pt")["model"])
        == []
    )


def test_wandb_leaves_training_alone(with_dropout, dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Mock(**{"init.return_value.id": "abc"}))
    config = dict(out_dir=tmp_path / "run", dataset=dataset, dropout=0.3, wandb_log=True)
    config |= dict(wandb_group="g", wandb_tags="a, b,")
    with at_row(12, lambda: kill_me(signal.SIGTERM)):
        assert run(**config) == 143
    assert run(**config, init_from="resume") == 0
    assert_same_run(tmp_path / "run", with_dropout)
    first, second = [call.kwargs for call in wandb.init.call_args_list]
    assert (first["group"], first["tags"], first["id"], first["resume"]) == (
        "g",
        ["a", "b"],
        None,
        None,
    )
    assert (second["id"], second["resume"]) == ("abc", "allow")
    assert first["config"]["model"]["dropout"] == 0.3 and "git_commit" in first["config"]
    (found,) = wandb.init.return_value.summary.update.call_args.args
    assert (
        found["best_checkpoint"] == str(tmp_path / "run" / "best.pt") and found["end"]["step"] == 20
    )


def test_what_a_run_writes_leaves_training_alone(with_dropout, dataset, tmp_path, capsys):
    assert (
        run(out_dir=tmp_path, dataset=dataset, dropout=0.3, sample_interval=5, sample_start="AB")
        == 0
    )
    texts = column(tmp_path, "sample")
    assert list(texts) == [5, 10, 15, 20] and all(
        text.startswith("AB") and len(text) > 30 for text in texts.values()
    )
    assert all(f"sample: {text!r}" in capsys.readouterr().out for text in [texts[20]])
    assert (
        different(load(tmp_path / "last.pt")["model"], load(with_dropout / "last.pt")["model"])
        == []
    )
    trained = load_trained(str(tmp_path), "last.pt")
    wanted = plain_text(trained, "AB", 64)
    assert texts[20] == wanted


def plain_text(trained, text, n) -> str:
    """`text` and the n most likely tokens, one after the other, without a cache."""
    ids, half = trained.tokenizer.encode(text), trained.model.config.block_size // 2
    start = 0
    for _ in range(n):
        if len(ids) - start > trained.model.config.block_size:
            start = len(ids) - half
        ids.append(int(trained.model(torch.tensor([ids[start:]]))[0][0, -1].argmax()))
    return trained.tokenizer.decode(ids)


def test_bits_per_byte(tmp_path, capsys):
    """Of characters, of which some have two bytes."""
    text = "".join(f"{i:04d} é\n" for i in range(400))
    how = ["--name=x", "--tokenizer=chars", f"--out_dir={tmp_path / 'x'}"]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    load_script("local").main([f"--input={tmp_path / 'a.txt'}", *how])
    assert run(out_dir=tmp_path / "run", dataset=tmp_path / "x") == 0
    assert "no val_bpb" not in capsys.readouterr().out
    n = len(text) - int(len(text) * 0.9)
    n_bytes = len(text[-n:].encode())
    losses, found = column(tmp_path / "run", "val_loss"), column(tmp_path / "run", "val_bpb")
    assert found == {
        step: pytest.approx(loss * n / n_bytes / math.log(2)) for step, loss in losses.items()
    }
    assert n_bytes > n


def test_a_run_ends_at_its_target(with_dropout, dataset, tmp_path, capsys):
    """At the first evaluation that is low enough; with a lower target it goes on, and equals a run
    without one."""
    losses = column(with_dropout, "val_loss")
    target = sorted(losses.values())[1]
    step = next(step for step, loss in losses.items() if loss <= target)
    assert 0 < step < 20
    config = dict(out_dir=tmp_path, dataset=dataset, dropout=0.3)
    assert run(**config, target_val_loss=target) == 0
    end = read_end(tmp_path)
    assert (
        f"target_val_loss reached at step {step}: {end['tokens']:,} tokens"
        in capsys.readouterr().out
    )
    rows = metrics(tmp_path)
    assert rows[-1]["step"] == end["step"] == step and end["how"] == "target_val_loss reached"
    assert end["flops"] == pytest.approx(
        end["tokens"] * load_trained(str(tmp_path), "last.pt").model.flops_per_token()
    )
    assert 0 < end["training_s"] == training_seconds(rows)[-1] < end["wall_s"]
    assert run(**config, init_from="resume", target_val_loss=1e-9) == 0
    assert_same_run(tmp_path, with_dropout)
    end = read_end(tmp_path)
    # of both starts
    assert end["how"] == "done" and end["training_s"] == training_seconds(metrics(tmp_path))[-1]
    assert run(**config, init_from="resume") == 0  # nothing is left to do: what it took stays
    assert read_end(tmp_path) | dict(ended=end["ended"]) == end


@pytest.mark.parametrize("inside", ["", "part"])
def test_the_code_of_a_run_comes_back_from_its_record(inside, tmp_path, monkeypatch):
    """Changed files, a deleted one, and new ones, such as an optimizer in a file of its own; the
    repository is all or part of what git has."""
    top = tmp_path / "top"
    tree = tmp_path / "top" / inside
    out = tmp_path / "top" / "runs" / "source"
    write(tree, {name: name.encode() for name in ("model.py", "gone.py", "kept.py", "drawn.png")})
    write(tree, {".gitignore": b"out/\n", "other.py": b"other\n"})
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "one")
    monkeypatch.setattr(directory, "ROOT", tree)
    copy_code(out)
    assert not out.exists() and run_record()["git_changed_files"] == []
    (tree / "gone.py").unlink()
    new = {"model.py": "x = 'ü'\n".encode(), "nanodnt/optim/lion.py": b"lion", "a name.py": b"x\n"}
    write(tree, new | {"out/not.py": b"y\n", "drawn.png": b"\0"})
    for _ in range(2):  # the second time there are copies, too
        copy_code(out)
        copied = {
            path: raw
            for path, raw in contents(out).items()
            if raw is not None and path != ".gitignore"
        }
        assert copied == {os.path.join(inside, name): raw for name, raw in new.items()}
    changed = {entry[3:] for entry in run_record()["git_changed_files"]}
    assert changed >= {os.path.join(inside, name) for name in (*new, "gone.py", "drawn.png")}
    write(top / ".git", {"HEAD": b"damaged"})
    copy_code(out)
    assert (out / "nanodnt/optim/lion.py").exists() and (out / "kept.py").exists()
    assert (run_record()["git_commit"], run_record()["git_changed_files"]) == (None, None)


def git(folder, *words):
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=b", *words], check=True
    )


def write(folder, files: dict):
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)


# ---------------------------------------------------------------------------- what the numbers mean


def loss_by_hand(checkpoint: dict, dataset, windows) -> float:
    """The loss of a checkpoint's model on some of the 93 validation windows, of 32 tokens each."""
    tokens = torch.from_numpy(np.fromfile(dataset / "val.bin", "<u2").astype(np.int64))
    x, y = (tokens[first : first + 93 * 32].view(93, 32)[windows] for first in (0, 1))
    with torch.no_grad():
        logits = model_from_checkpoint(checkpoint)(x)[0]
    return F.cross_entropy(logits.flatten(0, 1).double(), y.flatten()).item()


def test_logged_losses_are_those_of_the_data(short, dataset):
    """val_loss is the mean over the validation windows of the model that is saved, train_loss over
    the step's batch."""
    checkpoint = load(short / "last.pt")
    # 512 // 32, evenly spaced
    expected = loss_by_hand(checkpoint, dataset, [i * 93 // 16 for i in range(16)])
    assert column(short, "val_loss")[30] == pytest.approx(expected, rel=LOSS)

    model = GPT(GPTConfig(**checkpoint["model_config"]), seed=1337)
    data = PreparedText(str(dataset), 32, 1337)
    x, y = map(torch.from_numpy, data.batch(0, 8))
    loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert column(short, "train_loss")[1] == pytest.approx(loss.item(), rel=LOSS)
    assert column(short, "grad_norm")[1] == pytest.approx(norm, rel=FORWARD)
    assert column(short, "lr") | {1: 0.002, 5: 0.01, 30: 0.001} == column(short, "lr")
    assert column(short, "tokens") == {step: step * 8 * 32 for step in range(31)}


def test_all_validation_windows(short, dataset, tmp_path, capsys):
    """93 windows in batches of 8: the last batch is not full, and counts with the tokens that it
    has."""
    expected = loss_by_hand(load(short / "best.pt"), dataset, slice(None))
    allowed = expected * LOSS + 5e-7  # six decimals are printed
    for micro in (8, 4):
        config = dict(
            init_from=short / "best.pt", eval_tokens=0, eval_only=True, micro_batch_size=micro
        )
        assert run(out_dir=tmp_path / "none", dataset=dataset, **config) == 0
        assert evaluated(capsys) == pytest.approx(expected, abs=allowed)


def test_eval_only_writes_nothing(short, dataset, tmp_path, capsys):
    before = contents(short)
    assert run(out_dir=short, dataset=dataset, init_from="resume", eval_only=True) == 0
    assert evaluated(capsys) == round(column(short, "val_loss")[30], 6)
    assert contents(short) == before
    assert (
        run(out_dir=tmp_path / "none", dataset=dataset, init_from=short / "prev.pt", eval_only=True)
        == 0
    )
    assert evaluated(capsys) == round(column(short, "val_loss")[20], 6)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ records

FIELDS = dict(
    step=int,
    tokens=int,
    train_loss=float,
    val_loss=float,
    lr=float,
    grad_norm=float,
    tokens_per_s=float,
)
FIELDS |= dict(peak_mem_bytes=int, skipped_steps=int)


def test_the_run_directory(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("train.draw_loss", draw_loss)
    monkeypatch.setattr("nanodnt.run.directory.run_record", run_record)
    out = tmp_path / "new" / "run"
    config = tmp_path / "config.py"
    config.write_text("warmup_iters = 3\nmax_iters = 12\n")
    given = {k: v for k, v in TINY.items() if k not in ("warmup_iters", "max_iters")}
    argv = ["train.py", str(config), *(f"--{k}={v}" for k, v in given.items())]
    argv += [f"--out_dir={out}", f"--dataset={dataset}", "--peak_flops=1e9"]
    monkeypatch.setattr(sys, "argv", argv)
    assert train.main() == 0
    names = [".lock", "best.pt", "config.json", "last.pt", "loss.png", "metrics.jsonl", "prev.pt"]
    assert sorted(path.name for path in out.iterdir()) == names

    rows = metrics(out)
    for row in rows[1:]:
        wanted = {k: t for k, t in FIELDS.items() if k != "val_loss" or row["step"] in (10, 12)}
        assert {k: type(row[k]) for k in wanted} == wanted
        assert 0 < row["goodput"] <= 1 and row["evaluating_s"] >= 0
        assert row["mfu"] > 0 and row["tokens_per_s"] > 0 and row["peak_mem_bytes"] > 50e6
        # a token: 6 per matrix weight and head, 12·L·d·T for attention
        flops = row["mfu"] * 1e9 / row["tokens_per_s"]
        assert flops == pytest.approx(6 * (2 * 12 * 32 * 32 + 64 * 32) + 12 * 2 * 32 * 32)

    record = json.loads((out / "config.json").read_text())
    train_config, model_config = record["train"], record["model"]
    assert (
        train_config["warmup_iters"],
        train_config["max_iters"],
        train_config["lr_decay_iters"],
    ) == (3, 12, 12)
    # resolved, not None
    assert train_config["weight_decay"] == 0.1 and model_config["vocab_size"] == 50
    assert record["command"] == argv and record["versions"]["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_a_run_still_ends_well(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("train.draw_loss", draw_loss)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=2) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert load(tmp_path / "last.pt")["step"] == 2


def test_a_wandb_that_dies_does_not_end_the_run(dataset, tmp_path, monkeypatch, capsys):
    """Its own process may be killed. Its BrokenPipeError is not that of the run's output, which
    ends a run in silence. One that cannot start, without a login for instance, is no reason to
    begin."""
    error = BrokenPipeError(32, "Broken pipe")
    wandb = Mock(**{"init.return_value.id": "abc"})
    wandb.init.return_value.log.side_effect = wandb.init.return_value.finish.side_effect = error
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = dict(out_dir=tmp_path / "run", dataset=dataset, max_iters=2, wandb_log=True)
    assert run(**config) == 0
    assert load(tmp_path / "run" / "last.pt")["step"] == 2
    said = capsys.readouterr().err
    assert f"note: wandb did not take the metrics of step 2 ({error})" in said
    assert f"note: wandb did not take the end of the run ({error})" in said
    before = contents(tmp_path / "run")
    wandb.init.side_effect = type("UsageError", (Exception,), {})("No API key configured.\nLog in")
    assert run(**config, overwrite=True) == 1
    assert (
        "wandb did not start (No API key configured.): pip install wandb, run"
        in capsys.readouterr().err
    )
    assert contents(tmp_path / "run") == before
