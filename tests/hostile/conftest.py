"""What the hostile tests share: one small run to spoil, and ways to read it."""

from shutil import copytree

import pytest

from support import runs
from support.hostile import CHECKPOINTS, TRAIN, World


@pytest.fixture(scope="session")
def earlier(tmp_path_factory):
    """A World that nobody may change: spoil a copy."""
    tmp = tmp_path_factory.mktemp("earlier")
    world = World(tmp, tmp / "run", runs.make_dataset(tmp / "data"))
    assert runs.run(**TRAIN, out_dir=world.run, dataset=world.data) == 0
    assert {p.name for p in world.run.iterdir()} >= {*CHECKPOINTS, "metrics.jsonl", "config.json"}
    return world


@pytest.fixture
def world(earlier, tmp_path, monkeypatch):
    """A World to spoil; it is the working directory."""
    copytree(earlier.tmp, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return World(tmp_path, tmp_path / "run", tmp_path / "data", monkeypatch)


@pytest.fixture(scope="session")
def original(earlier):
    """A function that reads a checkpoint of `earlier`, without the code under test. (This and the
    next are functions so that hypothesis does not print all they return.)"""
    return lambda name="last.pt": runs.load(earlier.run / name)


@pytest.fixture(scope="session")
def file(earlier):
    """A function that reads the bytes of a checkpoint of `earlier`."""
    return lambda name="last.pt": (earlier.run / name).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """An empty folder for the examples of hypothesis, one after the other."""
    return tmp_path_factory.mktemp("scratch")
