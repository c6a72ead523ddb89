"""The cores of this process. Imports nothing slow: workers that prepare data use it."""

import os

processes_here = 1  # processes of one run on this machine, which share its cores


def share_cores(processes: int) -> None:
    """Let `processes` of one run share the cores of this machine."""
    global processes_here
    processes_here = processes


def own_cores() -> int:
    """Cores that this process may use, shared with the other processes of its run on this
    machine."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // processes_here)
