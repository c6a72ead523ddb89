"""The cores of this process. Imports nothing slow: workers that prepare data use it."""

import os

# processes of one run on this machine, which share its cores; set when they join their group
processes_here = 1


def own_cores() -> int:
    """Cores that this process may use, shared with the other processes of its run on this
    machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // processes_here)
