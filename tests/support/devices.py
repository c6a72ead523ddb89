"""Checks that are made on a GPU (`make test-gpu`); on the CPU, at toy size, a few of them try the code of the test."""

import pytest
import torch

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"))


def on_devices(cases, cpu=()) -> list:
    """Parameters (device, *case) of a test: all cases on a GPU, those in `cpu` on the CPU too."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    cpu = [case if isinstance(case, tuple) else (case,) for case in cpu]
    assert set(cpu) <= set(cases)
    return [pytest.param("cuda", *case, marks=GPU) for case in cases] + [("cpu", *case) for case in cpu]
