"""What the tests of whole runs share: quick runs, and one run of 30 steps to copy, resume and
compare with."""

import shutil
from functools import cache

import pytest

from support.faults import COMMANDS, Trial
from support.runs import load, quick_runs, run


@pytest.fixture(scope="session")
def short(dataset, tmp_path_factory):
    """A run of 30 steps without interruption, evaluated and saved every 10. Read only."""
    out = tmp_path_factory.mktemp("short")
    with quick_runs():
        assert run(out_dir=out, dataset=dataset, max_iters=30) == 0
    return out


@pytest.fixture(scope="session")
def first_20(dataset, tmp_path_factory):
    """The first 20 of those 30 steps. Read only."""
    out = tmp_path_factory.mktemp("first_20")
    with quick_runs():
        assert run(out_dir=out, dataset=dataset, max_iters=20, lr_decay_iters=30) == 0
    assert [load(out / name)["step"] for name in ("prev.pt", "last.pt")] == [10, 20]
    return out


@pytest.fixture
def begun(tmp_path, first_20):
    """A fresh copy of those 20 steps: prev.pt is of step 10, last.pt of step 20."""
    shutil.copytree(first_20, tmp_path / "begun")
    return tmp_path / "begun"


@pytest.fixture(scope="session")
def references(tmp_path_factory, dataset):
    """references(name of a command) → the Trial that nothing disturbed, made when first asked
    for."""
    return cache(
        lambda name: Trial(tmp_path_factory.mktemp("reference") / "run", COMMANDS[name], dataset)
    )


@pytest.fixture
def trial(references, dataset, tmp_path):
    """trial(name of a command) → its Trial."""
    return lambda name: Trial(tmp_path / "trial", COMMANDS[name], dataset, references(name))
