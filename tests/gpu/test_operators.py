"""The operators that have Triton kernels: on a GPU these, on a CPU what stands for them."""

import pytest
import torch

from layers.loss import OPERATORS
from nanodnt.run import kernels
from support.devices import on_devices
from support.kernels import CROSS_ENTROPY, DTYPES, check_cross_entropy


@pytest.mark.parametrize("device, case", on_devices(CROSS_ENTROPY, cpu=CROSS_ENTROPY))
def test_cross_entropy_is_that_of_float64(device, case):
    check_cross_entropy(OPERATORS.cross_entropy, device, case)


@pytest.mark.parametrize("device, dtype", on_devices(DTYPES, cpu=DTYPES))
def test_they_pass_the_trial_at_the_start(device, dtype):
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    names = kernels.TRIALS.keys() & kernels.possible_kernels("all", capability, dtype)
    assert (
        names
        and [name for name in names if not kernels.works(name, torch.device(device), dtype)] == []
    )
