"""Settings of torch's GPU memory allocator. torch reads them when it is imported: import this module before torch."""

import os

if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less memory lost to gaps between tensors
