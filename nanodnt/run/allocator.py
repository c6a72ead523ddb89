"""Settings of torch's GPU memory allocator. torch reads them when it is imported: import this module before torch."""

import os
from importlib.metadata import version

from nanodnt import require

require("torch")
if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
    settings = "expandable_segments:True"  # less memory lost to gaps between tensors
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 13):
        settings += ",pinned_max_round_threshold_mb:64"  # larger pinned tensors are not rounded up to powers of two
    os.environ["PYTORCH_ALLOC_CONF"] = settings
