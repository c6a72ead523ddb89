"""What hypothesis draws for the hostile tests, and how often."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from support.depth import examples

HUGE = [2**31, 2**40, 2**62, 2**63, 10**30, -1, -(10**30)]
NUMBERS = st.one_of(
    st.integers(-3, 100),
    st.sampled_from(HUGE),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), 1e300, -1e-9]),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=8),
    st.sampled_from(["scratch", "muon", "rope"]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def drawn(fast: int, deep: int):
    """Settings for a test of so many examples, which may be slow and large."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    many = examples(fast, deep)
    return settings(max_examples=many, deadline=None, database=None, suppress_health_check=checks)
