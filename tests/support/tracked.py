"""row["track"] of runs, two of their layouts, and comparing nested numbers."""

import pytest
from torch.utils._pytree import tree_leaves_with_path

from support.tolerances import FOR_PRINTING, FORWARD

PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)
UNIFIED = dict(PRE, qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir")


SIX_DIGITS = FOR_PRINTING + FORWARD


def assert_close_numbers(got, expected, rel=SIX_DIGITS):
    """Nested numbers are equal to `rel`; None only where None is expected. Tracked numbers have six
    digits."""
    got, expected = (dict(tree_leaves_with_path(value)) for value in (got, expected))
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        assert (x is None) == (got[path] is None)
        assert x is None or got[path] == pytest.approx(x, rel=rel, abs=1e-12, nan_ok=True)
