"""Processes that never sleep, beside the ranks: what environment workers and data loaders do to cores."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# It ends with the process that started it, however that ends.
_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs so many processes that take all the time of a core each."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _LOOP], stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
