"""What ranks other than rank 0 print, while rank 0 draws a panel in the terminal that they share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from pathlib import Path
from typing import Any

from .console import has_panel


@contextmanager
def output_kept_apart(path: Path) -> Iterator[None]:
    """Writes what Python prints in a ``with`` block into a file, if this rank's output is a terminal.

    The file is made with the first text. If the folder is not there, as on another host, nothing changes.
    """
    with ExitStack() as stack:
        if has_panel() and path.parent.exists():
            file = _LateFile(path)
            stack.callback(file.close)
            stack.enter_context(redirect_stdout(file))
            if sys.stderr.isatty():
                stack.enter_context(redirect_stderr(file))
        yield


class _LateFile(TextIOBase):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def write(self, text: str) -> int:
        if self._file is None:
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        return int(self._file.write(text))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
