"""row["track"] of runs: reading it, and comparing nested numbers."""

import pytest

from support.runs import column

PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)
UNIFIED = dict(PRE, qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir")


def tracks(out_dir) -> dict:
    """{step: row["track"]} of a run."""
    return column(out_dir, "track")


def leaves(value, path=()) -> dict:
    """{path: number} of nested dicts and lists."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    return {path: value} if parts is None else {k: x for key, v in parts for k, x in leaves(v, (*path, key)).items()}


def assert_close_numbers(got, expected, rel=2e-5):
    """Nested numbers are equal to `rel`; None only where None is expected. Tracked numbers have six digits."""
    got, expected = leaves(got), leaves(expected)
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        assert (x is None) == (got[path] is None) and (x is None or got[path] == pytest.approx(x, rel=rel, abs=1e-12))
