"""What all tests share: the suites, the number of torch threads, a small dataset."""

import tempfile
from os import environ

# Tests run side by side, and so do the processes that they start: each on one thread. Where more
# are asked for, they wait asleep, since others need the cores. A process that crashes says where.
# Before torch is imported, which reads the first two.
environ.setdefault("OMP_NUM_THREADS", "1")
environ.setdefault("OMP_WAIT_POLICY", "passive")
environ.setdefault("PYTHONFAULTHANDLER", "1")

import hypothesis
import pytest

# The same examples each time; `pytest --hypothesis-profile=default` draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser):
    parser.addoption(
        "--house", action="store_true", help="run only what guards the shape of this repository"
    )
    parser.addoption(
        "--deep", action="store_true", help="run only the deep tests, and hypothesis at full depth"
    )


def pytest_configure(config):
    modules = tempfile.TemporaryDirectory()  # where transformers copies the code that exports carry
    config.add_cleanup(modules.cleanup)
    environ.setdefault("HF_MODULES_CACHE", modules.name)
    if config.getoption("--deep"):
        environ["NANODNT_DEEP"] = "1"  # before support.depth is imported


def pytest_ignore_collect(collection_path, config):
    """Without --house a file of nothing else is not even imported: it reads pages that a fork may
    have deleted."""
    if collection_path.suffix == ".py" and not config.getoption("--house"):
        return (
            "\npytestmark = pytest.mark.house\n" in collection_path.read_text(encoding="utf-8")
            or None
        )


def pytest_itemcollected(item):
    """One worker makes all tests of a file, and all that look at the runs of tests/distributed/."""
    group = "parallel runs" if "one" in item.fixturenames else item.path.name
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(config, items):
    """Without --deep leave the deep tests out; with it, leave out what `make test` has already
    shown. What guards this repository's shape, its pages and its configs runs with --house alone: a
    fork changes them."""
    deep, house = config.getoption("--deep"), config.getoption("--house")

    def is_wanted(item):
        if house or item.get_closest_marker("house"):
            return house and bool(item.get_closest_marker("house"))
        depends_on_depth = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        return bool(item.get_closest_marker("deep")) == deep or (deep and depends_on_depth)

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = [item for item in items if is_wanted(item)]


pytest.register_assert_rewrite("support")

from support.runs import make_dataset, quick_runs  # noqa: E402


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A small prepared dataset, for tests that only read it."""
    return make_dataset(tmp_path_factory.mktemp("data") / "walk")


@pytest.fixture(scope="module")
def quick():
    with quick_runs():
        yield
