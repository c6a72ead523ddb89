"""train.py end to end on tiny runs: exact resuming, bad gradients, damaged and failing files, rules of resuming.

Runs happen in this process, except where the process is what is tested.
"""

import errno
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    TINY,
    assert_same_run,
    bits,
    checkpoints,
    column,
    different,
    files,
    finish,
    load,
    logged,
    make_dataset,
    metrics,
    run,
    some_step,
    spoil_gradients,
    start,
    tensors,
    wait_for_row,
)

import rundir
import runtime
import train
from model import GPT, GPTConfig

DRAW_LOSS = rundir.draw_loss
FIELDS = dict(step=int, tokens=int, train_loss=float, val_loss=float, lr=float, grad_norm=float, tokens_per_s=float)
FIELDS |= dict(peak_mem_bytes=int, skipped_steps=int)


@pytest.fixture(scope="module", autouse=True)
def quick(one_thread):
    """Runs on one thread, without drawing loss.png (a quarter of a second each)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        yield


class Crash(BaseException):
    """Ends a run on the spot, as a power cut would: nothing is caught, nothing is saved."""


@contextmanager
def at_row(step, action):
    """Do `action()` right after the row of `step` is written to metrics.jsonl."""
    write = rundir.Metrics.write

    def write_then_act(self, row):
        write(self, row)
        if row["step"] == step:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir.Metrics, "write", write_then_act)
        yield


def kill_me(*signals):
    for signum in signals:
        os.kill(os.getpid(), signum)


def crash():
    raise Crash


@contextmanager
def optimizers(prepare):
    """Call prepare(model, optimizer) when a run makes its optimizer."""
    make = train.make_optimizer

    def make_and_prepare(model, config):
        optimizer = make(model, config)
        prepare(model, optimizer)
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_optimizer", make_and_prepare)
        yield


def refusal(capsys, code, *words):
    """Check that a run ended with exit code 1 and one line on stderr that has these words in it."""
    err = capsys.readouterr().err
    assert code == 1
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert [w for w in words if str(w) not in err] == [], err


# ------------------------------------------------------------------------------------------------- exactness (CPU)

LONG = dict(max_iters=200, eval_interval=40, save_interval=7)
EXACT = {
    "adamw, dropout": dict(dropout=0.2, micro_batch_size=4),
    "msgdw": dict(optimizer="msgdw", learning_rate=0.5),
}


@pytest.fixture(scope="module", params=EXACT)
def whole(request, dataset, tmp_path_factory):
    """(flags, run directory) of 200 steps without interruption."""
    config = dict(LONG, dataset=dataset, **EXACT[request.param])
    out = tmp_path_factory.mktemp("whole")
    assert run(out_dir=out, **config) == 0
    return config, out


def test_a_run_logs_every_step_once(whole):
    _, out = whole
    assert [row["step"] for row in metrics(out)] == list(range(201))
    assert list(column(out, "train_loss")) == list(range(1, 201))
    assert list(column(out, "val_loss")) == [0, 40, 80, 120, 160, 200]
    losses = list(column(out, "train_loss").values())
    assert len(set(losses)) > 190 and losses[-1] < losses[0] - 1  # it learns


def test_a_killed_run_goes_on_exactly(whole, tmp_path):
    config, reference = whole
    process = start(out_dir=tmp_path, **config)
    wait_for_row(process, tmp_path, some_step(4, 60))
    process.kill()
    finish(process, -signal.SIGKILL)
    assert load(tmp_path / "last.pt")["step"] < 200
    assert run(out_dir=tmp_path, init_from="resume", **config) == 0
    assert_same_run(tmp_path, reference)


def test_a_run_stopped_twice_goes_on_exactly(whole, tmp_path, capsys):
    config, reference = dict(whole[0], out_dir=tmp_path / "run", init_from="auto"), whole[1]
    first, second = sorted(random.sample(range(2, 199), 2))
    print(f"drawn: steps {first} and {second}")
    with at_row(first, lambda: kill_me(signal.SIGTERM)):
        assert run(**config) == 128 + signal.SIGTERM  # auto starts where there is nothing to resume
    assert load(tmp_path / "run" / "last.pt")["step"] == first
    assert "SIGTERM" in capsys.readouterr().out
    with at_row(second, lambda: kill_me(signal.SIGINT)):
        assert run(**config) == 128 + signal.SIGINT
    assert load(tmp_path / "run" / "last.pt")["step"] == second
    assert run(**config) == 0
    assert_same_run(tmp_path / "run", reference)
    before = checkpoints(tmp_path / "run")
    assert run(**config) == 0  # and a finished run has nothing to do
    assert logged(tmp_path / "run") == logged(reference)
    assert checkpoints(tmp_path / "run") == before


FURTHER = {
    "muon, dropout": dict(optimizer="muon", dropout=0.2, blockwise_lr=True, learning_rate=5e-3),
    "muon, original": dict(optimizer="muon", muon_adjust_lr="original", nesterov=False, adamw_learning_rate=1e-2),
    "adam_mini, dyt": dict(optimizer="adam_mini", schedule="dyt", micro_batch_size=4),
    "msgdw, nesterov": dict(optimizer="msgdw", learning_rate=0.1, nesterov=True, schedule="linear"),
    "msgdw, dampening": dict(optimizer="msgdw", learning_rate=0.5, dampening=0.5),
    "adamw, blockwise, wsd": dict(blockwise_lr=True, learning_rate=2e-3, schedule="wsd", bias=True),
}


@pytest.mark.parametrize("name", FURTHER)
def test_every_optimizer_goes_on_exactly(name, dataset, tmp_path):
    """Stopped by SIGTERM, then cut off by a crash between two checkpoints."""
    config = dict(dataset=dataset, max_iters=40, save_interval=7, init_from="auto", **FURTHER[name])
    assert run(out_dir=tmp_path / "whole", **config) == 0
    losses = column(tmp_path / "whole", "train_loss")
    assert losses[40] < losses[1] - 0.8
    with at_row(some_step(2, 18), lambda: kill_me(signal.SIGTERM)):
        assert run(out_dir=tmp_path / "run", **config) == 128 + signal.SIGTERM
    with at_row(some_step(20, 39), crash), pytest.raises(Crash):
        run(out_dir=tmp_path / "run", **config)
    assert run(out_dir=tmp_path / "run", **config) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.fixture(scope="module")
def short(dataset, tmp_path_factory):
    """A tiny run of 30 steps without interruption, evaluated and saved every 10."""
    out = tmp_path_factory.mktemp("short")
    assert run(out_dir=out, dataset=dataset, max_iters=30) == 0
    return out


@pytest.fixture
def begun(dataset, tmp_path, first_20):
    """A fresh copy of the first 20 of those 30 steps: prev.pt is of step 10, last.pt of step 20."""
    shutil.copytree(first_20, tmp_path / "begun")
    return tmp_path / "begun"


@pytest.fixture(scope="module")
def first_20(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("first_20")
    assert run(out_dir=out, dataset=dataset, max_iters=20, lr_decay_iters=30) == 0
    assert [load(out / name)["step"] for name in ("prev.pt", "last.pt")] == [10, 20]
    return out


def resume(out, dataset, **changes):
    return run(**dict(dict(out_dir=out, dataset=dataset, max_iters=30, init_from="resume"), **changes))


def test_max_iters_can_be_extended(begun, short, dataset, capsys):
    assert resume(begun, dataset) == 0
    assert "max_iters 20 → 30" in capsys.readouterr().out
    assert_same_run(begun, short)


def stop_in_evaluation(patch):
    """SIGTERM while the second evaluation, that of step 10, is under way."""
    evaluate, calls = train.evaluate, []

    def evaluate_and_stop(*args):
        calls.append(args)
        if len(calls) == 2:
            kill_me(signal.SIGTERM)
        return evaluate(*args)

    patch.setattr(train, "evaluate", evaluate_and_stop)


def stop_in_forward(patch):
    """SIGTERM in the middle of a training step."""
    forward, calls = GPT.forward, []

    def forward_and_stop(self, *args, **kwargs):
        calls.append(self.training)
        if sum(calls) == 14:
            kill_me(signal.SIGTERM)
        return forward(self, *args, **kwargs)

    patch.setattr(GPT, "forward", forward_and_stop)


def crash_before_the_second_checkpoint(patch):
    """The end comes while step 0 has the only checkpoint."""
    write = rundir.Metrics.write
    patch.setattr(rundir.Metrics, "write", lambda self, row: write(self, row) if row["step"] < 5 else crash())


def crash_after_the_row(patch):
    """The end comes between the row of an evaluated step and its checkpoint."""
    save = rundir.save_checkpoint
    patch.setattr(rundir, "save_checkpoint", lambda *a: save(*a) if a[1]["step"] < 20 else crash())


def crash_between_renames(patch):
    """The end comes when prev.pt is replaced and last.pt not yet."""
    replace, calls = os.replace, []

    def replace_or_crash(source, target):
        calls.append(Path(target).name)
        if calls.count("last.pt") == 3:
            crash()
        replace(source, target)

    patch.setattr(os, "replace", replace_or_crash)


def crash_in_a_row(patch):
    """The end comes when half of a row is on disk."""
    write = rundir.Metrics.write

    def write_half(self, row):
        if row["step"] < 17:
            return write(self, row)
        with open(self.path, "a") as file:
            file.write('{"step": 17, "tok')
        crash()

    patch.setattr(rundir.Metrics, "write", write_half)


INTERRUPTIONS = [stop_in_evaluation, stop_in_forward, crash_before_the_second_checkpoint, crash_after_the_row]
INTERRUPTIONS += [crash_between_renames, crash_in_a_row]


@pytest.mark.parametrize("interrupt", INTERRUPTIONS)
def test_interrupted_at_a_bad_moment(interrupt, short, dataset, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch)
        with pytest.raises(Crash) if "crash" in interrupt.__name__ else nullcontext():
            assert run(out_dir=tmp_path, dataset=dataset, max_iters=30) == 128 + signal.SIGTERM
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=30, init_from="resume") == 0
    assert_same_run(tmp_path, short)


def test_the_evaluation_made_up_for_on_resume_may_be_the_best(dataset, tmp_path):
    config, stop_at = dict(out_dir=tmp_path, dataset=dataset, max_iters=30), [10]
    losses = {0: 5.0, 10: 1.0, 20: 4.0, 30: 4.0}

    def evaluate(model, data, config, micro, env, stop):
        step = 10 * len(seen)
        if step in stop_at:
            stop_at.clear()
            kill_me(signal.SIGTERM)
            assert stop.agreed()
            return None
        seen.append(step)
        return losses[step]

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", evaluate)
        assert run(**config) == 128 + signal.SIGTERM
        assert load(tmp_path / "best.pt")["step"] == 0 and load(tmp_path / "last.pt")["step"] == 10
        for _ in range(2):  # the second time nothing is left to do
            assert run(**config, init_from="resume") == 0
    assert seen == [0, 10, 20, 30]
    assert load(tmp_path / "best.pt")["step"] == 10 and load(tmp_path / "last.pt")["best_val_loss"] == 1.0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(31))
    assert {row["step"]: row["val_loss"] for row in rows if "val_loss" in row} == losses


def test_resuming_after_an_interrupted_evaluation_with_another_interval(dataset, tmp_path):
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=30)
    with pytest.MonkeyPatch.context() as patch:
        stop_in_evaluation(patch)
        assert run(**config) == 128 + signal.SIGTERM
    assert run(**config | dict(eval_interval=15), init_from="resume") == 0
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(31))
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 15, 30]


def test_a_kill_in_the_first_save(dataset, tmp_path):
    """When all that exists is the new file, before it became last.pt."""
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=4) == 0
    expected = load(tmp_path / "last.pt")["model"]
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=2, lr_decay_iters=4, overwrite=True) == 0
    os.replace(tmp_path / "last.pt", tmp_path / "new.pt")
    (tmp_path / "prev.pt").unlink()
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=4, init_from="auto") == 0
    assert different(load(tmp_path / "last.pt")["model"], expected) == []


def test_overwrite_removes_only_the_runs_own_checkpoints(dataset, tmp_path):
    tmp_path.joinpath("kept_by_hand.pt").touch()
    for _ in range(2):
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=2, overwrite=True) == 0
    assert tmp_path.joinpath("kept_by_hand.pt").exists()


def test_resuming_in_fp16_what_began_in_fp32(dataset, tmp_path):
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=2) == 0
    for dtype in ("float16", "float32"):
        iters = load(tmp_path / "last.pt")["step"] + 2
        config = dict(out_dir=tmp_path, dataset=dataset, max_iters=iters, dtype=dtype)
        assert run(**config, init_from="resume") == 0
    assert load(tmp_path / "last.pt")["step"] == 6


@pytest.mark.parametrize(
    "name, tflops",
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312)]
    + [("NVIDIA A800 80GB PCIe", 312), ("Tesla T4", 65), ("NVIDIA GH200 480GB", 989), ("NVIDIA GeForce RTX 4090", 165)]
    + [("NVIDIA RTX A1000 Laptop GPU", None), ("NVIDIA T400", None), ("Something New", None)],
)
def test_peak_flops_by_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda")
    assert runtime.peak_flops(device, torch.bfloat16) == (tflops and tflops * 1e12)
    assert runtime.peak_flops(device, torch.bfloat16, 5e12) == 5e12  # the flag wins
    assert runtime.peak_flops(device, torch.float32) is None


def test_a_second_ctrl_c_ends_the_run_at_once(dataset, tmp_path, capsys):
    with at_row(7, lambda: kill_me(signal.SIGINT, signal.SIGINT)):
        assert run(out_dir=tmp_path, dataset=dataset) == 130
    assert load(tmp_path / "last.pt")["step"] == 0
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # given back


def test_under_torchrun_a_second_ctrl_c_is_the_first():
    """The terminal sends it to every process, and torchrun sends it on."""
    env = runtime.Env(0, 1, torch.device("cpu"), torch.float32, distributed=True)
    with runtime.Stop(env) as stop:
        try:
            kill_me(signal.SIGINT, signal.SIGINT)
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("the run was cut off")
        assert stop.signal == signal.SIGINT


def test_ctrl_c_saves_although_nobody_reads_stdout(dataset, tmp_path):
    """Ctrl-C in `python train.py | tee log` also ends tee."""
    process = start(out_dir=tmp_path, dataset=dataset, max_iters=10**6, lr_decay_iters=30, eval_interval=10**6)
    wait_for_row(process, tmp_path, 9)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    assert process.wait() == 130, err
    assert "Traceback" not in err
    assert load(tmp_path / "last.pt")["step"] == metrics(tmp_path)[-1]["step"] >= 9


# ------------------------------------------------------------- what must not change the training, and the batch split

UNRELATED = {
    "eval_interval": dict(eval_interval=7),
    "log_interval": dict(log_interval=7),
    "eval_tokens": dict(eval_tokens=0),
    "save_interval": dict(save_interval=3),
    "peak_flops, max_skipped": dict(peak_flops=1e12, max_skipped=2),
}


def training(out):
    return {row["step"]: [row[k] for k in ("train_loss", "lr", "grad_norm")] for row in metrics(out) if "lr" in row}


@pytest.fixture(scope="module")
def with_dropout(dataset, tmp_path_factory):
    """A run whose steps draw random numbers."""
    out = tmp_path_factory.mktemp("dropout")
    assert run(out_dir=out, dataset=dataset, dropout=0.3) == 0
    return out


@pytest.mark.parametrize("name", UNRELATED)
def test_evaluation_and_logging_leave_training_alone(name, with_dropout, dataset, tmp_path):
    assert run(out_dir=tmp_path, dataset=dataset, dropout=0.3, **UNRELATED[name]) == 0
    expected, got = training(with_dropout), training(tmp_path)
    assert got == {step: expected[step] for step in got}
    assert list(got) == ([7, 14, 20] if name == "log_interval" else list(range(1, 21)))
    assert different(load(tmp_path / "last.pt")["model"], load(with_dropout / "last.pt")["model"]) == []


def test_wandb_leaves_training_alone(with_dropout, dataset, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in dict(MODE="offline", DIR=tmp_path, SILENT="true", CACHE_DIR=tmp_path, DATA_DIR=tmp_path).items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    config = dict(out_dir=tmp_path / "run", dataset=dataset, dropout=0.3, wandb_log=True)
    with at_row(12, lambda: kill_me(signal.SIGTERM)):
        assert run(**config) == 143
    wandb_id = load(tmp_path / "run" / "last.pt")["wandb_id"]
    assert run(**config, init_from="resume") == 0
    assert_same_run(tmp_path / "run", with_dropout)
    assert load(tmp_path / "run" / "last.pt")["wandb_id"] == wandb_id
    assert len(list(tmp_path.rglob(f"run-{wandb_id}.wandb"))) == 2  # one file each time, of the same run


def test_micro_batches_only_split_the_work(dataset, tmp_path):
    for micro in (8, 4, 2):
        assert run(out_dir=tmp_path / str(micro), dataset=dataset, micro_batch_size=micro, max_iters=50) == 0
    for name in ("train_loss", "val_loss", "grad_norm"):
        expected = column(tmp_path / "8", name)
        for micro in (4, 2):
            got = column(tmp_path / str(micro), name)
            assert got == pytest.approx(expected, rel=2e-4 if name == "grad_norm" else 2e-5), (micro, name)
            assert got != expected  # it was split


SPLITS = [  # batch, micro (0 = choose), processes → (micro, accumulation)
    ((8, 0, 1), (8, 1)),
    ((8, 2, 1), (2, 4)),
    ((8, 2, 2), (2, 2)),
    ((480, 0, 8), (15, 4)),
    ((480, 0, 1), (16, 30)),
    ((17, 0, 1), (1, 17)),
    ((1, 0, 1), (1, 1)),
]
NO_SPLITS = [  # … → words of the message
    ((9, 0, 2), "batch_size=9 cannot be split over 2 processes: use 8 or 10"),
    ((3, 0, 4), "batch_size=3 cannot be split over 4 processes: use 4"),
    ((8, 3, 1), "micro_batch_size=3 does not divide the 8 sequences of each process"),
    ((8, 3, 1), "use 2 or 4"),
    ((8, 16, 2), "micro_batch_size=16 does not divide the 4 sequences of each process"),
]


@pytest.mark.parametrize("case, expected", SPLITS)
def test_split_batch(case, expected):
    assert train.split_batch(*case) == expected


@pytest.mark.parametrize("case, words", NO_SPLITS)
def test_split_batch_refuses(case, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        train.split_batch(*case)


# ------------------------------------------------------------------------------------------- what the numbers mean


def test_logged_losses_are_those_of_the_data(short, dataset):
    """val_loss is the mean over the validation windows of the model that is saved, train_loss over the step's batch."""
    checkpoint = load(short / "last.pt")
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    tokens = torch.from_numpy(np.fromfile(dataset / "val.bin", "<u2").astype(np.int64))
    windows = 2999 // 32  # 93; of them 512 // 32 = 16, evenly spaced
    starts = [i * windows // 16 * 32 for i in range(16)]
    x = torch.stack([tokens[s : s + 32] for s in starts])
    y = torch.stack([tokens[s + 1 : s + 33] for s in starts])
    with torch.no_grad():
        expected = F.cross_entropy(model(x)[0].flatten(0, 1).double(), y.flatten()).item()
    assert column(short, "val_loss")[30] == pytest.approx(expected, rel=1e-6)

    model, data = GPT(GPTConfig(**checkpoint["model_config"]), seed=1337), train.Dataset(str(dataset), 32, 1337)
    x, y = map(torch.from_numpy, data.batch(0, 8))
    loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert column(short, "train_loss")[1] == pytest.approx(loss.item(), rel=1e-6)
    assert column(short, "grad_norm")[1] == pytest.approx(norm, rel=1e-5)
    assert column(short, "lr") | {1: 0.002, 5: 0.01, 30: 0.001} == column(short, "lr")
    assert column(short, "tokens") == {step: step * 8 * 32 for step in range(31)}


def test_all_validation_windows(short, dataset, tmp_path, capsys):
    """93 windows in batches of 8: the last batch is not full, and counts for what it holds."""
    checkpoint = load(short / "best.pt")
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    tokens = torch.from_numpy(np.fromfile(dataset / "val.bin", "<u2").astype(np.int64))
    x, y = tokens[: 93 * 32].view(93, 32), tokens[1 : 93 * 32 + 1].view(93, 32)
    with torch.no_grad():
        expected = F.cross_entropy(model(x)[0].flatten(0, 1).double(), y.flatten()).item()
    for micro in (8, 4):
        config = dict(init_from=short / "best.pt", eval_tokens=0, eval_only=True, micro_batch_size=micro)
        assert run(out_dir=tmp_path / "none", dataset=dataset, **config) == 0
        assert evaluated(capsys) == pytest.approx(expected, abs=1.5e-6)


def evaluated(capsys):
    """The validation loss that was printed (to six digits)."""
    return float(re.search(r"validation loss (\S+)", capsys.readouterr().out)[1])


def test_eval_only_writes_nothing(short, dataset, tmp_path, capsys):
    before = files(short)
    assert run(out_dir=short, dataset=dataset, init_from="resume", eval_only=True) == 0
    assert evaluated(capsys) == pytest.approx(column(short, "val_loss")[30], abs=6e-7)
    assert files(short) == before
    assert run(out_dir=tmp_path / "none", dataset=dataset, init_from=short / "prev.pt", eval_only=True) == 0
    assert evaluated(capsys) == pytest.approx(column(short, "val_loss")[20], abs=6e-7)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------- bad gradients

VICTIM = "blocks.1.mlp.f.up.weight"


@pytest.mark.parametrize(
    "optimizer, learning_rate", [("adamw", 1e-2), ("msgdw", 0.5), ("muon", 1e-2), ("adam_mini", 1e-2)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_is_skipped(value, optimizer, learning_rate, dataset, tmp_path):
    changed = []  # one entry a step: names of what it changed

    def watch(model, optimizer):
        def now():
            return bits([dict(model.named_parameters()), optimizer.state_dict()["state"]])

        def after(*_):
            before = changed.pop()
            changed.append({name for name, value in now().items() if value != before.get(name)})

        optimizer.register_step_pre_hook(lambda *_: changed.append(now()))
        optimizer.register_step_post_hook(after)

    bad = {4, 5, 8, 9}
    with optimizers(watch), spoil_gradients(value, bad, VICTIM):
        config = dict(optimizer=optimizer, learning_rate=learning_rate, weight_decay=0.1, max_skipped=3)
        assert run(out_dir=tmp_path, dataset=dataset, **config) == 0
    assert [step for step, names in enumerate(changed) if not names] == sorted(bad)
    assert changed[0] >= {f"/0/{name}" for name in load(tmp_path / "last.pt")["model"]}  # a good step changes them all
    skipped = [sum(b < step for b in bad) for step in range(1, 21)]
    assert list(column(tmp_path, "skipped_steps").values()) == skipped
    assert [step for step, norm in column(tmp_path, "grad_norm").items() if norm is None] == [5, 6, 9, 10]
    last = load(tmp_path / "last.pt")
    assert last["skipped"] == 4
    assert all(t.isfinite().all() for t in tensors(last).values())
    steps = [s["step"].item() for s in last["optimizer"]["state"].values() if "step" in s]
    assert set(steps) == (set() if optimizer == "msgdw" else {16.0})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_too_many_bad_gradients_end_the_run(value, short, dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=30, save_interval=5, max_skipped=3)
    with spoil_gradients(value, range(13, 1000), VICTIM):
        code = run(**config)
    refusal(capsys, code, "3 steps in a row, up to about step 16,", f"first bad tensor: the gradient of {VICTIM})")
    last, prev = (load(tmp_path / name) for name in ("last.pt", "prev.pt"))
    assert (last["step"], last["skipped"], prev["step"], prev["skipped"]) == (16, 3, 15, 2)
    assert different(last["model"], prev["model"]) == []
    assert run(**config, init_from="resume") == 0
    rows = {row["step"]: row for row in metrics(tmp_path)}
    assert {step: row["train_loss"] for step, row in rows.items() if 0 < step <= 13} == {
        step: loss for step, loss in column(short, "train_loss").items() if step <= 13
    }
    assert rows[14]["skipped_steps"] == 1 and rows[16]["skipped_steps"] == rows[30]["skipped_steps"] == 3


def test_bad_gradients_between_two_logged_steps_count(dataset, tmp_path, capsys):
    """Four in a row, all over when the next row is logged."""
    for allowed, code in ((5, 0), (4, 1)):
        with spoil_gradients(math.nan, range(3, 7), VICTIM):
            config = dict(out_dir=tmp_path / str(allowed), dataset=dataset, log_interval=20, max_skipped=allowed)
            assert run(**config) == code
    assert "4 steps in a row" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["parameter", "exp_avg", "momentum_buffer"])
def test_a_state_that_is_not_finite_is_never_saved(what, dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset, save_interval=1)
    config |= dict(optimizer="msgdw", learning_rate=0.1) if what == "momentum_buffer" else {}

    def prepare(model, optimizer):
        calls = []

        def spoil(*_):
            calls.append(1)
            p = dict(model.named_parameters())[VICTIM]
            if len(calls) == 8:
                (p if what == "parameter" else optimizer.state[p][what]).data[0, 0] = math.inf

        optimizer.register_step_post_hook(spoil)

    with optimizers(prepare):
        code = run(**config)
    refusal(capsys, code, "not finite at step 8", VICTIM if what == "parameter" else what)
    found = {path.name: load(path) for path in tmp_path.glob("*.pt")}
    assert {name: c["step"] for name, c in found.items()} == {"last.pt": 7, "prev.pt": 6, "best.pt": 0}
    assert all(t.isfinite().all() for t in tensors(found).values())


# ------------------------------------------------------------------------------- checkpoints: writing and reading

PLAIN = (torch.Tensor, dict, list, tuple, str, int, float, bool, type(None))


def plain(value):
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return isinstance(value, PLAIN) and all(plain(key) and plain(part) for key, part in parts)


def test_what_a_checkpoint_holds(short):
    checkpoint = load(short / "last.pt")  # weights_only
    assert plain(checkpoint)
    assert not plain({"a": [np.float64(1.0).reshape(1)]})
    names = "model optimizer scaler step tokens best_val_loss model_config train_config meta skipped wandb_id"
    assert set(names.split()) <= checkpoint.keys()
    assert checkpoint["model_config"]["n_layer"] == 2 and checkpoint["train_config"]["max_iters"] == 30
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    assert list(checkpoint["model"]) == [name for name, _ in model.named_parameters()]
    assert not list(short.glob("*.tmp")) and not (short / "new.pt").exists()


def fail(error, original, when, times=10**6):
    """A function that raises in the first `times` calls for which `when` is true, and else is the original."""
    calls = []

    def call(*args, **kwargs):
        if when(*args, **kwargs):
            calls.append(args)
            if len(calls) <= times:
                if args and hasattr(args[-1], "write"):
                    args[-1].write(b"half of it")
                raise type(error)(*error.args)
        return original(*args, **kwargs)

    return call


NO_SPACE, IO_ERROR = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
FAILURES = {  # what fails: (module, function, error, in which calls)
    "torch.save": (torch, "save", NO_SPACE, lambda *a, **k: True),
    "torch.save, in its own words": (torch, "save", RuntimeError("unexpected pos 64 vs 0"), lambda *a, **k: True),
    "fsync": (os, "fsync", IO_ERROR, lambda *a: True),
    "rename to new.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "new.pt"),
    "rename to prev.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "prev.pt"),
    "rename to last.pt": (os, "replace", IO_ERROR, lambda source, target: Path(target).name == "last.pt"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_write_that_fails_for_good(name, begun, short, dataset, monkeypatch, capsys):
    module, function, error, when = FAILURES[name]
    failing = fail(error, getattr(module, function), when)
    before, patch = checkpoints(begun), pytest.MonkeyPatch()
    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: patch.setattr(module, function, failing)):
        try:
            code = resume(begun, dataset)
        finally:
            patch.undo()
    refusal(capsys, code, error.args[-1])
    after = {path: digest for path, digest in checkpoints(begun).items() if path in before}
    if name == "rename to last.pt":  # by then the others are the new ones
        assert after["last.pt"] == before["last.pt"]
    else:
        assert after == before
    assert [load(begun / name)["step"] for name in after]  # all of them can be read
    assert resume(begun, dataset) == 0  # once there is room
    assert_same_run(begun, short)


@pytest.mark.parametrize("name", FAILURES)
def test_a_write_that_fails_once(name, begun, short, dataset, monkeypatch):
    module, function, error, when = FAILURES[name]
    failing = fail(error, getattr(module, function), when, times=1)
    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: monkeypatch.setattr(module, function, failing)):
        assert resume(begun, dataset) == 0
    assert getattr(module, function) is failing
    monkeypatch.undo()
    assert_same_run(begun, short)


def test_a_file_that_may_not_grow(begun, short, dataset, monkeypatch, capsys):
    """The real thing: the system refuses the bytes after the first 100,000."""
    before, limits = checkpoints(begun), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(rundir.time, "sleep", lambda seconds: None)
    with at_row(25, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))):
        try:
            code = resume(begun, dataset)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refusal(capsys, code, "cannot write")
    assert checkpoints(begun) == before
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


