"""What the hostile tests share: one small run to spoil, and ways to read it."""

from contextlib import ExitStack
from shutil import copytree

import pytest

from support import runs
from support.hostile import World, make_world


@pytest.fixture(scope="session")
def earlier(tmp_path_factory):
    """A World that nobody may change: spoil a copy."""
    return make_world(tmp_path_factory.mktemp("earlier"))


@pytest.fixture
def world(earlier, tmp_path, monkeypatch):
    """A World to spoil; it is the working directory."""
    copytree(earlier.tmp, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as later:
        yield World(tmp_path, tmp_path / "run", tmp_path / "data", monkeypatch, later)


@pytest.fixture(scope="session")
def original(earlier):
    """A function that reads a checkpoint of `earlier`, without the code under test. (This and the next are functions so
    that hypothesis does not print all they return.)"""
    return lambda name="last.pt": runs.load(earlier.run / name)


@pytest.fixture(scope="session")
def file(earlier):
    """A function that reads the bytes of a checkpoint of `earlier`."""
    return lambda name="last.pt": (earlier.run / name).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """An empty folder for the examples of hypothesis, one after the other."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def quick():
    """Runs without a loss curve, a quarter of a second each, and without asking git, which takes two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanodnt.run.loss_curve.draw_loss", lambda *_: None)
        patch.setattr("nanodnt.run.directory.run_record", dict)
        yield
