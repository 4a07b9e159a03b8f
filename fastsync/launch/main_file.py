"""Starting processes from a script that is no file, as one that Python reads from its standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any


@contextmanager
def missing_main_left_out() -> Iterator[None]:
    """Processes that multiprocessing starts inside a ``with`` block import no main module that is no file.

    They would end by FileNotFoundError, and the one that starts them by a broken pipe. What the script itself defines
    cannot be passed to them.
    """
    prepared = spawn.get_preparation_data

    def without_missing(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepared(name)
        if not Path(data.get("init_main_from_path", "/")).exists():
            del data["init_main_from_path"]
        return data

    spawn.get_preparation_data = without_missing
    try:
        yield
    finally:
        spawn.get_preparation_data = prepared


def check_found_by_processes(function: Callable[..., Any]) -> None:
    """Raises ValueError for a function of a script that is no file, which no other process could import."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if function.__module__ == "__main__" and (path is None or not Path(path).exists()):
        raise ValueError(
            f"{function.__qualname__} is defined in {path or 'an interactive session'}, which is no file, so the "
            "processes of ranks cannot import it; write it into a module, and import it from there"
        )