def test_a_file_system_without_hard_links(short, dataset, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=30) == 0
    assert_same_run(tmp_path, short)
    for name in ("best.pt", "prev.pt"):
        assert load(tmp_path / name)["step"] == load(short / name)["step"]


@pytest.mark.parametrize("losses, best", [([5, 3, 1, 2, 4], 20), ([5, 4, 3, 2, 1], 40), ([1, 2, 3, 4, math.nan], 0)])
def test_best_prev_and_last(losses, best, dataset, tmp_path, monkeypatch):
    script = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *_: float(next(script)))
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=40)
    with at_row(25, lambda: kill_me(signal.SIGTERM)):  # the best so far is remembered
        assert run(**config) == 143
    assert run(**config, init_from="resume") == 0
    steps = {path.name: load(path)["step"] for path in tmp_path.glob("*.pt")}
    assert steps == {"last.pt": 40, "prev.pt": 30, "best.pt": best}
    assert load(tmp_path / "last.pt")["best_val_loss"] == min(losses)


def test_best_is_the_model_of_its_loss(short, dataset, tmp_path, capsys):
    best = load(short / "best.pt")["step"]
    assert best == min(column(short, "val_loss").items(), key=lambda item: item[1])[0]
    assert run(out_dir=tmp_path / "none", dataset=dataset, init_from=short / "best.pt", eval_only=True) == 0
    assert evaluated(capsys) == pytest.approx(column(short, "val_loss")[best], abs=6e-7)
    assert load(short / "best.pt")["best_val_loss"] == column(short, "val_loss")[best]


