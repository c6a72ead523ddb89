"""Which faster ways to compute a run takes; Triton's kernels by its interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from nanodnt.run import kernels
from support.runs import ROOT

GPU = torch.device("cuda"), torch.bfloat16


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
    found, text = kernels.choose_kernels(setting, *GPU)
    assert found == names
    major, minor = capability
    chosen = ", ".join(names) or "none"
    assert text == f"{chosen} ({setting}, compute capability {major}.{minor})"
    assert kernels.choose_kernels(setting, torch.device("cpu"), torch.float32)[0] == ()
    assert "ffn" not in kernels.possible_kernels(setting, capability, torch.float32)


def fail(*_):
    raise RuntimeError("no ptxas\nat all")


BROKEN = {"no gradient": (lambda losses, grad: (losses, 0 * grad), "its results are wrong")}
BROKEN["NaN"] = lambda losses, grad: (losses * torch.nan, grad), "its results are wrong"
BROKEN["no compiler"] = fail, "no ptxas"


@pytest.mark.parametrize("kind", BROKEN)
def test_an_operator_that_is_wrong_is_left_out(kind, monkeypatch, capsys):
    """With one warning, however often it is asked for."""
    spoil, reason = BROKEN[kind]
    compute, shapes = kernels.TRIALS["cross_entropy"]
    trial = kernels.try_kernel

    def spoilt(logits):
        return compute(logits) if logits.dtype == torch.float64 else spoil(*compute(logits))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        kernels, "try_kernel", lambda name, device, dtype: trial(name, torch.device("cpu"), dtype)
    )
    assert kernels.works("cross_entropy", torch.device("cpu"), GPU[1])
    monkeypatch.setitem(kernels.TRIALS, "cross_entropy", (spoilt, shapes))
    for _ in range(2):
        assert kernels.choose_kernels("auto", *GPU)[0] == ("qkv",)
    warning = f"warning: the kernel cross_entropy does not work here ({reason})"
    assert capsys.readouterr().out == f"{warning}: plain code takes its place\n"


@pytest.mark.deep
def test_triton_computes_what_float64_does():
    """By its interpreter, in a process that imports it so."""
    pytest.importorskip("triton")
    code = """
import sys
sys.path.append("tests")
import torch
from layers.kernels import cross_entropy, ffn
from nanodnt.run.kernels import try_kernel
from support.kernels import CROSS_ENTROPY, check_cross_entropy
for case in CROSS_ENTROPY:
    check_cross_entropy(cross_entropy.cross_entropy, "cpu", case)
for dtype in (torch.float32, torch.float16):
    assert try_kernel("ffn", torch.device("cpu"), dtype, operators=ffn)
"""
    environment = os.environ | dict(TRITON_INTERPRET="1")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
