"""How the machines of a hostfile agree on what is measured next. The first one decides; the others wait for it."""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from benchmarks.hosts import Host

PARTING = 10.0
"""Seconds that the first machine stays for the others to hear its last word."""
POLL = 0.2
"""Seconds between two looks, so that Ctrl-C is heard."""


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
        return [json.loads(self._get(f"{topic}/{index}")) for index in range(len(self._hosts))]

    def announce(self, topic: str, value: str) -> None:
        """Says something to the others."""
        if self._store is not None:
            self._store.set(topic, value)

    def hear(self, topic: str) -> str:
        """What the first machine says, once it does."""
        return self._get(topic)

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

    def _get(self, key: str) -> str:
        assert self._store is not None
        deadline = time.monotonic() + self._timeout
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"machine {self._index} waited {self._timeout:.0f} s for {key} and nobody said it")
            time.sleep(POLL)
        return self._store.get(key).decode()