DAMAGE = {
    "half": lambda raw: raw[: len(raw) // 2],
    "all but the last byte": lambda raw: raw[:-1],
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
}


def damage(path, damaged=b"damaged"):
    path.unlink()  # best.pt may be the same file
    path.write_bytes(damaged)


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_last_falls_back_to_prev(name, begun, short, dataset, capsys):
    path = begun / "last.pt"
    damage(path, DAMAGE[name](path.read_bytes()))
    assert resume(begun, dataset) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert f"{path} cannot be read" in warnings[0] and f"going on from {begun / 'prev.pt'}, step 10" in warnings[0]
    assert_same_run(begun, short)


def test_a_damaged_last_never_becomes_prev(begun, dataset):
    damage(begun / "last.pt")
    assert resume(begun, dataset, max_iters=20, lr_decay_iters=30) == 0
    assert [load(begun / name)["step"] for name in ("prev.pt", "last.pt")] == [10, 20]


def test_a_crash_after_falling_back_loses_nothing(begun, short, dataset):
    damage(begun / "last.pt")
    replace = os.replace
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "replace", lambda a, b: replace(a, b) if Path(b).name != "last.pt" else crash())
        resume(begun, dataset)
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


def test_nothing_left_to_resume_from(begun, dataset, tmp_path, capsys):
    for name in ("last.pt", "prev.pt"):
        damage(begun / name)
    before = files(begun)
    for source in ("resume", "auto"):
        refusal(capsys, resume(begun, dataset, init_from=source), begun / "last.pt", begun / "prev.pt", "damaged")
    refusal(capsys, resume(tmp_path / "empty", dataset), "nothing to resume", tmp_path / "empty", "--init_from=scratch")
    assert files(begun) == before and not (tmp_path / "empty").exists()


