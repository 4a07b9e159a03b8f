"""Lets the machines of a hostfile agree on what is measured next, and hear of it when one of them is in trouble."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore

from benchmarks.network.hosts import Host
from fastsync.launch.torchrun import thread_meanwhile

POLL = 0.2
"""Seconds between two looks."""
QUIET = 5.0
"""Seconds of waiting until it says for whom."""
PULSE = 1.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without a sign of life after which a machine counts as gone."""
PARTING = 10.0
"""Seconds that the first machine stays for the others, which what was said ends with."""
TROUBLE = "trouble"


class CoordinationError(RuntimeError):
    """A machine did not come, has gone, or is in trouble."""


class Coordinator:
    """One machine's end of it. A single machine meets nobody, and nothing is opened.

    Args:
        hosts: the machines, the first of which holds what is said.
        index: which of them this one is.
        port: a free port there.
        timeout: the longest time that machines wait for each other, in seconds.

    Raises:
        CoordinationError: the first machine has not begun within ``timeout``.
    """

    def __init__(self, hosts: Sequence[Host], index: int, port: int, timeout: float) -> None:
        self._hosts, self._index, self._timeout = hosts, index, timeout
        self._store: TCPStore | None = None
        if len(hosts) > 1:
            if index > 0:
                self._wait("has not begun yet", lambda: _listens(hosts[0].name, port))
            limit = timedelta(seconds=timeout)
            self._store = TCPStore(hosts[0].name, port, None, index == 0, limit, wait_for_workers=False)

    @property
    def leads(self) -> bool:
        """True on the first machine."""
        return self._index == 0

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Returns what each machine gave, on every machine, in their order."""
        if self._store is None:
            return [value]
        self._store.set(f"{topic}/{self._index}", json.dumps(value))
        return [json.loads(self._get(topic, index)) for index in range(len(self._hosts))]

    def announce(self, topic: str) -> None:
        """Tells the others, as the first machine, that they may go on."""
        if self._store is not None:
            self._store.set(f"{topic}/0", "")

    def hear(self, topic: str) -> None:
        """Waits until the first machine has announced it."""
        self._get(topic, 0)

    def warn(self, trouble: str) -> None:
        """Tells the others that this machine cannot go on, if there is anybody to hear it."""
        if self._store is not None:
            with suppress(DistError):
                self._store.set(TROUBLE, f"{self._name(self._index)}: {trouble}")

    def part(self) -> None:
        """Waits, on the first machine, until all have come here; not for long, since one may be gone."""
        if self._store is None:
            return
        with suppress(DistError):
            self._store.set(f"parting/{self._index}", "")
            deadline = time.monotonic() + PARTING
            keys = [f"parting/{index}" for index in range(len(self._hosts))]
            while self.leads and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL)

    @contextmanager
    def watched(self, num_machines: int) -> Iterator[None]:
        """Interrupts what is in the ``with`` block, as Ctrl-C would, when one of the first machines is in trouble.

        Ranks that wait for those of a machine which has gone would wait long, and their launcher longer.

        Raises:
            CoordinationError: in place of what the interrupt has raised.
        """
        if self._store is None or num_machines == 1:
            yield
            return
        found: list[str] = []

        def watch(over: threading.Event) -> None:
            last = {index: (0, time.monotonic()) for index in range(num_machines)}
            while not found and not over.wait(PULSE):
                found.extend(self._trouble(last))
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

        with thread_meanwhile(watch, "watches the other machines"):
            try:
                yield
            except (Exception, KeyboardInterrupt) as error:
                if found:
                    raise CoordinationError(found[0]) from error
                raise

    def _trouble(self, last: dict[int, tuple[int, float]]) -> Iterator[str]:
        """Gives a sign of life and looks for those of the others, whose newest and their times are in ``last``."""
        store, now = self._store, time.monotonic()
        assert store is not None
        try:
            if store.check([TROUBLE]):
                yield store.get(TROUBLE).decode()
            store.add(f"pulse/{self._index}", 1)
            for index, (count, since) in last.items():
                newest = store.add(f"pulse/{index}", 0)
                if newest != count:
                    last[index] = newest, now
                elif now - since > SILENCE:
                    yield f"{self._name(index)} has not been heard of for {SILENCE:.0f} s"
        except DistError:
            yield f"{self._name(0)} has gone"

    def _get(self, topic: str, index: int) -> str:
        store = self._store
        assert store is not None

        def said() -> bool:
            # Trouble comes last, and what was said before it still counts: so trouble is looked for first, or both
            # might come between the two looks.
            in_trouble = store.check([TROUBLE])
            if store.check([f"{topic}/{index}"]):
                return True
            if in_trouble:
                raise CoordinationError(store.get(TROUBLE).decode())
            return False

        try:
            self._wait(f"has not said {topic} yet", said, index)
            return store.get(f"{topic}/{index}").decode()
        except DistError:
            raise CoordinationError(f"{self._name(0)} has gone") from None

    def _wait(self, what: str, done: Callable[[], bool], index: int = 0) -> None:
        """In turns of looking and sleeping, so that Ctrl-C is heard, and not in silence."""
        begin, told = time.monotonic(), False
        while not done():
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise CoordinationError(f"{self._name(index)} {what}, after {self._timeout:.0f} s")
            if waited > QUIET and not told:
                print(f"{self._name(index)} {what}; waiting", file=sys.stderr)
                told = True
            time.sleep(POLL)

    def _name(self, index: int) -> str:
        return f"machine {index} ({self._hosts[index].name})"


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=QUIET).close()
    except OSError:
        return False
    return True
