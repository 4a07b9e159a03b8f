"""Being told to stop: signals that a training notes, and obeys when it can."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While its ``with`` block runs, SIGTERM and SIGUSR1 are only noted; a second one ends the process at once.

    Afterwards the handlers from before are back. Python delivers signals to the main thread only: in any other thread
    it listens to nothing.

    Args:
        same_within: seconds within which another signal is taken for the same request. Who stops a job may signal its
            launcher and its ranks, and the launcher then signals the ranks again.
    """

    def __init__(self, same_within: float = 3.0) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came, or None."""
        self._same_within = same_within
        self._received_at = math.inf
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set by Python, and cannot be by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at >= self._same_within:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