def test_the_prefix_of_a_compiled_model_is_tolerated(begun, short, dataset):
    checkpoint = load(begun / "last.pt")
    checkpoint["model"] = {f"_orig_mod.{name}": p for name, p in checkpoint["model"].items()}
    (begun / "last.pt").unlink()
    torch.save(checkpoint, begun / "last.pt")
    assert resume(begun, dataset) == 0
    assert_same_run(begun, short)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_checkpoint_cannot_run_code(begun, dataset, tmp_path, capsys):
    checkpoint = load(begun / "last.pt") | {"step": Payload(tmp_path / "harm")}
    evil = tmp_path / "evil.pt"
    torch.save(checkpoint, evil)
    torch.load(evil, weights_only=False)
    (tmp_path / "harm").rmdir()  # so it can do harm
    refusal(capsys, run(out_dir=tmp_path / "a", dataset=dataset, init_from=evil), evil, "cannot be read")
    for name in ("last.pt", "prev.pt"):
        (begun / name).unlink()
        shutil.copy(evil, begun / name)
    refusal(capsys, resume(begun, dataset), begun / "last.pt", "cannot be read")
    assert not (tmp_path / "harm").exists()


# --------------------------------------------------------------------------------------------- rules of resuming


def test_training_flags_win_on_resume(begun, dataset, capsys):
    changes = dict(learning_rate=5e-3, min_lr=4e-3, weight_decay=0.05, beta1=0.8, beta2=0.9, schedule="constant")
    groups, seen = [], load(begun / "last.pt")["optimizer"]["state"][0]["exp_avg"].clone()
    states = []

    def prepare(model, optimizer):
        def before(*_):
            groups.append([dict(g, params=None) for g in optimizer.param_groups])
            states.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())

        optimizer.register_step_pre_hook(before)

    with optimizers(prepare):
        assert resume(begun, dataset, **changes) == 0
    assert torch.equal(states[0], seen)  # the state itself is the checkpoint's
    for group in groups[0]:
        assert group["lr"] == 5e-3 and group["betas"] == (0.8, 0.9), group["role"]
        assert group["weight_decay"] == (0.05 if group["role"] in ("emb", "pos", "qk", "vo", "ffn") else 0), group
    assert {column(begun, "lr")[step] for step in range(21, 31)} == {5e-3}
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed on resume"))
    expected = "learning_rate 0.01 → 0.005, min_lr 0.001 → 0.004, weight_decay 0.1 → 0.05, beta1 0.9 → 0.8"
    for change in [*expected.split(", "), "beta2 0.95 → 0.9", "schedule cosine → constant", "max_iters 20 → 30"]:
        assert change in printed
    assert printed.count("→") == 7


