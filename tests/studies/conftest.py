"""Figures are drawn without what takes most of the time: a search for the layout, and labels of
ticks."""

import pytest

from studies.analysis.figure import STYLE
from support.claims import write_base

STYLE |= {
    "figure.constrained_layout.use": False,
    "xtick.labelbottom": False,
    "ytick.labelleft": False,
}


@pytest.fixture(scope="module")
def base(dataset, tmp_path_factory):
    """The config file of a tiny model, 20 steps: of the made-up family of claims, and of sweeps."""
    return write_base(tmp_path_factory.mktemp("base") / "base.py", dataset)
