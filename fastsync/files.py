"""Files that nobody ever sees half written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to make a file at, which takes its place when the ``with`` block ends in order.

    A crash at any moment leaves ``path`` whole, or as it was before. Several processes may do so at once, also on hosts
    that share the folder: the last one wins.
    """
    unfinished = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except Exception:
        unfinished.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file by ``replacing``. The disk has it when this returns."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path.parent, os.O_RDONLY)  # which has the new name
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