def test_nothing_changed_nothing_printed(begun, dataset, capsys):
    assert resume(begun, dataset, max_iters=20, lr_decay_iters=30) == 0
    out = capsys.readouterr().out
    assert f"weights: {begun}, step 20" in out
    assert "→" not in out


def test_the_architecture_is_the_checkpoints(begun, short, dataset, capsys):
    assert resume(begun, dataset, n_layer=3, mid_norm="none", qk_norm=False, block_size=16) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = next(line for line in lines if line.startswith("model of the checkpoint"))
    for change in ("n_layer 3 → 2", "mid_norm none → both", "qk_norm False → True", "block_size 16 → 32"):
        assert change in printed
    assert printed.count("→") == 4
    assert_same_run(begun, short)
    assert json.loads((begun / "config.json").read_text())["model"]["n_layer"] == 2


MUON = dict(optimizer="muon", momentum=0.8, nesterov=False, muon_steps=3, muon_adjust_lr="original")
MUON |= dict(weight_decay=0.05, adamw_learning_rate=2e-3, adamw_weight_decay=0.2, min_lr=0.0)


def test_muons_flags_win_on_resume(dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset, lr_decay_iters=20)
    assert run(**config, optimizer="muon", max_iters=3) == 0
    groups, printed = [], capsys.readouterr()
    with optimizers(lambda model, optimizer: groups.extend(optimizer.param_groups)):
        assert run(**config | MUON, init_from="resume", max_iters=4) == 0
    for group in groups:
        muon = group["role"] in ("qk", "vo", "ffn")
        expected = dict(momentum=0.8, nesterov=False, ns_steps=3, adjust_lr="original", lr=8e-3, weight_decay=0.05)
        rest = dict(betas=(0.9, 0.95), lr=1.6e-3, weight_decay=0.2 if group["role"] in ("emb", "pos") else 0.0)
        for key, value in (expected if muon else rest).items():
            assert group[key] == pytest.approx(value), (group["role"], key)
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed on resume"))
    expected = "weight_decay 0.1 → 0.05, momentum 0.95 → 0.8, nesterov True → False, muon_steps 5 → 3"
    expected += ", muon_adjust_lr match_rms_adamw → original, adamw_learning_rate 0.01 → 0.002"
    for change in [*expected.split(", "), "adamw_weight_decay 0.1 → 0.2", "min_lr 0.001 → 0.0", "max_iters 3 → 4"]:
        assert change in printed
    assert printed.count("→") == 9


