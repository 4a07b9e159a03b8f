"""Watches other processes, on this host or others, and tells at once when one has ended."""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

CONNECT_SECONDS = 1.0
TRIES, REFUSED_SECONDS = 3, 0.002
"""A peer that cannot be reached so often is dead. A network that loses one packet must not look like that."""
LOOK_SECONDS = 0.5
_SIOCGIFADDR = 0x8915  # Linux's request for an interface's address


class PeerWatch:
    """Holds a connection to each peer. When a peer's process ends, its kernel closes the connection.

    Then the watch tries to connect anew. A peer that cannot be reached is dead. One that is only stopped, or on a
    network that is cut, keeps its connection, so it is not.

    Args:
        towards: the host of the store, to find the address by which other hosts reach this one.
        on_death: is called in the watching thread, with the peer's number.
        look: is called in that thread every LOOK_SECONDS.
    """

    def __init__(self, towards: str, on_death: Callable[[int], None], look: Callable[[], None]) -> None:
        self._listener = socket.create_server((own_address(towards), 0), backlog=128)
        self.address: str = "{}:{}".format(*self._listener.getsockname()[:2])
        self._on_death, self._look = on_death, look
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()  # guards the next two
        self._peers: dict[int, str] = {}
        self._dead: set[int] = set()
        self._is_closed = False
        _all.add(self)
        self._thread = threading.Thread(target=self._run, name="fastsync peers", daemon=True)
        self._thread.start()

    def watch(self, peers: Mapping[int, str]) -> None:
        """Watches these peers from now on, by their addresses. It waits for connections to new ones."""
        with self._lock:
            new = {peer: address for peer, address in peers.items() if peer not in self._peers}
            self._peers |= new
        for peer in new:
            self._connect(peer)

    def dead(self) -> set[int]:
        """Returns the peers that have ended."""
        with self._lock:
            return set(self._dead)

    def close(self) -> None:
        """Closes all connections, so that peers take this process for dead. It stops watching."""
        self._is_closed = True
        reachable(self.address)  # wakes the thread
        if threading.current_thread() is not self._thread:  # garbage collection may call it there
            self._thread.join()

    def _connect(self, peer: int) -> None:
        for _ in range(TRIES):
            if self._try_to_connect(peer):
                return
        with self._lock:
            self._dead.add(peer)
        self._on_death(peer)

    def _try_to_connect(self, peer: int) -> bool:
        try:
            connection = _connection_to(self._peers[peer])
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            return True
        except ConnectionRefusedError:
            time.sleep(REFUSED_SECONDS)  # a host that has just lost the process
            return False
        except (OSError, ValueError, KeyError):  # it is gone, or the watch is closed
            return False

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(LOOK_SECONDS):
                self._serve(key)
            if not self._is_closed:
                self._look()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._forget(key.fileobj)  # type: ignore[arg-type]

    def _serve(self, key: selectors.SelectorKey) -> None:
        connection: socket.socket = key.fileobj  # type: ignore[assignment]
        if connection is self._listener:
            with suppress(OSError):
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                self._selector.register(accepted, selectors.EVENT_READ)
            return
        try:
            has_ended = connection.recv(1) == b""
        except BlockingIOError:  # there is nothing to read after all
            return
        except OSError:
            has_ended = True
        if has_ended:
            self._forget(connection)
            if key.data is not None and not self._is_closed:
                self._connect(key.data)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


_all: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes connections in a forked child, such as a DataLoader's worker, which would outlive the parent's death."""
    for watch in _all:
        for key in watch._selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]


os.register_at_fork(after_in_child=_leave_to_parent)


def host_and_port(address: str) -> tuple[str, int]:
    """Splits HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def reachable(address: str) -> bool:
    """Tells whether the process that listens there still lives."""
    with suppress(OSError):
        _connection_to(address).close()
        return True
    return False


def _connection_to(address: str) -> socket.socket:
    return socket.create_connection(host_and_port(address), CONNECT_SECONDS)


def own_address(towards: str) -> str:
    """Returns the address of the interface that Gloo is told to use, or of the one that leads to the store's host."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", name.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
