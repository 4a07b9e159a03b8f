"""One training at a time in a run's folder: a lock that ends with the process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOCK = ".lock"
BEAT_SECONDS = 5.0
"""How often a training that holds the lock shows that it lives."""
WATCH_SECONDS = 2.5 * BEAT_SECONDS
"""How long one that finds the name of another machine waits for such a sign."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A lock on a run's folder, held by this process from the constructor on until ``release()`` or its death.

    It is a lock of the kernel on a file that names who holds it. Processes that this one starts do not keep it. Network
    file systems pass it on to other machines, or tell each machine of its own only; so where the file names another
    machine, its time of change, which the holder renews every few seconds, has to stand still.

    Args:
        folder: of the run.
        say: is told what the file system cannot do, and what is waited for.

    Raises:
        ValueError: somebody trains there. Nothing has been changed then.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._path = folder / LOCK
        self._file = _open_locked(self._path, folder, say)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{socket.gethostname()} {os.getpid()} {time.time():.0f}\n".encode(), 0)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Lets others train there. Nothing is left of the lock."""
        if not self._ended.is_set():
            self._ended.set()
            self._path.unlink(missing_ok=True)
            os.close(self._file)

    def moved_to(self, folder: Path) -> None:
        """Follows the folder, which now has another name."""
        self._path = folder / LOCK

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:
                continue  # a disk that is away for a moment, or a folder that was removed


def check_free(folder: Path) -> None:
    """Raises ValueError where somebody trains in the folder. A process that holds the lock itself must not call it."""
    try:
        file = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return  # there is none
    try:
        _lock(file, folder, say=lambda text: None)
    finally:
        os.close(file)


def _open_locked(path: Path, folder: Path, say: Callable[[str], None]) -> int:
    while True:
        # Open once: closing any other descriptor of the file would end this process's lock.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file, folder, say)
            _watch_other_machine(file, folder, say)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # who held the lock has removed this file since


def _lock(file: int, folder: Path, say: Callable[[str], None]) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _taken(file, folder) from None
        if error.errno not in _NO_LOCKS:
            raise
        say(f"{folder} cannot be locked ({error.strerror}): see to it that nobody else trains there")


def _watch_other_machine(file: int, folder: Path, say: Callable[[str], None]) -> None:
    host, _, _ = _holder(file)
    if host in (None, socket.gethostname()):
        return  # the kernel has told
    say(f"{folder} was left behind by a training on {host}; it showed no sign of life for {WATCH_SECONDS:g} s")
    before, deadline = os.fstat(file).st_mtime_ns, time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(0.5, BEAT_SECONDS / 2))
        if os.fstat(file).st_mtime_ns != before:
            raise _taken(file, folder)


def _taken(file: int, folder: Path) -> ValueError:
    host, pid, since = _holder(file)
    who = "another process" if host is None else f"process {pid} on {host}, which began at {since},"
    return ValueError(
        f"the run folder {folder} is in use: {who} trains there; wait for its end, stop it, or choose another run_name"
    )


def _holder(file: int) -> tuple[str | None, str, str]:
    """Host, process and time of whom the file names; no host where it names nobody yet."""
    words = os.pread(file, 1000, 0).decode(errors="replace").split()
    if len(words) != 3 or not words[2].isdigit():
        return None, "", ""
    return words[0], words[1], time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(words[2])))
