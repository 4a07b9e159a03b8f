"""Filters that have the system refuse calls of this thread, as containers have them, or end the process at one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import select
import struct
import threading
from collections.abc import Callable

CALLS = {
    "x86_64": {
        "futex": 202,
        "accept4": 288,
        "connect": 42,
        "fallocate": 285,
        "memfd_create": 319,
        "recvmsg": 47,
        "seccomp": 317,
        "sendmsg": 46,
    },
    "aarch64": {
        "futex": 98,
        "accept4": 242,
        "connect": 203,
        "fallocate": 47,
        "memfd_create": 279,
        "recvmsg": 212,
        "seccomp": 277,
        "sendmsg": 211,
    },
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# seccomp(2)
ALLOW, ERROR, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
NO_NEW_PRIVILEGES = 38
SET_MODE_FILTER, NEW_LISTENER = 1, 8
NOTICE_BYTES, RECEIVE_NOTICE, ANSWER_NOTICE, GO_ON = 80, 0xC0502100, 0xC0182101, 1
IF_EQUAL, IF_MORE = 0x15, 0x25


def refuse(call: str, error: int, above: tuple[int, int] | None = None) -> None:
    """From now on the system answers with this error: with ``above``, where the argument of that place is more."""
    _filter(call, ERROR | error, above, jump=IF_MORE)


def end_at(call: str, how: int, argument: tuple[int, int] | None = None) -> None:
    """The process gets the signal ``how`` when this thread comes to the call: with ``argument``, one whose argument of
    that place, from 0 on, is that number.
    """
    listener = _filter(call, NOTIFY, argument, NEW_LISTENER)

    def wait() -> None:
        select.select([listener], [], [])  # the call waits for an answer, which it does not get
        os.kill(os.getpid(), how)

    threading.Thread(target=wait, daemon=True).start()


def before(call: str, do: Callable[[], object]) -> None:
    """From now on ``do`` is called on another thread, which comes before any such call of this one."""
    listeners: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait() -> None:
        listener = listeners.get()
        while True:
            notice = bytearray(NOTICE_BYTES)
            fcntl.ioctl(listener, RECEIVE_NOTICE, notice)
            do()
            fcntl.ioctl(listener, ANSWER_NOTICE, bytearray(notice[:8] + struct.pack("qiI", 0, 0, GO_ON)))

    threading.Thread(target=wait, daemon=True).start()  # which the filter does not hold for
    listeners.put(_filter(call, NOTIFY, flags=NEW_LISTENER))


def _filter(
    call: str, action: int, argument: tuple[int, int] | None = None, flags: int = 0, jump: int = IF_EQUAL
) -> int:
    machine = os.uname().machine
    place, number = argument or (0, 0)
    looks_at_argument = [(0x20, 0, 0, 16 + 8 * place), (jump, 0, 1, number)] if argument else []
    program = [
        (0x20, 0, 0, 4),  # which architecture's call
        (0x15, 0, 3 + len(looks_at_argument), ARCHITECTURES[machine]),
        (0x20, 0, 0, 0),  # which call
        (0x15, 0, 1 + len(looks_at_argument), CALLS[machine][call]),
        *looks_at_argument,
        (0x06, 0, 0, action),
        (0x06, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    result = libc.syscall(CALLS[machine]["seccomp"], SET_MODE_FILTER, flags, ctypes.c_char_p(header))
    assert result >= 0, os.strerror(ctypes.get_errno())
    return int(result)
