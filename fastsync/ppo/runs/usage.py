"""What a rank uses of its machine: cores, memory and its GPU."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import torch

INTERVAL = 0.5
"""Seconds between two measurements. In between ``read`` returns the last one."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses. NaN means that it is not known. Processes of environments do not count."""

    cores: float = math.nan  # Cores that were busy for it, on average since the measurement before.
    memory: float = math.nan  # Its resident memory in bytes.
    gpu: float = math.nan  # The share of time, from 0 to 1, in which its GPU worked, for any process.
    gpu_memory: float = math.nan  # Bytes in use on its GPU, by any process.


NO_USAGE = Usage()
"""Nothing is known."""


class UsageMeter:
    """Measures what this process uses.

    Args:
        device: its GPU, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured_at, self._busy = time.perf_counter(), time.process_time()
        self._newest = NO_USAGE

    def read(self) -> Usage:
        """Returns the newest measurement. It neither waits for the GPU nor uses it."""
        now = time.perf_counter()
        if now - self._measured_at < INTERVAL:
            return self._newest
        busy = time.process_time()
        cores = (busy - self._busy) / (now - self._measured_at)
        self._measured_at, self._busy = now, busy
        self._newest = Usage(cores, _resident_bytes(), *_gpu_usage(self._device))
        return self._newest


def _resident_bytes() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return math.nan


def _gpu_usage(device: torch.device) -> tuple[float, float]:
    """Returns utilisation and bytes in use, by NVML. Without its Python module the memory is torch's own."""
    if device.type != "cuda":
        return math.nan, math.nan
    try:
        return torch.cuda.utilization(device) / 100, float(torch.cuda.device_memory_used(device))
    except Exception:  # the module is missing, or a driver in a container lacks NVML
        return math.nan, float(torch.cuda.memory_reserved(device))
