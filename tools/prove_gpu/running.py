"""Runs a command with a time limit: all that it started ends with it, and what it printed is kept."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

GRACE_SECONDS = 5.0
"""How long a command that has reached its limit may tidy up."""


@dataclass(frozen=True)
class Command:
    """What to run, where ``environment`` adds to that of this process, and for how many seconds at most."""

    words: tuple[str, ...]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``status`` is None where it was ended at its limit, negative for a signal."""

    status: int | None
    seconds: float


def run(command: Command, folder: Path, log: Path, limit: float | None = None) -> Outcome:
    """Runs it in ``folder``. What it prints is appended to ``log``, also where it is ended.

    Args:
        command: what to run.
        folder: where.
        log: the file to write to.
        limit: seconds, where there are fewer left than the command's own.
    """
    seconds = command.limit if limit is None else min(limit, command.limit)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **command.environment}
    began = time.monotonic()
    with log.open("ab") as output:
        output.write(f"\n$ {command}\n".encode())
        output.flush()
        process: subprocess.Popen[bytes] | None = None
        try:
            with _uninterrupted() as signals:
                process = subprocess.Popen(
                    command.words,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a process group of its own, which is ended as a whole
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, signals),
                )
            status: int | None = process.wait(timeout=seconds)
        except OSError as error:
            output.write(f"{error}\n".encode())
            return Outcome(127, time.monotonic() - began)
        except subprocess.TimeoutExpired:
            assert process is not None
            status = None
            _signal_group(process, signal.SIGTERM)  # some have started process groups of their own, and end them
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
        finally:
            if process is not None:
                _signal_group(process, signal.SIGKILL)
                process.wait()
    elapsed = time.monotonic() - began
    with log.open("ab") as output:
        output.write(f"[{describe(status, seconds)} after {elapsed:.1f} s]\n".encode())
    return Outcome(status, elapsed)


@contextmanager
def _uninterrupted() -> Iterator[set[signal.Signals]]:
    """Holds signals back, or one that comes while a process begins would leave it behind. Yields those held before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe(status: int | None, limit: float) -> str:
    """How it ended, in words."""
    if status is None:
        return f"ended at its limit of {limit:.0f} s"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
