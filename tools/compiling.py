"""Runs compilers that keep nothing: what compiles is all that is asked."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


def compile_all(label: str, commands: Sequence[Sequence[str]]) -> int:
    """Runs commands, ``MAX_JOBS`` at a time, by default 2, and prints what each says. Returns an exit status."""

    def succeeds(command: Sequence[str]) -> bool:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{shlex.join(command)}\n{result.stdout}{label}: {'FAILED' if result.returncode else 'ok'}", flush=True)
        return result.returncode == 0

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        results = list(pool.map(succeeds, commands))
    print(f"{label}: {sum(results)} of {len(results)} files compile")
    return 0 if all(results) else 1
