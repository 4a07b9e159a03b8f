"""What links carry without PyTorch: plain TCP between ranks in a ring, as a check of the links themselves."""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

Address = tuple[str, int]
"""Host and port."""
NUM_PINGS = 200
CHUNK = 2**20
CONNECT_PAUSE = 0.02


@dataclass(frozen=True)
class RawTcp:
    """What one run of the check found out. Payload alone is counted: frames have headers, too."""

    latency: float
    """Seconds that one byte takes from rank 0 to rank 1: half of the median round trip."""
    rate_alone: float
    """Bit/s from rank 0 to rank 1, while all else is quiet."""
    rate_ring: float
    """Bit/s on the slowest link while every rank sends to the next one: what a ring all_reduce could have at best."""


def check_links(rank: int, addresses: Sequence[Address], rate: int, seconds: float, timeout: float) -> RawTcp:
    """Sends plain TCP from rank to rank. A collective call; the figures are right on rank 0.

    Args:
        rank: of this process.
        addresses: where each rank listens, two at least.
        rate: what the links should carry, in bit/s.
        seconds: how long each of the two transfers takes at that rate.
        timeout: seconds to wait for another rank, each time.

    Raises:
        RuntimeError: another rank did not come, or did not answer in time.
    """
    num_bytes = max(1, round(rate / 8 * seconds))
    with _Ring(rank, addresses, timeout) as ring:
        latency = ring.ping()
        alone = ring.send_alone(num_bytes)
        slowest = ring.send_all(num_bytes)
    return RawTcp(latency, 8 * num_bytes / alone, 8 * num_bytes / slowest)


class _Ring:
    """Connections from each rank to the next."""

    def __init__(self, rank: int, addresses: Sequence[Address], timeout: float) -> None:
        self._rank, self._world_size = rank, len(addresses)
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(addresses[rank]))
            server.settimeout(timeout)
            self._next = stack.enter_context(_connect(addresses[(rank + 1) % len(addresses)], timeout))
            try:
                self._previous = stack.enter_context(server.accept()[0])
            except TimeoutError:
                raise RuntimeError(f"rank {rank} waited {timeout:g} s for the rank before it to connect") from None
            for connection in (self._next, self._previous):
                connection.settimeout(timeout)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections = stack.pop_all()

    def __enter__(self) -> "_Ring":
        return self

    def __exit__(self, *exception: object) -> None:
        self._connections.close()

    def ping(self) -> float:
        """Seconds from rank 0 to rank 1."""
        self._largest(0.0)
        times = []
        for _ in range(NUM_PINGS):
            started = time.perf_counter()
            if self._rank == 0:
                self._next.sendall(b"?")
                _receive(self._next, 1)
            elif self._rank == 1:
                _receive(self._previous, 1)
                self._previous.sendall(b"!")
            times.append(time.perf_counter() - started)
        return median(times) / 2

    def send_alone(self, num_bytes: int) -> float:
        """Seconds until rank 1 has all from rank 0."""
        self._largest(0.0)
        started = time.perf_counter()
        if self._rank == 0:
            _send(self._next, num_bytes)
            _receive(self._next, 1)
        elif self._rank == 1:
            _receive(self._previous, num_bytes)
            self._previous.sendall(b"!")
        return time.perf_counter() - started

    def send_all(self, num_bytes: int) -> float:
        """Seconds until every rank has all from the one before it."""
        self._largest(0.0)
        started = time.perf_counter()
        sender = threading.Thread(target=_send, args=(self._next, num_bytes), daemon=True)
        sender.start()
        _receive(self._previous, num_bytes)
        seconds = time.perf_counter() - started
        sender.join()
        return self._largest(seconds)

    def _largest(self, value: float) -> float:
        """The largest value of all ranks, on rank 0. Nobody returns before everybody has called it."""
        form = struct.Struct("d")
        for _ in range(2):
            if self._rank == 0:
                self._next.sendall(form.pack(value))
            received = form.unpack(_receive(self._previous, form.size, keep=True))[0]
            value = max(value, received)
            if self._rank != 0:
                self._next.sendall(form.pack(value))
        return value


def _connect(address: Address, timeout: float) -> socket.socket:
    """Connects as soon as the other side listens."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection(address, timeout=timeout)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no connection to {address[0]}:{address[1]} within {timeout:g} s: {error}"
                ) from None
            time.sleep(CONNECT_PAUSE)


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(min(CHUNK, num_bytes)))
    while num_bytes:
        num_bytes -= connection.send(chunk[:num_bytes])


def _receive(connection: socket.socket, num_bytes: int, keep: bool = False) -> bytes:
    """Takes so many bytes; returns them if they are to be kept."""
    buffer, kept = bytearray(min(CHUNK, num_bytes)), bytearray()
    try:
        while num_bytes:
            received = connection.recv_into(buffer, min(len(buffer), num_bytes))
            if received == 0:
                raise RuntimeError("a rank has closed its connection in the middle of the check of the links")
            num_bytes -= received
            if keep:
                kept += buffer[:received]
    except TimeoutError:
        raise RuntimeError(
            f"nothing came from another rank for {connection.gettimeout():g} s, in the check of the links"
        ) from None
    return bytes(kept)
