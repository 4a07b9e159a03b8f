"""How the machines of a hostfile agree on what is measured next. The first one decides; the others wait for it."""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from benchmarks.hosts import Host

PARTING = 10.0
"""Seconds that the first machine stays for the others to hear its last word."""
POLL = 0.2
"""Seconds between two looks."""
QUIET = 5.0
"""Seconds of waiting until it says for whom."""


class MeetingError(RuntimeError):
    """A machine did not come, or has gone."""


class Meeting:
    """One machine's end of it. A single machine meets nobody, and nothing is opened.

    Args:
        hosts: the machines, the first of which holds what is agreed on.
        index: which of them this one is.
        port: a free port there.
        timeout: the longest time that machines wait for each other, in seconds.
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
        """Whether this is the first machine."""
        return self._index == 0

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What each machine has to say, on every machine, in their order."""
        if self._store is None:
            return [value]
        self._store.set(f"{topic}/{self._index}", json.dumps(value))
        return [json.loads(self._get(topic, index)) for index in range(len(self._hosts))]

    def announce(self, topic: str, value: str) -> None:
        """Says something to the others, as the first machine."""
        if self._store is not None:
            self._store.set(f"{topic}/0", value)

    def hear(self, topic: str) -> str:
        """What the first machine says, once it does."""
        return self._get(topic, 0)

    def part(self) -> None:
        """Waits until all have come here, since what is said ends with the first machine; not for long: one may be
        gone."""
        if self._store is None:
            return
        self._store.set(f"parting/{self._index}", "")
        deadline = time.monotonic() + PARTING
        keys = [f"parting/{index}" for index in range(len(self._hosts))]
        while self.leads and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL)

    def _get(self, topic: str, index: int) -> str:
        store = self._store
        assert store is not None
        self._wait(f"has not said {topic} yet", lambda: store.check([f"{topic}/{index}"]), index)
        return store.get(f"{topic}/{index}").decode()

    def _wait(self, what: str, done: Callable[[], bool], index: int = 0) -> None:
        """In turns of looking and sleeping, so that Ctrl-C is heard, and not in silence.

        Raises:
            MeetingError: it took longer than the time limit.
        """
        begin, told = time.monotonic(), False
        while not done():
            waited = time.monotonic() - begin
            late = f"machine {index} ({self._hosts[index].name}) {what}"
            if waited > self._timeout:
                raise MeetingError(f"{late}, after {self._timeout:.0f} s")
            if waited > QUIET and not told:
                print(f"{late}; waiting", file=sys.stderr)
                told = True
            time.sleep(POLL)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=QUIET).close()
    except OSError:
        return False
    return True
