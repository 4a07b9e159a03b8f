"""Counts the cores that there are to compute on."""

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Cores that this process may use, at least 1: those it may run on, and no more than the container's share of time.

    A share of one and a half cores is one: a second rank would have half of one.
    """
    allowed = len(os.sched_getaffinity(0))
    quota, period = CPU_MAX.read_text().split() if CPU_MAX.exists() else ("max", "")
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
