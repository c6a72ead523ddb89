"""What the tests of whole runs share: quick runs, and one run of 30 steps to copy, resume and compare with."""

import shutil
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from support.faults import COMMANDS
from support.runs import load, run
from support.trials import Trial


@contextmanager
def quick_runs():
    """Runs on one thread, without what takes time and is not tested: the loss curve, asking git, and collecting
    garbage, for which Python walks through all that earlier tests have left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanodnt.run.loss_curve.draw_loss", lambda *_: None)
        patch.setattr("train.gc", SimpleNamespace(**dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: None)))
        patch.setattr("nanodnt.run.directory.run_record", dict)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick():
    with quick_runs():
        yield


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
    """references(name of a command) → the Trial that nothing disturbed, made when first asked for."""
    return cache(lambda name: Trial(tmp_path_factory.mktemp("reference") / "run", COMMANDS[name], dataset))


@pytest.fixture
def trial(references, dataset, tmp_path):
    """trial(name of a command) → its Trial."""
    return lambda name: Trial(tmp_path / "trial", COMMANDS[name], dataset, references(name))