def test_the_optimizers_state_is_found_by_name(dataset, tmp_path):
    """With ratios of 1, blockwise_lr on resume changes nothing but how parameters are grouped."""
    ones = {f"lr_ratio_{block}": 1 for block in ("emb", "qk", "ffn", "vo", "norm", "head", "pos")}
    config = dict(dataset=dataset, bias=True, norm="layernorm", schedule="constant", max_iters=20)
    assert run(out_dir=tmp_path / "whole", **config) == 0
    assert run(out_dir=tmp_path / "run", **config | dict(max_iters=10)) == 0
    assert run(out_dir=tmp_path / "run", **config, init_from="resume", blockwise_lr=True, **ones) == 0
    one, other = (load(tmp_path / name / "last.pt") for name in ("whole", "run"))
    assert different(one["model"], other["model"]) == []
    labels = [[group["label"] for group in checkpoint["optimizer"]["param_groups"]] for checkpoint in (one, other)]
    assert set(labels[1]) - set(labels[0]) == {"bias_qk", "bias_vo", "bias_ffn"} and len(labels[0]) == 8


SWITCHES = ["adamw msgdw", "msgdw adamw", "adamw muon", "muon adamw", "msgdw muon", "muon adam_mini", "adam_mini adamw"]


@pytest.mark.parametrize("switch", SWITCHES)
def test_another_optimizer_on_resume(switch, dataset, tmp_path, capsys):
    """It says so and starts with a fresh state: the next step is that of a new optimizer there."""
    old, new = switch.split()
    config = dict(out_dir=tmp_path, dataset=dataset, learning_rate=1e-2, weight_decay=0.1, lr_decay_iters=20)
    assert run(**config, optimizer=old, max_iters=5) == 0
    before = load(tmp_path / "last.pt")
    capsys.readouterr()
    assert run(**config, optimizer=new, init_from="resume", max_iters=6) == 0
    assert f"optimizer {old} → {new}: its state starts fresh" in capsys.readouterr().out
    after = load(tmp_path / "last.pt")

    model = GPT(GPTConfig(**before["model_config"]))
    model.load_state_dict(before["model"])
    x, y = map(torch.from_numpy, train.Dataset(str(dataset), 32, 1337).batch(5, 8))
    model(x, y)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    settings = train.TrainConfig(**after["train_config"])
    optimizer = train.make_optimizer(model, settings)
    optimizer.found_inf = torch.tensor(0.0)
    for group in optimizer.param_groups:
        group["lr"] = train.lr_at(5, settings, group)
    optimizer.step()
    assert different(after["model"], model.state_dict()) == []
    assert different(after["optimizer"]["state"], optimizer.state_dict()["state"]) == []

    assert run(**config, optimizer=new, init_from="resume", max_iters=8) == 0
    assert "fresh" not in capsys.readouterr().out  # from now on its state goes on
    assert list(column(tmp_path, "train_loss")) == list(range(1, 9))
    steps = {s["step"].item() for s in load(tmp_path / "last.pt")["optimizer"]["state"].values() if "step" in s}
    assert steps == (set() if new == "msgdw" else {3.0})


OTHER_DATA = {
    "a larger alphabet": dict(alphabet=60),
    "a smaller alphabet": dict(alphabet=40),
}


@pytest.mark.parametrize("source", ["resume", "auto", "last.pt"])
@pytest.mark.parametrize("name", OTHER_DATA)
def test_another_vocabulary_is_refused(name, source, begun, tmp_path, capsys):
    other, before = make_dataset(tmp_path / "other", **OTHER_DATA[name]), files(begun)
    out = tmp_path / "out" if source == "last.pt" else begun
    source = begun / source if source == "last.pt" else source
    code = run(out_dir=out, dataset=other, init_from=source, max_iters=30)
    refusal(capsys, code, other, OTHER_DATA[name]["alphabet"], "50 tokens", "vocabulary")
    assert files(begun) == before


def test_another_alphabet_of_the_same_size_is_refused(begun, tmp_path, capsys):
    other = make_dataset(tmp_path / "other")
    meta = json.loads((other / "meta.json").read_text())
    meta["chars"] = [chr(ord(c) + 300) for c in meta["chars"]]
    (other / "meta.json").write_text(json.dumps(meta))
    refusal(capsys, resume(begun, other), other, "vocabulary")


def test_another_dataset_of_the_same_vocabulary_is_fine(begun, tmp_path, capsys):
    other = make_dataset(tmp_path / "other", seed=1)
    assert resume(begun, other) == 0
    assert "dataset " in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed"))


