"""Speed and memory in complete runs: batches read ahead, loss_chunks, compile."""

import pytest
import torch

import model as model_module
import nanodnt.start as start_module
from model import GPT, GPTConfig
from nanodnt.data.windows import PreparedText
from nanodnt.run import compilation
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from support.hostile import refusal
from support.models import batch, build
from support.processes import TOLERANCES
from support.runs import assert_same_run, column, run
from support.strikes import at_call

pytestmark = pytest.mark.usefixtures("quick")


def test_an_error_in_reading_ahead_ends_the_run_in_one_line(dataset, tmp_path, capsys):
    def fail(*_):
        raise OSError("the disk is gone")

    with at_call(PreparedText, "batch", 1, fail, lambda data, step, *_: step == 5):
        code = run(dataset=dataset, out_dir=tmp_path, max_iters=12)
    refusal(capsys, code, "the disk is gone")
    assert list(column(tmp_path, "train_loss")) == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """(flags, run directory) of 10 plain steps."""
    config = dict(dataset=dataset, max_iters=10, micro_batch_size=4, dropout=0.2)
    out = tmp_path_factory.mktemp("base")
    assert run(out_dir=out, **config) == 0
    return config, out


def test_loss_chunks_is_the_same_run_but_for_rounding(base, tmp_path, monkeypatch):
    asked, fused = set(), model_module.linear_cross_entropy

    def note(x, weight, targets, dtype, vocab_size, chunks, kernels):
        asked.add(chunks)
        return fused(x, weight, targets, dtype, vocab_size, chunks, kernels)

    monkeypatch.setattr(model_module, "linear_cross_entropy", note)
    assert run(out_dir=tmp_path, loss_chunks=3, **base[0]) == 0
    assert asked == {3}
    for name in ("train_loss", "val_loss", "grad_norm"):
        assert column(tmp_path, name) == pytest.approx(column(base[1], name), rel=TOLERANCES[name])


def test_compiling_leaves_no_gradients_behind(monkeypatch):
    """The gradients of the micro batch on which compile_model tries the model must not reach the
    first step."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    model = build(dict(), dtype=torch.float32)
    env = Env(0, 1, torch.device("cpu"), torch.float32, False)
    config = TrainConfig(compile=True)
    assert compilation.compile_model(model, config, batch(), env) is model
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_a_resumed_run_compiles_as_an_uninterrupted_one(dataset, tmp_path, monkeypatch):
    asked = []

    def note(setting, device, training_flops):
        asked.append((setting, device, training_flops))
        return False, "a test"

    monkeypatch.setattr(start_module, "choose_compile", note)
    config = dict(
        dataset=dataset,
        out_dir=tmp_path,
        compile="auto",
        lr_decay_iters=20,
        batch_size=8,
        block_size=32,
    )
    assert run(**config, max_iters=20, overwrite=True) == 0
    assert run(**config, max_iters=10, overwrite=True) == 0
    assert run(**config, max_iters=20, init_from="resume") == 0
    full, half, resumed = asked
    assert full == resumed and full[2] == 2 * half[2]
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=50))
    assert full[2] == pytest.approx(20 * 8 * 32 * model.flops_per_token())
    assert run(**config, eval_only=True, init_from="resume") == 0
    assert asked[3][2] == 0


def break_compiler(patch, early):
    def compile(model, **_):
        if early:
            raise RuntimeError("no compiler here\nat all")

        def call(*_):
            raise RuntimeError("no compiler here\nat all")

        return call

    patch.setattr(torch, "compile", compile)


@pytest.mark.parametrize("early, deep", [(True, 99), (False, 1)], ids=["early", "late, blocks"])
def test_compile_auto_falls_back(early, deep, short, dataset, tmp_path, monkeypatch, capsys):
    """In torch.compile or in the first call; with one graph, or with one for each block."""
    break_compiler(monkeypatch, early)
    monkeypatch.setattr("nanodnt.run.compilation.DEEP", deep)
    monkeypatch.setattr("nanodnt.start.choose_compile", lambda *_: (True, "auto"))
    assert run(out_dir=tmp_path, dataset=dataset, compile="auto", max_iters=30) == 0
    out = capsys.readouterr().out
    assert ("compiling embedding, blocks and loss by themselves (auto: 2 layers)" in out) == (
        deep == 1
    )
    warnings = [line for line in out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no compiler here" in warnings[0] and "eagerly" in warnings[0]
    assert_same_run(tmp_path, short)


def test_compile_true_does_not(dataset, tmp_path, monkeypatch, capsys):
    break_compiler(monkeypatch, early=False)
    code = run(out_dir=tmp_path / "out", dataset=dataset, compile=True)
    refusal(capsys, code, "torch.compile failed (no compiler here)", "--compile=False")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dropout, factor", [(0.0, 2.0), (0.0, 0.0), (0.1, 2.0), (0.0, 1.0)])
def test_compiled_gradients_that_are_wrong_are_seen(dropout, factor, monkeypatch, capsys):
    """Twice as large, or zero; with dropout none are compared. Then the model runs eagerly."""
    model = build(dict(dropout=dropout)).train()
    monkeypatch.setattr(torch, "compile", lambda m, **_: lambda *b: (None, factor * m(*b)[1]))
    env = Env(0, 1, torch.device("cpu"), torch.float32, False)
    compiled = compilation.compile_model(model, TrainConfig(compile="auto"), batch(), env)
    is_wrong = factor != 1 and not dropout
    assert (compiled is model) == is_wrong
    assert (
        "in compiled code are not those of eager code; running eagerly" in capsys.readouterr().out
    ) == is_wrong
    if is_wrong:
        with pytest.raises(
            ValueError,
            match="qk.* are not those of eager code: use --compile=False, or another torch",
        ):
            compilation.compile_model(model, TrainConfig(compile=True), batch(), env)
    assert all(p.grad is None for p in model.parameters())


def test_compile_auto_does_not_on_a_gpu(monkeypatch):
    break_compiler(monkeypatch, early=True)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=50))
    env = Env(0, 1, torch.device("cuda"), torch.bfloat16, False)
    for kernels, advice in (("auto", "try --kernels=off first; else "), ("off", "")):
        with pytest.raises(
            ValueError,
            match=rf"no compiler here\); it needs .*Python.h.*: {advice}use --compile=False",
        ):
            compilation.compile_model(model, TrainConfig(kernels=kernels), model.example(1), env)
