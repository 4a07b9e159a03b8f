"""A training that suffers everything, launcher included, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fastsync.cli import main
from fastsync.ppo.cli import option_words
from tests.engine.test_shared_memory_limits import mount, needs_root
from tests.forked import Command, until
from tests.ppo.test_resume import FULL, assert_same_end

UPDATES = 20
"""Fewer than the training takes."""
DISK, WHOLE = Path("/mnt"), Path("/mnt/whole")
REMOUNT, READ_ONLY = 32, 1
SECONDS = 240.0
HOWS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
FINISHED = "written to"


class Job(Command):
    """A training."""

    def __init__(self, folder: Path, reaching: int | None = None) -> None:
        """Waits until so many updates are done, or it has ended."""
        began, csv, end = time.time(), folder / "run" / "progress.csv", time.monotonic() + SECONDS
        self._said_in = tempfile.TemporaryDirectory()  # which is not on that disk
        words = option_words(replace(FULL, run_name="run", runs_dir=str(folder)))
        super().__init__(main, Path(self._said_in.name), "train", "--nproc", "2", *words)
        while reaching is not None and self.poll() is None and time.monotonic() < end:
            is_new = csv.exists() and csv.stat().st_mtime > began  # written when a run goes on, too
            if is_new and len(csv.read_text().splitlines()) > reaching:
                break
            time.sleep(0.002)

    def members(self) -> list[int]:
        """The launcher and all that it has started."""
        command = ["ps", "-s", str(self.pid), "-o", "pid=,stat="]
        rows = [line.split() for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]
        return [int(pid) for pid, state in rows if state[0] != "Z"]

    def ends(self, *says: str, after: str) -> None:
        """Waits for the end of all of it, and what it has to say then."""
        try:
            until(lambda: self.poll() is not None and not self.members(), f"{after}, the end of all processes", SECONDS)
        finally:
            self.kill()
        status, text = self.poll(), self.out + self.err
        for words in says:
            is_told = words in text and (status == 0) == (words == FINISHED)
            assert is_told, f"{after}, status {status}, {text[-400:]!r}"


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


@contextmanager
def disk(flags: int, options: str = "") -> Iterator[None]:
    mount("none", DISK, "tmpfs", REMOUNT | flags, options)
    try:
        yield
    finally:
        mount("none", DISK, "tmpfs", REMOUNT, "size=1g")


def break_off(folder: Path, draw: random.Random) -> None:
    job, how = Job(folder, draw.randint(0, UPDATES)), draw.choice(HOWS)
    time.sleep(draw.uniform(0.0, 0.1))
    members = job.members()
    chosen = draw.choice(([job.pid], [draw.choice(members)], members))
    send(how, chosen)
    if how == signal.SIGSTOP:
        time.sleep(1.0)
        send(signal.SIGCONT, chosen)
    job.ends(after=f"{how.name} to {len(chosen)} of {len(members)}")


def damage(checkpoints: Path, draw: random.Random) -> None:
    """In the newest, or the two newest, a bit is another, or the end is missing, or the file is."""
    for path in sorted(checkpoints.glob("step-*.pt"))[draw.choice((-1, -2)) :]:
        content = bytearray(path.read_bytes())
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        path.unlink()
        if remains := draw.choice((content, content[:at], b"")):
            path.write_bytes(remains)


def beside_another(folder: Path, draw: random.Random) -> None:
    first = Job(folder, draw.randint(1, UPDATES))
    send(signal.SIGSTOP, stopped := first.members())  # so that it does not end before
    try:
        if first.poll() is None:
            Job(folder).ends("another run", after="beside another run")
    finally:
        send(signal.SIGCONT, stopped)
    first.ends(FINISHED, after="with damaged checkpoints, beside another run")


@needs_root
def test_a_training_survives(seeds: Iterable[int]) -> None:
    mount("none", DISK, "tmpfs", options="size=1g")
    Job(WHOLE).ends(FINISHED, after="undisturbed")
    for seed in seeds:
        draw, folder = random.Random(seed), DISK / str(seed)
        used = sum(path.stat().st_size for path in DISK.rglob("*")) // 1024
        with disk(0, f"size={used + draw.randint(40, 500)}k"):
            Job(folder).ends("No space left on device", after="on a full disk")
        break_off(folder, draw)
        damage(folder / "run" / "checkpoints", draw)
        beside_another(folder, draw)
        assert_same_end(folder / "run", WHOLE / "run")
        with disk(READ_ONLY):
            Job(folder).ends("Read-only file system", after="on a disk that can only be read")