def test_a_new_run_from_a_checkpoints_weights(short, dataset, tmp_path):
    """Step 0, fresh optimizer: the very run that starts with those parameters."""
    assert run(out_dir=tmp_path / "a", dataset=dataset, init_from=short / "best.pt", n_layer=7) == 0
    trained = load(short / "best.pt")
    rows = logged(tmp_path / "a")
    assert [step for step, _ in rows] == list(range(21))
    assert rows[0][1] == {"tokens": 0, "val_loss": column(short, "val_loss")[trained["step"]]}
    assert column(tmp_path / "a", "lr")[1] == 0.002
    last = load(tmp_path / "a" / "last.pt")
    assert (last["step"], last["tokens"]) == (20, 20 * 8 * 32)
    assert last["model_config"] == trained["model_config"]
    assert {s["step"].item() for s in last["optimizer"]["state"].values()} == {20.0}
    assert different(load(tmp_path / "a" / "last.pt")["model"], trained["model"])


def test_dropout_may_change(short, dataset, tmp_path):
    assert run(out_dir=tmp_path, dataset=dataset, init_from=short / "last.pt", dropout=0.4, max_iters=3) == 0
    assert load(tmp_path / "last.pt")["model_config"]["dropout"] == 0.4


@pytest.mark.parametrize("kept", ["last.pt", "prev.pt", "best.pt"])
def test_scratch_does_not_overwrite(kept, begun, dataset, capsys):
    for path in begun.glob("*.pt"):
        if path.name != kept:
            path.unlink()
    before = files(begun)
    refusal(capsys, run(out_dir=begun, dataset=dataset), begun, "--init_from=resume", "--overwrite=True")
    assert files(begun) == before


def test_overwrite(begun, short, dataset, tmp_path):
    (begun / "metrics.jsonl").write_text('{"step": 1000, "train_loss": 0.0}\nnot even a row\n')
    damage(begun / "best.pt")
    with at_row(0, crash), pytest.raises(Crash):
        run(out_dir=begun, dataset=dataset, max_iters=30, overwrite=True)
    assert checkpoints(begun) == {}  # so that nothing of the earlier run is taken for the new one's
    assert run(out_dir=begun, dataset=dataset, max_iters=30, overwrite=True) == 0
    assert_same_run(begun, short)
    assert load(begun / "best.pt")["step"] == load(short / "best.pt")["step"]


# ---------------------------------------------------------------------------------------------- learning rates


def cosine(q):
    return 0.5 * (1 + math.cos(math.pi * q))


# flags of steps 1 to 20, other flags of steps 21 to 30, learning rates by hand. Peak 0.01 at step 5, min_lr 0.001.
EXTENDED = {
    "cosine": ({}, {}, {10: 1e-3 + 9e-3 * cosine(1 / 3), 20: 1e-3, 21: 1e-3 + 9e-3 * cosine(16 / 25), 30: 1e-3}),
    "linear": (dict(schedule="linear"), {}, {11: 6.4e-3, 20: 1e-3, 21: 1e-2 - 9e-3 * 16 / 25, 25: 2.8e-3, 30: 1e-3}),
    "wsd": (dict(schedule="wsd"), {}, {16: 1e-2, 18: 5.5e-3, 20: 1e-3, 21: 1e-2, 24: 1e-2, 27: 5.5e-3, 30: 1e-3}),
    "wsd, its decay as long": (
        dict(schedule="wsd", wsd_decay="sqrt", wsd_decay_iters=4),
        {},
        {16: 1e-2, 17: 5.5e-3, 20: 1e-3, 21: 1e-2, 26: 1e-2, 27: 5.5e-3, 30: 1e-3},
    ),
    "constant, then wsd": (dict(schedule="constant"), dict(schedule="wsd"), {6: 1e-2, 24: 1e-2, 27: 5.5e-3, 30: 1e-3}),
    "dyt": (dict(schedule="dyt"), {}, {2: 6.4e-3, 10: 5.5e-3, 20: 1e-3, 21: 1e-3 + 9e-3 * cosine(0.7), 30: 1e-3}),
}


@pytest.mark.parametrize("name", EXTENDED)
def test_a_schedule_extended_on_resume(name, dataset, tmp_path, capsys):
    """From there on it is the longer schedule, exactly."""
    first, then, rates = EXTENDED[name]
    config = dict(out_dir=tmp_path, dataset=dataset, **first)
    assert run(**config, max_iters=20) == 0
    capsys.readouterr()
    assert run(**config | then, max_iters=30, init_from="resume") == 0
    printed = capsys.readouterr().out
    assert "lr_decay_iters 20 → 30" in printed
    assert ("wsd_decay_iters 4 → 6" in printed) == (name == "wsd")
    found = column(tmp_path, "lr")
    assert {step: found[step] for step in rates} == pytest.approx(rates, rel=1e-12)
    for role in ("emb", "pos", "qk", "vo", "ffn", "gain_in", "gain_out"):
        assert column(tmp_path, f"lr_{role}") == found
    settings = train.TrainConfig(**load(tmp_path / "last.pt")["train_config"])
    assert all(found[step] == train.lr_at(step - 1, settings) for step in range(21, 31))


# flags; learning rates by hand at steps 1, 5 (end of warm-up), 10 (half of the cosine) and 15 (its end)
ORIGINAL = dict(optimizer="muon", muon_adjust_lr="original", adamw_learning_rate=4e-3, learning_rate=2e-2)
BLOCKWISE = dict(blockwise_lr=True, learning_rate=2e-3)
UNTIED = dict(tie_weights=False, bias=True, norm="layernorm")
BY_ROLE = {
    "adamw": (
        dict(BLOCKWISE, **UNTIED),
        {
            "emb": (4e-3, 2e-2, 1.01e-2, 2e-4),
            "qk bias_qk": (3.2e-3, 1.6e-2, 8.1e-3, 2e-4),
            "ffn bias_ffn": (2.4e-3, 1.2e-2, 6.1e-3, 2e-4),
            "vo bias_vo": (1.6e-3, 8e-3, 4.1e-3, 2e-4),
            "pos head gain_in gain_out bias": (4e-4, 2e-3, 1.1e-3, 2e-4),
        },
    ),
    "adamw, from the end of warm-up, to proportional floors": (
        dict(BLOCKWISE, blockwise_start="warmup_end", blockwise_min_lr="proportional", lr_ratio_head=5),
        {
            "emb": (4e-4, 2e-3, 1.1e-2, 2e-3),
            "qk": (4e-4, 2e-3, 8.8e-3, 1.6e-3),
            "ffn": (4e-4, 2e-3, 6.6e-3, 1.2e-3),
            "vo": (4e-4, 2e-3, 4.4e-3, 8e-4),
            "pos gain_in gain_out": (4e-4, 2e-3, 1.1e-3, 2e-4),
        },
    ),
    "adam_mini": (
        dict(BLOCKWISE, optimizer="adam_mini", lr_ratio_norm=0.5),
        {
            "emb ffn vo": (1.6e-3, 8e-3, 4.1e-3, 2e-4),
            "qk pos": (4e-4, 2e-3, 1.1e-3, 2e-4),
            "gain_in gain_out": (2e-4, 1e-3, 6e-4, 2e-4),
        },
    ),
    "muon": (
        dict(ORIGINAL),
        {"qk vo ffn": (4e-3, 2e-2, 1.1e-2, 2e-3), "emb pos gain_in gain_out": (8e-4, 4e-3, 2.2e-3, 4e-4)},
    ),
    "muon, blockwise": (
        dict(ORIGINAL, blockwise_lr=True, lr_ratio_qk=2, lr_ratio_vo=1, lr_ratio_ffn=1, min_lr=0.0),
        {
            "emb": (8e-3, 4e-2, 2e-2, 0.0),
            "qk": (8e-3, 4e-2, 2e-2, 0.0),
            "vo ffn": (4e-3, 2e-2, 1e-2, 0.0),
            "pos gain_in gain_out": (8e-4, 4e-3, 2e-3, 0.0),
        },
    ),
}


