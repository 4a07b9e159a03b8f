"""Signals: handlers for the time of a ``with`` block, and a note that a training was told to stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that tell a job to stop in order."""


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], Any], numbers: Iterable[int], restored: Iterable[int] = ()
) -> Iterator[None]:
    """Handles signals inside a ``with`` block, and restores the previous handlers at its end.

    Python delivers signals to the main thread only. In any other thread this does nothing.

    Args:
        handler: the handler of these signals.
        numbers: the signals.
        restored: more signals whose previous handlers are restored, because code in the block may replace them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = list(numbers)
    before = {number: signal.getsignal(number) for number in (*numbers, *restored)}
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            # None means that Python has not set the handler, so it cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler_before is None else handler_before)


class StopSignals:
    """Notes SIGTERM and SIGUSR1 inside its ``with`` block. A second signal ends the process at once.

    It works in the main thread only, as ``handling``.

    Args:
        same_within: seconds within which another signal counts as the same request. Who stops a job may signal its
            launcher and its ranks, and the launcher then signals the ranks again.
    """

    def __init__(self, same_within: float = 3.0) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came, or None."""
        self._same_within = same_within
        self._received_at = math.inf
        self._handling = handling(self._note, STOP_SIGNALS)

    def __enter__(self) -> StopSignals:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handling.__exit__(None, None, None)

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at >= self._same_within:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
