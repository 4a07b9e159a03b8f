"""Prints what the terminal can take: a terminal that knows ASCII only ends no command."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "fastsync.printable"
_PLAIN = {"±": "+-", "×": "x", "−": "-", "→": "->", "…": "...", "─": "-", "━": "="} | dict.fromkeys("▁▂▃▄▅▆▇█", "#")


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces a character that an encoding lacks. Bytes of a file's name that are no text stay as they are."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # how Python holds such a byte
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return _PLAIN.get(character, "?"), error.start + 1


codecs.register_error(_NAME, _replaced)


def print_what_can_be() -> None:
    """From now on standard output replaces characters that it cannot encode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_NAME)


@contextmanager
def printing_what_can_be() -> Iterator[None]:
    """Calls ``print_what_can_be`` for a ``with`` block."""
    stream = sys.stdout
    before = stream.errors
    print_what_can_be()
    try:
        yield
    finally:
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors=before)
