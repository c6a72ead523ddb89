"""The cores of this process. Imports nothing slow: workers that prepare data use it."""

import os


def own_cores() -> int:
    """Cores that this process may use, shared with the other processes of its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
