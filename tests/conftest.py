"""Fixtures that several test files use."""

import pytest
import torch

pytest.register_assert_rewrite("helpers")

from helpers import make_dataset  # noqa: E402


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A small prepared dataset, for tests that only read it."""
    return make_dataset(tmp_path_factory.mktemp("data") / "walk")


@pytest.fixture(scope="module")
def one_thread():
    """One CPU thread, as the processes of helpers.py have: the same sums, and no waiting for cores others use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
