"""Network namespaces as hosts: ranks in different ones share no memory.

Connections that a process has made stay as they are when it changes its namespace. So ranks connect first, and enter
their hosts only for as long as fastsync looks for ranks to share memory with.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_OWN = "/proc/thread-self/ns/net"


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Makes so many namespaces, as files to ``enter``; skips the test where this user may not."""
    files: list[int] = []
    errors: list[OSError] = []

    def make() -> None:  # on a thread of its own, whose namespace may change
        for _ in range(count):
            try:
                _check(_libc.unshare(_CLONE_NEWNET))
            except OSError as error:
                errors.append(error)
                return
            files.append(os.open(_OWN, os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    try:
        if errors:
            pytest.skip(f"this user may not make network namespaces: {errors[0]}")
        yield [f"/proc/{os.getpid()}/fd/{file}" for file in files]
    finally:
        for file in files:
            os.close(file)


@contextmanager
def entered(host: str) -> Iterator[None]:
    """Has this thread run on the host."""
    before = os.open(_OWN, os.O_RDONLY)
    _set(host)
    try:
        yield
    finally:
        _check(_libc.setns(before, _CLONE_NEWNET))
        os.close(before)


def host_of(nodes: Sequence[Sequence[int]], rank: int) -> int:
    """Which of the nodes a rank is on."""
    return next(index for index, ranks in enumerate(nodes) if rank in ranks)


def _set(host: str) -> None:
    file = os.open(host, os.O_RDONLY)
    try:
        _check(_libc.setns(file, _CLONE_NEWNET))
    finally:
        os.close(file)


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
