"""One training at a time in a run's folder: a lock that ends with the process, however that ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
HOLDER = ".lock-holder"


class RunLock:
    """A lock on a run's folder, held by this process from the constructor on until ``release()`` or its death.

    It is the kernel's, which network file systems pass on to other machines where they can.

    Args:
        folder: of the run.
        say: is told what the file system cannot do.

    Raises:
        ValueError: somebody trains there. Nothing has been changed then.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder = folder
        self._lock = FileLock(folder / LOCK, timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise _taken(folder) from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            say(f"{folder} cannot be locked ({reason}): see to it that nobody else trains there")
        (folder / HOLDER).write_text(f"{socket.gethostname()} {os.getpid()} {time.time():.0f}\n")

    def release(self) -> None:
        """Lets others train there. Nothing is left of the lock."""
        for name in (HOLDER, LOCK):
            (self._folder / name).unlink(missing_ok=True)
        self._lock.release()

    def moved_to(self, folder: Path) -> None:
        """Follows the folder, which now has another name."""
        self._folder = folder


def check_free(folder: Path) -> None:
    """Raises ValueError where somebody trains in the folder. A process that holds the lock itself must not call it."""
    if (folder / LOCK).exists():
        RunLock(folder).release()


def _taken(folder: Path) -> ValueError:
    who = "another process"
    try:
        host, pid, since = (folder / HOLDER).read_text().split()
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(since)))
        who = f"process {pid} on {host}, which began at {began},"
    except (OSError, ValueError):
        pass  # it is about to say who it is
    return ValueError(
        f"the run folder {folder} is in use: {who} trains there; wait for its end, stop it, or choose another run_name"
    )
