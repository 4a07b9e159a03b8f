"""Ranks of one host that lose each other, or have no /dev/shm or few descriptors: right averages, or an error in time.

Nothing may be left behind in /dev/shm; ``run_ranks`` sees to it that no process is.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import threading
import time
from pathlib import Path

import torch

from tests.drill.rows import Row
from tests.engine.entry_points import ALL, average, mean_of, whole_numbers
from tests.engine.test_shared_memory_limits import mount, own_mounts
from tests.models import Given
from tests.ranks import RankError, RankTimeoutError, run_ranks

SHAPES = ((300,), (7, 40), (3,), (2000,))
SHM = Path("/dev/shm")
SECONDS = 60.0
KILLED, SMALL, READ_ONLY, MISSING, DESCRIPTORS = TROUBLES = (
    "a rank is killed",
    "/dev/shm is small",
    "/dev/shm is read-only",
    "/dev/shm is missing",
    "few descriptors",
)


def make(trouble: str, draw: random.Random) -> None:
    """For this process alone."""
    if trouble == KILLED:
        threading.Timer(draw.uniform(0.0, 0.6), os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif trouble == DESCRIPTORS:
        free = sorted(set(range(1024)) - {int(name) for name in os.listdir("/proc/self/fd")})
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[draw.randint(0, 14)], 1024))
    elif trouble == MISSING:
        own_mounts()
        devices = {path: path.stat().st_rdev for path in map(Path, ("/dev/null", "/dev/urandom", "/dev/zero"))}
        mount("none", Path("/dev"), "tmpfs")
        for path, number in devices.items():
            os.mknod(path, stat.S_IFCHR | 0o666, number)
    else:
        own_mounts()
        mount("none", SHM, "tmpfs", flags=int(trouble == READ_ONLY), options="size=8k")


def take_steps(rank: int, world_size: int, seed: int, trouble: str) -> tuple[str, str]:
    """Returns what was wrong, and the error that ended it early."""
    draw = random.Random(f"{seed} {trouble}")  # equal on all ranks
    entry_point = draw.choice(ALL)
    if rank in (lost_ranks(seed, trouble) or draw.sample(range(world_size), draw.randint(1, world_size))):
        make(trouble, draw)
    end = time.monotonic() + (SECONDS if trouble == KILLED else 0.3)
    try:
        averaged = average(entry_point, Given([torch.zeros(shape) for shape in SHAPES]))
        for step in range(1_000_000):
            means = averaged.step(whole_numbers(rank, step, SHAPES))
            expected = mean_of([whole_numbers(each, step, SHAPES) for each in range(world_size)])
            for one, other in zip(means, expected, strict=True):
                if one is None or other is None or not torch.allclose(one, other, rtol=1e-6, atol=1e-6):
                    return f"{entry_point}: wrong averages on rank {rank} in step {step}", ""
            go_on = torch.tensor(float(time.monotonic() < end))
            torch.distributed.broadcast(go_on, 0)
            if not go_on:
                return f"{entry_point}: goes on without a rank" if trouble == KILLED else "", ""
    except (RuntimeError, OSError) as error:
        return "", f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    return "", ""


def lost_ranks(seed: int, trouble: str) -> list[int]:
    return [seed % 2] if trouble == KILLED else []


def tried(seed: int, trouble: str, row: Row) -> None:
    before, errors = set(os.listdir(SHM)), []
    try:
        options = {"timeout": 2 * SECONDS, "lost": lost_ranks(seed, trouble)}
        of_ranks = run_ranks(take_steps, random.Random(seed).choice((2, 3, 4)), seed, trouble, **options)
        errors = [each[1] for each in of_ranks if each and each[1]]
        problems = [each[0] for each in of_ranks if each and each[0]]
        problems += errors if trouble in (SMALL, READ_ONLY, MISSING) else []  # messages do without it
    except (RankError, RankTimeoutError) as error:
        problems = [str(error).strip().splitlines()[-1]]
    problems += [f"left /dev/shm/{name}" for name in os.listdir(SHM) if name not in before and "fastsync" in name]
    row.add(f"{trouble}, seed {seed}: {problem}" for problem in problems)
    row.note = f"{int(row.note.split()[0] or 0) + bool(errors)} ended with an error"


def drill(seed: int, deadline: float) -> list[Row]:
    """Each trouble in turn, as often as there is time for."""
    if os.geteuid() != 0:
        return [Row("troubles of a host", note="only root may mount file systems")]
    rows = {trouble: Row(trouble, note="0") for trouble in TROUBLES}
    number = 1000 * seed
    while number == 1000 * seed or time.monotonic() < deadline:
        for trouble, row in rows.items():
            tried(number, trouble, row)
        number += 1
    return list(rows.values())
