"""How deep the tests go: `make test` is quick, `make test-deep` runs what is left out and
hypothesis at full depth."""

import os

import pytest

DEEP = os.environ.get("NANODNT_DEEP") == "1"  # set by conftest.py for `pytest --deep`


def examples(fast: int, deep: int) -> int:
    """How many examples hypothesis draws for a test."""
    return deep if DEEP else fast


def spread(cases, fast) -> list:
    """Parameters of a test. Cases in `fast` run in the fast suite; the others are deep."""
    assert set(fast) <= set(cases), set(fast) - set(cases)
    return [pytest.param(case, marks=() if case in fast else pytest.mark.deep) for case in cases]
