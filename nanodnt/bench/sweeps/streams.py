"""The dtype of the residual stream: what it costs, and saves."""

from functools import partial

from nanodnt.bench.compare import compare_variants
from nanodnt.bench.settings import Setting
from nanodnt.bench.variants import our_variant


def time_streams(setting: Setting) -> dict:
    """Time the step with each stream_dtype; float32 is the reference."""
    dtypes = ("float32", "bfloat16")
    makes = [partial(our_variant, f"{dtype} stream", setting.replace(stream_dtype=dtype)) for dtype in dtypes]
    return compare_variants(makes, setting)
