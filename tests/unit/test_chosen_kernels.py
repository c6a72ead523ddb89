"""Which faster ways to compute a run takes; that compiled code takes them; Triton's kernels by its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layers import loss
from nanodnt.run import kernels
from nanodnt.run.environment import Env
from support.models import batch, build
from support.operators import fresh_compiler

ROOT = Path(__file__).resolve().parents[2]
GPU = Env(0, 1, torch.device("cuda"), torch.bfloat16, False)


@pytest.fixture(autouse=True)
def forget():
    kernels.works.cache_clear()
    yield
    kernels.works.cache_clear()


@pytest.mark.parametrize(
    "setting, capability, names",
    (
        ("auto", (9, 0), ("cross_entropy", "qkv")),
        ("auto", (7, 5), ()),
        ("all", (10, 0), ("cross_entropy", "qkv", "ffn")),
        ("all", (8, 0), ("cross_entropy", "qkv")),
        ("off", (9, 0), ()),
    ),
)
def test_by_the_flag_and_the_gpu(setting, capability, names, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "works", lambda *_: True)
    found, text = kernels.choose_kernels(setting, GPU)
    assert found == names
    assert text == f"{', '.join(names) or 'none'} ({setting}, compute capability {capability[0]}.{capability[1]})"
    assert kernels.choose_kernels(setting, Env(0, 1, torch.device("cpu"), torch.float32, False))[0] == ()
    assert "ffn" not in kernels.possible_kernels(setting, capability, torch.float32)


def fail(*_):
    raise RuntimeError("no ptxas\nat all")


BROKEN = {"no padding": (lambda call: lambda x, t, n: call(x, t, n + 40), "its results are wrong")}
BROKEN["no gradient"] = lambda call: lambda x, t, n: call(x.clone(), t, n), "its results are wrong"
BROKEN["no compiler"] = lambda call: fail, "no ptxas"


@pytest.mark.parametrize("kind", BROKEN)
def test_an_operator_that_is_wrong_is_left_out(kind, monkeypatch, capsys):
    """With one warning, however often it is asked for."""
    spoil, reason = BROKEN[kind]
    spoilt = spoil(loss.OPERATORS.cross_entropy)
    monkeypatch.setattr(loss, "OPERATORS", type("Operators", (), dict(cross_entropy=staticmethod(spoilt))))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    trial = kernels.try_cross_entropy
    monkeypatch.setitem(kernels.TRIALS, "cross_entropy", lambda device, dtype: trial(torch.device("cpu"), dtype))
    for _ in range(2):
        assert kernels.choose_kernels("auto", GPU)[0] == ("qkv",)
    warning = f"warning: the kernel cross_entropy does not work here ({reason}): plain code takes its place\n"
    assert capsys.readouterr().out == warning


def test_compiled_code_alone_takes_the_operator():
    """Once a chunk, where it trains; test_compiled.py compares the results."""
    model, idx_and_targets = build(dict(n_layer=1)).train().set_runtime(loss_chunks=2), batch()
    name = f"{loss.NAMESPACE}::cross_entropy"

    def count(call) -> int:
        call(*idx_and_targets)  # which traces it
        with torch.profiler.profile() as profiler:
            call(*idx_and_targets)
        return sum(event.name == name for event in profiler.events())

    for names in ((), ("cross_entropy",)):
        model.runtime.kernels = names
        with fresh_compiler():
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
            assert count(compiled) == 2 * len(names)
        with fresh_compiler(), torch.no_grad():
            assert count(compiled) == 0
        assert count(model) == 0


@pytest.mark.deep
def test_triton_computes_what_float64_does():
    """By its interpreter, in a process that imports it so."""
    pytest.importorskip("triton")
    code = """
import sys
sys.path.append("tests")
import torch
from layers.kernels import ffn
from layers.kernels.cross_entropy import cross_entropy
from nanodnt.run.kernels import try_ffn
from support.kernels import check_all
check_all(cross_entropy)
assert all(try_ffn(torch.device("cpu"), dtype, ffn) for dtype in (torch.float32, torch.float16))
"""
    environment = os.environ | dict(TRITON_INTERPRET="1")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
