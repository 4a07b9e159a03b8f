"""Warnings that C++ writes to a rank's stderr. A test that causes one expects it, and keeps it from the output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

NOTHING_UNUSED = "did not find any unused parameters"
"""DDP warns so of ``find_unused_parameters``. Tests also use it to get the buckets that they ask for."""
NO_TIMES = "Time stats are currently only collected for CPU and CUDA devices"
"""DDP warns so of other devices."""


@contextmanager
def expected_on_stderr(*texts: str) -> Iterator[None]:
    """Removes lines with these texts from this process's stderr, even if C++ writes them. Each text has to come."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines = file.readlines()
            sys.stderr.writelines(line for line in lines if not any(text in line for text in texts))
    missing = [text for text in texts if not any(text in line for line in lines)]
    assert not missing, f"expected {missing} on stderr"
