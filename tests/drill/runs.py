"""A training that suffers everything, launcher included, and ends with the bits of an undisturbed one.

Its disk is full at first. It is broken off at a random moment. Its newest checkpoints are damaged. Another run wants
its folder. In the end the disk can only be read.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.drill.rows import Row
from tests.engine.test_shared_memory_limits import mount, own_mounts
from tests.ppo.test_resume import CheckpointFolder
from tests.ppo.test_runs_checkpoints import assert_same

SETTINGS = """
--env CartPole-v1 --nproc 2 --run-name run --resume auto --total-steps 3000 --num-envs 4 --num-steps 16
--num-epochs 2 --compression fp16+ef --precision fp16 --norm-observations --norm-rewards --lr-schedule
adaptive --target-kl 0.01 --checkpoint-interval 0
"""
UPDATES = 20
"""Fewer than the training takes."""
DISK = Path("/mnt")
"""Only this process and its children see what is there."""
REMOUNT, READ_ONLY = 32, 1
SECONDS = 240.0
HOWS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)


class Job:
    """A training in a session of its own."""

    def __init__(self, folder: Path, reaching: int | None = None) -> None:
        """Waits until so many updates are done, or it has ended."""
        words = [sys.executable, "-m", "fastsync.cli", "train", *SETTINGS.split(), "--runs-dir", str(folder)]
        began = time.time()
        self.said = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(words, stdout=self.said, stderr=self.said, start_new_session=True)
        csv, end = folder / "run" / "progress.csv", time.monotonic() + SECONDS
        while reaching is not None and self.process.poll() is None and time.monotonic() < end:
            is_new = csv.exists() and csv.stat().st_mtime > began  # written when a run goes on, too
            if is_new and len(csv.read_text().splitlines()) > reaching:
                break
            time.sleep(0.002)

    def members(self) -> list[int]:
        """The launcher and all that it has started."""
        command = ["ps", "-s", str(self.process.pid), "-o", "pid=,stat="]
        rows = [line.split() for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]
        return [int(pid) for pid, state in rows if state[0] != "Z"]

    def send(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, number)

    def problems(self, *, says: str | None = None) -> list[str]:
        """Waits for the end. What is wrong: processes that stay, or another end than one that says this; None: any."""
        end = time.monotonic() + SECONDS
        while self.members() and time.monotonic() < end:
            time.sleep(0.1)
        left, status = self.members(), self.process.poll()
        self.send(signal.SIGKILL, left)
        text = Path(self.said.name).read_text()
        is_told = says is None or (says in text and (status == 0) == (says == "written to"))
        return [f"processes {left} stay"] * bool(left) + [f"status {status}, {text[-400:]!r}"] * (not is_told)


def damage(folder: Path, draw: random.Random) -> list[str]:
    for path in sorted(folder.glob("run/checkpoints/step-*.pt"))[draw.choice((-1, -2)) :]:
        content, what = bytearray(path.read_bytes()), draw.choice(("a bit is another", "it is cut", "it is gone"))
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        path.unlink() if what == "it is gone" else path.write_bytes(content[:at] if what == "it is cut" else content)
    return []


def second_run(folder: Path, draw: random.Random) -> list[str]:
    """While the first one stands still, so that it does not end before."""
    first = Job(folder, draw.randint(1, UPDATES))
    first.send(signal.SIGSTOP, stopped := first.members())
    problems = Job(folder).problems(says="another run") if first.process.poll() is None else []
    first.send(signal.SIGCONT, stopped)
    return problems + first.problems(says="written to")


def broken_off(folder: Path, draw: random.Random) -> list[str]:
    job, how = Job(folder, draw.randint(0, UPDATES)), draw.choice(HOWS)
    time.sleep(draw.uniform(0.0, 0.1))
    members = job.members()
    chosen = draw.choice(([job.process.pid], [draw.choice(members)], members))
    job.send(how, chosen)
    if how == signal.SIGSTOP:
        time.sleep(1.0)
        job.send(signal.SIGCONT, chosen)
    return [f"{how.name} to {len(chosen)} of {len(members)}: {problem}" for problem in job.problems()]


def on_disk(options: str, folder: Path, says: str) -> list[str]:
    mount("none", DISK, "tmpfs", REMOUNT | (READ_ONLY if options == "ro" else 0), options.removeprefix("ro"))
    problems = Job(folder).problems(says=says)
    mount("none", DISK, "tmpfs", REMOUNT, "size=1g")
    return problems


def difference(folder: Path) -> list[str]:
    one, other = (CheckpointFolder(each / "run" / "checkpoints").newest() for each in (folder, DISK / "whole"))
    for part in ("step", "update", "learner", "environments", "window", "best_return"):
        try:
            assert_same(getattr(one and one[1], part), getattr(other and other[1], part), part)
        except (AssertionError, AttributeError) as error:
            return [f"differs: {error}".splitlines()[0]]
    return []


def sufferings(folder: Path, draw: random.Random) -> Iterator[list[str]]:
    """What was wrong with each, in the order of the rows."""
    used = sum(path.stat().st_size for path in DISK.rglob("*")) // 1024
    yield on_disk(f"size={used + draw.randint(40, 500)}k", folder, "No space left on device")
    yield broken_off(folder, draw)
    yield damage(folder, draw)
    yield second_run(folder, draw)
    yield difference(folder)
    yield on_disk("ro", folder, "Read-only file system")


def drill(seed: int, deadline: float) -> list[Row]:
    """One training after the other."""
    names = ("full disk", "broken off at a random moment", "damaged checkpoints", "second run into its folder")
    rows = [Row(name) for name in (*names, "the bits in the end", "disk that can only be read")]
    if os.geteuid() != 0:
        return [Row("trainings", note="only root may mount file systems")]
    own_mounts()
    mount("none", DISK, "tmpfs", options="size=1g")
    rows[0].add(Job(DISK / "whole").problems(says="written to"))
    number = 1000 * seed
    while number == 1000 * seed or time.monotonic() < deadline:
        problems_of = sufferings(DISK / str(number), random.Random(number))
        for row, problems in zip(rows, problems_of, strict=True):
            row.add(f"{row.what}, seed {number}: {problem}" for problem in problems)
        number += 1
    return rows
