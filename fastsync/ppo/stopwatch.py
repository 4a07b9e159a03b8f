"""A stopwatch for work on the device that does it."""

import time

import torch


class Stopwatch:
    """Adds up the time that ``with`` blocks take on a device: on CUDA by events, which the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._started = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._on_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events.append((start, end))
            start.record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if self._on_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def seconds(self) -> float:
        """The total so far. On CUDA it waits for the blocks that are still running."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds
