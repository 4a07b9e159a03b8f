"""Plain TCP between hosts in a ring, as a check of what the links carry without PyTorch."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

from torch.distributed import TCPStore

NUM_PINGS = 200
CHUNK = 2**20


@dataclass(frozen=True)
class RawTcp:
    """The findings of one check. Payload alone is counted: frames have headers, too."""

    latency: float
    """Seconds that one byte takes from host 0 to host 1: half of the median round trip."""
    rate_alone: float
    """Bit/s from host 0 to host 1, while all else is quiet."""
    rate_ring: float
    """Bit/s on the slowest link while every host sends to the next one: what a ring all_reduce could have at best."""


def check_links(host: int, addresses: Sequence[str], port: int, rate: int, seconds: float, timeout: float) -> RawTcp:
    """Sends plain TCP from host to host. A collective call of a process on each; the figures are right on host 0.

    Args:
        host: of this process.
        addresses: of all hosts, two at least.
        port: free on host 0, where the processes find each other.
        rate: what the links should carry, in bit/s.
        seconds: how long each of the two transfers takes at that rate.
        timeout: seconds to wait for another host, each time.

    Raises:
        DistError: another host did not come.
        TimeoutError: one did not answer in time.
        ConnectionError: one has gone.
    """
    store = TCPStore(addresses[0], port, len(addresses), host == 0, timedelta(seconds=timeout))
    num_bytes = max(1, round(rate / 8 * seconds))

    def meet(topic: str) -> None:
        store.set(f"{topic}/{host}", "")
        store.wait([f"{topic}/{other}" for other in range(len(addresses))])

    def there_and_back(num_bytes: int) -> None:
        if host == 0:
            _send(following, num_bytes)
            _receive(following, 1)
        elif host == 1:
            _receive(previous, num_bytes)
            _send(previous, 1)

    def around(num_bytes: int) -> None:
        sender = threading.Thread(target=_send, args=(following, num_bytes), daemon=True)
        sender.start()
        _receive(previous, num_bytes)
        sender.join()

    with _ring(store, host, addresses, timeout) as (previous, following):
        meet("ping")
        latency = median(_seconds(there_and_back, 1) for _ in range(NUM_PINGS)) / 2
        meet("alone")
        alone = _seconds(there_and_back, num_bytes)
        meet("ring")
        slowest = _seconds(around, num_bytes)
        store.set(f"seconds/{host}", str(slowest))
        if host == 0:  # alone, as it holds the store: the others may find it gone
            slowest = max(float(store.get(f"seconds/{other}")) for other in range(len(addresses)))
    return RawTcp(latency, 8 * num_bytes / alone, 8 * num_bytes / slowest)


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


def _seconds(transfer: Callable[[int], None], num_bytes: int) -> float:
    began = time.perf_counter()
    transfer(num_bytes)
    return time.perf_counter() - began


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
