"""Outer steps that run beside the training, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

END_SECONDS = 1.0
"""Seconds that the end of the process waits for an interrupted call."""


class BackgroundCalls:
    """Makes calls in threads, one after the other, so that all ranks send in the same order.

    The threads are daemons: a process that an error ends must not wait for a lost site.
    """

    def __init__(self) -> None:
        self._newest: Future[None] | None = None

    def start(self, call: Callable[[], None]) -> Future[None]:
        """Makes the call after those that were started before. An error of one of them is an error of this one.

        Once ``result`` or ``wait`` has raised the error, calls begin anew.
        """
        done, previous = Future[None](), self._newest

        def run() -> None:
            try:
                if previous is not None:
                    previous.result()
                call()
                done.set_result(None)
            except BaseException as error:  # it is raised where the result is asked for
                done.set_exception(error)

        threading.Thread(target=run, name="fastsync outer step", daemon=True).start()
        self._newest = done
        return done

    def result(self, call: Future[None]) -> None:
        """Waits for a call, and raises its error."""
        try:
            call.result()
        except BaseException:
            if has_failed(call):  # else it is this thread that was interrupted
                if self._newest is not None:
                    wait([self._newest])  # for those after it, which fail at once
                self._newest = None
            raise

    def wait(self) -> None:
        """Waits for all calls, and raises the error of one that has failed."""
        if self._newest is not None:
            self.result(self._newest)

    def end(self, interrupt: Callable[[], None]) -> None:
        """Interrupts a call that is under way when the process ends.

        Before Python 3.14 a daemon thread that comes back from C++ later would abort the process.
        """
        if self._newest is not None and not self._newest.done():
            interrupt()
            wait([self._newest], timeout=END_SECONDS)


def has_failed(call: Future[None]) -> bool:
    """Tells whether a call has ended by an error."""
    return call.done() and call.exception() is not None
