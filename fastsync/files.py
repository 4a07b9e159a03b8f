"""Files that nobody ever sees half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file. A crash at any moment leaves it whole, or as it was before. The disk has it when this returns.

    Several processes may do so at once, also on hosts that share the folder: the last one wins.
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
    descriptor = os.open(path.parent, os.O_RDONLY)  # which has the new name
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
