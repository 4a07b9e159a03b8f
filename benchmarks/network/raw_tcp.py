"""Plain TCP between hosts in a ring: what the links carry without PyTorch."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

CHUNK = 2**20


def ring_rate(host: int, addresses: Sequence[str], port: int, rate: int, seconds: float, timeout: float) -> float:
    """Bit/s of payload on the slowest link while every host sends to the next one: the best that a ring could have.

    A collective call of a process on each host; what it returns is right on host 0.

    Args:
        host: of this process.
        addresses: of all hosts, two at least.
        port: free on host 0, where the processes find each other.
        rate: what the links should carry, in bit/s.
        seconds: how long the transfer takes at that rate.
        timeout: seconds to wait for another host, each time.

    Raises:
        DistError: another host did not come.
        TimeoutError: one did not answer in time.
        ConnectionError: one has gone.
    """
    store = TCPStore(addresses[0], port, len(addresses), host == 0, timedelta(seconds=timeout))
    num_bytes = max(1, round(rate / 8 * seconds))
    with _ring(store, host, addresses, timeout) as (previous, following):
        store.set(f"ready/{host}", "")
        store.wait([f"ready/{other}" for other in range(len(addresses))])
        began = time.perf_counter()
        sender = threading.Thread(target=_send, args=(following, num_bytes), daemon=True)
        sender.start()
        _receive(previous, num_bytes)
        sender.join()
        slowest = time.perf_counter() - began
        store.set(f"seconds/{host}", str(slowest))
        if host == 0:  # alone, as it holds the store: the others may find it gone
            slowest = max(float(store.get(f"seconds/{other}")) for other in range(len(addresses)))
    return 8 * num_bytes / slowest


@contextmanager
def _ring(
    store: TCPStore, host: int, addresses: Sequence[str], timeout: float
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connections from the previous host and to the following one."""
    after = (host + 1) % len(addresses)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((addresses[host], 0)))
        server.settimeout(timeout)
        store.set(f"port/{host}", str(server.getsockname()[1]))
        place = addresses[after], int(store.get(f"port/{after}"))
        following = stack.enter_context(socket.create_connection(place, timeout))
        previous = stack.enter_context(server.accept()[0])
        for connection in (previous, following):
            connection.settimeout(timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield previous, following


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(min(CHUNK, num_bytes)))
    while num_bytes:
        num_bytes -= connection.send(chunk[:num_bytes])


def _receive(connection: socket.socket, num_bytes: int) -> None:
    buffer = bytearray(min(CHUNK, num_bytes))
    while num_bytes:
        received = connection.recv_into(buffer, min(len(buffer), num_bytes))
        if received == 0:
            raise ConnectionError("a host has closed its connection in the middle of the check of the links")
        num_bytes -= received
