"""torch.compile in runs: exact resuming; what happens where it fails."""

import pytest
import torch

from support.hostile import refusal
from support.runs import assert_same_run, run

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.deep
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


@pytest.mark.parametrize("early, deep", [(True, 99), (False, 99), (False, 1)], ids=["early", "late", "blocks"])
def test_compile_auto_falls_back(early, deep, short, dataset, tmp_path, monkeypatch, capsys):
    """In torch.compile or in the first call; with one graph, or with one for each block."""
    break_compiler(monkeypatch, early)
    monkeypatch.setattr("nanodnt.run.compilation.DEEP", deep)
    monkeypatch.setattr("nanodnt.start.choose_compile", lambda *_: (True, "auto"))
    assert run(out_dir=tmp_path, dataset=dataset, compile="auto", max_iters=30) == 0
    out = capsys.readouterr().out
    assert ("compiling each block and the loss by themselves (auto: 2 layers)" in out) == (deep == 1)
    warnings = [line for line in out.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "no compiler here" in warnings[0] and "eagerly" in warnings[0]
    assert_same_run(tmp_path, short)


@pytest.mark.parametrize("early", [True, False], ids=["in torch.compile", "in the first call"])
def test_compile_true_does_not(early, dataset, tmp_path, monkeypatch, capsys):
    break_compiler(monkeypatch, early)
    code = run(out_dir=tmp_path / "out", dataset=dataset, compile=True)
    refusal(capsys, code, "torch.compile failed (no compiler here)", "--compile=False")
    assert not (tmp_path / "out").exists()
