"""Filters that have the system refuse calls of this thread, as containers have them, or end the process at one."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from typing import NamedTuple

CALLS = {
    "x86_64": {
        "futex": 202,
        "fallocate": 285,
        "ftruncate": 77,
        "memfd_create": 319,
        "openat": 257,
        "seccomp": 317,
        "clone3": 435,
    },
    "aarch64": {
        "futex": 98,
        "fallocate": 47,
        "ftruncate": 46,
        "memfd_create": 279,
        "openat": 56,
        "seccomp": 277,
        "clone3": 435,
    },
}
ON_ALL = {"clone3": 435}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# seccomp(2)
ALLOW, ERROR, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
NO_NEW_PRIVILEGES = 38
SET_MODE_FILTER, NEW_LISTENER = 1, 8
IF_EQUAL, IF_MORE = 0x15, 0x25


class Call(NamedTuple):
    """A system call: any, or one whose argument of that place, from 0 on, is a number or more than one."""

    name: str
    place: int | None = None
    number: int = 0
    is_more: bool = False


OPENS_MEMORY = Call("openat", 2, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
"""Another rank's, in /proc."""


def claims_above(num_bytes: int) -> Call:
    return Call("fallocate", 3, num_bytes, is_more=True)


def refuse(call: Call, error: int) -> None:
    """From now on the system answers with this error."""
    _filter(call, ERROR | error)


def end_at(call: Call, how: int) -> None:
    """The process gets the signal ``how`` when this thread comes to the call."""
    listener = _filter(call, NOTIFY, NEW_LISTENER)

    def wait() -> None:
        select.select([listener], [], [])  # the call waits for an answer, which it does not get
        os.kill(os.getpid(), how)

    threading.Thread(target=wait, daemon=True).start()


def _filter(call: Call, action: int, flags: int = 0) -> int:
    calls, architecture = CALLS[os.uname().machine] | ON_ALL, ARCHITECTURES[os.uname().machine]
    jump = IF_MORE if call.is_more else IF_EQUAL
    looks_at_argument = [] if call.place is None else [(0x20, 0, 0, 16 + 8 * call.place), (jump, 0, 1, call.number)]
    program = [
        (0x20, 0, 0, 4),  # which architecture's call
        (0x15, 0, 3 + len(looks_at_argument), architecture),
        (0x20, 0, 0, 0),  # which call
        (0x15, 0, 1 + len(looks_at_argument), calls[call.name]),
        *looks_at_argument,
        (0x06, 0, 0, action),
        (0x06, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    result = libc.syscall(calls["seccomp"], SET_MODE_FILTER, flags, ctypes.c_char_p(header))
    assert result >= 0, os.strerror(ctypes.get_errno())
    return int(result)
