"""Writes files whole: nobody reads one that is half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file. After a crash the file is either whole or as it was before. When this returns, it is on the disk.

    Several processes may write it at once, also on hosts that share the folder: the last one wins.
    """
    unfinished = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except Exception:
        unfinished.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)  # the folder holds the new name
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
