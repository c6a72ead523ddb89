"""How deep the tests go: `make test` is quick, `make test-deep` runs hypothesis at full depth."""

import os

DEEP = os.environ.get("NANODNT_DEEP") == "1"  # set by conftest.py for `pytest --deep`


def examples(fast: int, deep: int) -> int:
    """How many examples hypothesis draws for a test."""
    return deep if DEEP else fast
