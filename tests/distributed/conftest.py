"""The runs that tests of several processes share: a folder with all of them. See
support/parallel_runs.py."""

import pytest

from support import parallel_runs
from support.processes import processes


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    """A folder with datasets and the runs of one process. Those of several processes are added to
    it."""
    folder = tmp_path_factory.mktemp("parallel")
    parallel_runs.on_one(folder)
    return folder


@pytest.fixture(scope="session")
def two(one):
    processes(2, parallel_runs.on_two, one)
    return one


@pytest.fixture(scope="session")
def two_more(two):
    """The cases of the deep suite."""
    parallel_runs.on_one_more(two)
    processes(2, parallel_runs.on_two_more, two)
    return two


@pytest.fixture(scope="session")
def three(two_more):
    processes(3, parallel_runs.on_three, two_more)
    return two_more


@pytest.fixture(scope="session")
def four(three):
    processes(4, parallel_runs.on_four, three)
    return three
