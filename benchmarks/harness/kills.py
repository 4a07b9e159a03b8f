"""Trainings that write diaries, and the death of one of their ranks."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.collect import TrainingError
from benchmarks.harness.diaries import Author, Diaries, Event, Kill, read_diaries

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0
"""For a launcher to end its ranks."""


@dataclass(frozen=True)
class Command:
    """A process to start, with variables beside those of this process."""

    words: Sequence[str]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Running:
    """A training, and the folder of its diaries."""

    folder: Path
    name: str
    processes: Sequence["subprocess.Popen[bytes]"]
    """Those that were started here: launchers, or the ranks themselves."""

    def diaries(self) -> dict[Author, list[Event]]:
        return read_diaries(self.folder)

    def said(self) -> str:
        """The last words of each process."""
        return "\n".join(
            file.read_text(encoding="utf-8", errors="replace")[-1500:] for file in sorted(self.folder.glob("*.log"))
        )

    def wait_for(self, find: Callable[[Diaries], T | None], what: str, until: float) -> T:
        """Returns what is found in the diaries as soon as it is.

        Raises:
            TrainingError: it was not there at the time ``until``, or when all processes had ended.
        """
        are_running = True
        while time.monotonic() < until and are_running:
            are_running = any(process.poll() is None for process in self.processes)
            if (found := find(self.diaries())) is not None:
                return found
            time.sleep(POLL_SECONDS)
        why = "has not come in time" if are_running else "has not come before all processes ended"
        raise TrainingError(f"{self.name}: {what} {why}; the last that they said:\n{self.said()}")


@contextmanager
def training(name: str, folder: Path, commands: Sequence[Command]) -> Iterator[Running]:
    """Starts processes, and ends all that belongs to them with the ``with`` block."""
    processes: list[subprocess.Popen[bytes]] = []
    running = Running(folder, name, processes)
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("w", encoding="utf-8") as log:
                processes.append(
                    subprocess.Popen(
                        command.words,
                        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | command.variables,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C is for this process, which then ends them
                    )
                )
        yield running
    finally:
        _end(running)


def _end(running: Running) -> None:
    """Ends launchers first, so that they start nothing again."""
    for process in running.processes:
        process.terminate()
    for process in running.processes:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for author in running.diaries():  # whose launcher may have left them
        if _is_rank(author.pid):
            with suppress(ProcessLookupError):
                os.kill(author.pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    """Whether a process is one of ours, and not another one with the number of one that has ended."""
    with suppress(OSError):
        return b"benchmarks.baselines.recovering" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill(running: Running, victim: Author) -> Kill:
    """Ends a rank by SIGKILL, now.

    Raises:
        TrainingError: it has ended already.
    """
    before = frozenset(running.diaries())
    if not _is_rank(victim.pid):
        raise TrainingError(
            f"{running.name}: rank {victim.rank} had ended before it could be killed:\n{running.said()}"
        )
    moment = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    return Kill(moment, victim, before)


_PEER = "import socket, sys, time; peer = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


def seconds_until_known(draw: random.Random) -> float:
    """Seconds from the kill of a process until another one's connection to it has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = subprocess.Popen([sys.executable, "-c", _PEER, str(server.getsockname()[1])])
        try:
            server.settimeout(GRACE_SECONDS)
            connection, _ = server.accept()
            connection.settimeout(GRACE_SECONDS)
            known: list[float] = []

            def wait() -> None:
                with connection, suppress(ConnectionError):
                    connection.recv(1)
                known.append(time.monotonic())

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(draw.uniform(0.05, 0.15))
            moment = time.monotonic()
            peer.kill()
            waiting.join()
            return known[0] - moment
        finally:
            peer.kill()
            peer.wait()
