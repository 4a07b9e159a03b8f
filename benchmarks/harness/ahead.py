"""Times a GPU's work alone: the GPU is kept busy until the host has started all of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

FIRST_CYCLES, MOST_CYCLES = 1 << 20, 1 << 31
"""Clock cycles that a GPU is kept busy: about a millisecond at first, and at most about a second."""


class Mark(Protocol):
    """A moment of the GPU, as ``torch.cuda.Event`` knows it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Mark") -> float: ...


class Gpu:
    """What is asked of the current GPU."""

    def sleep(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Times:
    """Seconds."""

    device: float
    """From the begin of the first call's work on the device to the end of the last one's."""
    host: float
    """What the host took to start the calls."""


class HostAhead:
    """A clock for calls that start work on a GPU.

    The GPU sleeps first, and longer if the host has not started all calls by then. So between kernels it does not wait
    for the host, as in training, where the host is ahead as well. A call that starts more kernels than the GPU's queue
    takes does make the host wait. The time of such calls is what it is after the longest sleep.
    """

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu or Gpu()
        self._cycles = FIRST_CYCLES

    def time(self, calls: Sequence[Callable[[], object]]) -> Times:
        """Makes the calls, more than once if need be, and waits for them."""
        while True:
            self._gpu.sleep(self._cycles)
            start = self._gpu.mark()
            began = time.perf_counter()
            for call in calls:
                call()
            host = time.perf_counter() - began
            end = self._gpu.mark()
            was_ahead = not start.query()
            end.synchronize()
            if was_ahead or self._cycles >= MOST_CYCLES:
                return Times(start.elapsed_time(end) / 1000, host)
            self._cycles *= 2
