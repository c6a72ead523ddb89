"""The operators that have Triton kernels: on a GPU these, on a CPU what stands for them."""

import pytest
import torch

from layers import ffn
from layers.loss import OPERATORS
from nanodnt.run import kernels
from support.devices import on_devices
from support.kernels import CROSS_ENTROPY, DTYPES, check_cross_entropy, check_ffn


@pytest.mark.parametrize("device, case", on_devices(CROSS_ENTROPY, cpu=CROSS_ENTROPY))
def test_cross_entropy_is_that_of_float64(device, case):
    for dtype in DTYPES:
        check_cross_entropy(OPERATORS.cross_entropy, device, dtype, case)


@pytest.mark.parametrize("device, act", on_devices(ffn.DERIVATIVES, cpu=ffn.DERIVATIVES))
def test_products_with_an_activation_are_those_of_float64(device, act):
    if "ffn" not in names_for(device, torch.bfloat16):
        pytest.skip("the kernel needs a GPU of compute capability 9.0")
    for dtype in ffn.DTYPES:
        check_ffn(ffn.OPERATORS, device, dtype, act)


@pytest.mark.parametrize("device, dtype", on_devices(DTYPES, cpu=DTYPES))
def test_they_pass_the_trial_at_the_start(device, dtype):
    names = kernels.TRIALS.keys() & names_for(device, dtype)
    assert names and [name for name in names if not kernels.works(name, torch.device(device), dtype)] == []


def names_for(device: str, dtype: torch.dtype) -> list:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    return kernels.possible_kernels("all", capability, dtype)