@pytest.mark.parametrize("name", BY_ROLE)
def test_learning_rates_by_role(name, dataset, tmp_path):
    """metrics.jsonl has one of each role, and that of learning_rate with a ratio of 1."""
    flags, expected = BY_ROLE[name]
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=15, **flags) == 0
    rows = metrics(tmp_path)
    expected = {f"lr_{role}": rates for roles, rates in expected.items() for role in roles.split()}
    assert {key for key in rows[5] if key.startswith("lr_")} == expected.keys()
    for key, rates in expected.items():
        assert [rows[step][key] for step in (1, 5, 10, 15)] == pytest.approx(rates, rel=1e-12, abs=1e-18), key
    peak = flags["learning_rate"]
    low = peak / 10 if "min_lr" not in flags else 0.0
    assert [rows[step]["lr"] for step in (1, 5, 10, 15)] == pytest.approx([peak / 5, peak, (peak + low) / 2, low])


# ------------------------------------------------------------------------------------------------ compile, dtypes

ONE_LAYER = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=5)


def test_compiled_is_eager(dataset, tmp_path, capsys):
    for compiled in (False, True):
        assert run(out_dir=tmp_path / str(compiled), dataset=dataset, compile=compiled, **ONE_LAYER) == 0
    assert "compiled in" in capsys.readouterr().out
    for name in ("train_loss", "val_loss", "grad_norm"):
        expected, got = (column(tmp_path / str(compiled), name) for compiled in (False, True))
        assert got == pytest.approx(expected, rel=1e-4 if name == "grad_norm" else 1e-5), name
    eager, compiled = (load(tmp_path / str(compiled) / "last.pt") for compiled in (False, True))
    assert eager["model"].keys() == compiled["model"].keys()  # the raw module is saved
    assert different(eager["model"], compiled["model"])  # it was compiled


def test_a_compiled_run_goes_on_exactly(dataset, tmp_path):
    """On two threads, where a backward pass that adds with atomics would differ from run to run."""
    config = dict(
        dataset=dataset, compile=True, n_layer=1, n_embd=64, batch_size=16, eval_interval=6, lr_decay_iters=12
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for out, iters, source in (("whole", 12, "scratch"), ("halves", 6, "scratch"), ("halves", 12, "resume")):
            torch._dynamo.reset()
            assert run(out_dir=tmp_path / out, max_iters=iters, init_from=source, **config) == 0
    finally:
        torch.set_num_threads(threads)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def break_compiler(patch, early):
    def compile(model, **_):
        if early:
            raise RuntimeError("no compiler here\nat all")

        def call(*_):
            raise RuntimeError("no compiler here\nat all")

        return call

    patch.setattr(torch, "compile", compile)


@pytest.mark.parametrize("early", [True, False], ids=["in torch.compile", "in the first call"])
def test_compile_auto_falls_back(early, short, dataset, tmp_path, monkeypatch, capsys):
    break_compiler(monkeypatch, early)
    monkeypatch.setattr(runtime, "choose_compile", lambda *_: (True, "auto"))
    assert run(out_dir=tmp_path, dataset=dataset, compile="auto", max_iters=30) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no compiler here" in warnings[0] and "eagerly" in warnings[0]
    assert_same_run(tmp_path, short)


@pytest.mark.parametrize("early", [True, False], ids=["in torch.compile", "in the first call"])
def test_compile_true_does_not(early, dataset, tmp_path, monkeypatch, capsys):
    break_compiler(monkeypatch, early)
    code = run(out_dir=tmp_path / "out", dataset=dataset, compile=True)
    refusal(capsys, code, "torch.compile failed (no compiler here)", "--compile=False")
    assert not (tmp_path / "out").exists()


def test_fp16_with_loss_scaling_resumes(dataset, tmp_path):
    """The scale is halved by an overflow in step 4, and that is remembered."""
    config = dict(dataset=dataset, dtype="float16")
    with spoil_gradients(math.inf, {3}, VICTIM):
        assert run(out_dir=tmp_path / "whole", **config) == 0
    with spoil_gradients(math.inf, {3}, VICTIM), at_row(12, lambda: kill_me(signal.SIGTERM)):
        assert run(out_dir=tmp_path / "run", **config) == 143
    scaler = load(tmp_path / "run" / "last.pt")["scaler"]
    assert scaler["scale"] == 2.0**15 and scaler["_growth_tracker"] == 8
    seen = []
    with optimizers(lambda *_: seen.append(1)):
        assert run(out_dir=tmp_path / "run", **config, init_from="resume") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert load(tmp_path / "run" / "last.pt")["scaler"]["_growth_tracker"] == 16
    assert column(tmp_path / "run", "skipped_steps")[20] == 1
    losses = column(tmp_path / "run", "train_loss")
    assert losses[20] < losses[1] - 0.2


# -------------------------------------------------------------------------------------------------------- records


def test_the_run_directory(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "draw_loss", DRAW_LOSS)
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
        assert row["mfu"] > 0 and row["tokens_per_s"] > 0 and row["peak_mem_bytes"] > 50e6
        flops = row["mfu"] * 1e9 / row["tokens_per_s"]  # a token: 6 per matrix weight and head, 12·L·d·T for attention
        assert flops == pytest.approx(6 * (2 * 12 * 32 * 32 + 64 * 32) + 12 * 2 * 32 * 32)

    record = json.loads((out / "config.json").read_text())
    train_config, model_config = record["train"], record["model"]
    assert (train_config["warmup_iters"], train_config["max_iters"], train_config["lr_decay_iters"]) == (3, 12, 12)
    assert (train_config["weight_decay"], train_config["min_lr"]) == (0.1, 0.001)  # resolved, not None
    assert (model_config["n_embd"], model_config["vocab_size"], model_config["qk_norm"]) == (32, 50, True)
    assert record["command"] == argv
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["python"] in sys.version
    head = Path(ROOT / ".git")
    if head.exists():
        assert re.fullmatch("[0-9a-f]{40}", record["git_commit"])
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len((out / "loss.png").read_bytes()) > 5000


def test_infinity_is_valid_json(dataset, tmp_path):
    with spoil_gradients(math.nan, {2}, VICTIM):
        assert run(out_dir=tmp_path, dataset=dataset, max_iters=4) == 0

    def refuse(constant):
        raise AssertionError(constant)

    rows = [json.loads(s, parse_constant=refuse) for s in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("grad_norm", 0) is None for row in rows] == [False, False, False, True, False]


def test_without_matplotlib_a_run_still_ends_well(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rundir, "draw_loss", DRAW_LOSS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(out_dir=tmp_path, dataset=dataset, max_iters=2) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert load(tmp_path / "last.pt")["step"] == 2
