"""The runs that tests of several processes share: a folder with all of them. See support/parallel_runs.py."""

import pytest

from support import parallel_runs
from support.processes import processes


@pytest.fixture(scope="session")
def one(dataset, tmp_path_factory):
    """A folder with the runs of one process. Those of several processes are added to it."""
    folder = tmp_path_factory.mktemp("parallel")
    parallel_runs.on_one(folder, dataset)
    return folder


@pytest.fixture(scope="session")
def two(one, dataset):
    processes(2, parallel_runs.on_two, one, dataset)
    return one


@pytest.fixture(scope="session")
def two_more(two, dataset):
    """The cases of the deep suite."""
    parallel_runs.on_one_more(two, dataset)
    processes(2, parallel_runs.on_two_more, two, dataset)
    return two


@pytest.fixture(scope="session")
def three(two_more, dataset):
    processes(3, parallel_runs.on_three, two_more, dataset)
    return two_more


@pytest.fixture(scope="session")
def four(three, dataset):
    processes(4, parallel_runs.on_four, three, dataset)
    return three
