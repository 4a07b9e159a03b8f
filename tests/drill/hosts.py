"""Ranks whose host or network breaks: right averages, or an error in time on every rank.

Ranks of one host lose each other, or have no /dev/shm or few descriptors. Nothing may be left in /dev/shm. Hosts are
network namespaces whose links are cut, slow or lossy.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import SkipTest

import torch
import torch.distributed as dist

from benchmarks.network.namespaces import Network, why_not
from tests.drill.attempts import Attempts, Steps
from tests.engine.entry_points import ALL
from tests.engine.hosts import entered
from tests.engine.test_shared_memory_limits import mount, own_mounts
from tests.ranks import run_ranks

REPEATS = True
SHM = Path("/dev/shm")
KILLED, DESCRIPTORS = "a rank is killed", "few descriptors"
CUT, LOSSY_LINK = "link cut for ever", "link lossy"
MISSING, READ_ONLY, SMALL = "/dev/shm is missing", "/dev/shm is read-only", "/dev/shm is small"
DOWN, UP, LOSSY = "ip link set eth0 down", "ip link set eth0 up", "tc qdisc replace dev eth0 root netem loss 2%"
LINKS = {  # bit/s, seconds of steps, and what happens to a host's link, with seconds after it
    "link slow": (2 * 10**6, 6.0, ()),
    "link cut for seconds": (10**8, 8.0, ((UP, 1.0), (DOWN, 3.0), (UP, 0.0))),
    "link cut ten times for moments": (10**8, 6.0, ((UP, 0.5), *((DOWN, 0.1), (UP, 0.3)) * 10)),
    CUT: (10**8, 60.0, ((UP, 1.0), (DOWN, 0.0))),
    LOSSY_LINK: (10**8, 6.0, ((LOSSY, 0.0),)),
}
TIMEOUT, MARGIN = 6.0, 20.0
"""Seconds of the hosts' process group, and after them until every rank has its error: of several waits."""
SECONDS = 120.0


def take_steps(
    rank: int,
    world_size: int,
    entry_point: str,
    seconds: float,
    trouble: Callable[[int, int], AbstractContextManager[dist.ProcessGroup | None]],
) -> tuple[str, float]:
    """Takes steps in trouble until rank 0 ends them, or an error. Returns the error, and after how many seconds."""
    with trouble(rank, world_size) as group:
        began, number, go_on, error = time.monotonic(), 0, torch.tensor(1.0), ""
        try:
            steps = Steps(rank, world_size, entry_point, group)
            while go_on:
                steps.take(number)
                go_on.fill_(time.monotonic() - began < seconds)
                dist.broadcast(go_on, 0, group=group)
                number += 1
        except (RuntimeError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        return error, time.monotonic() - began


@contextmanager
def trouble_of_host(what: str, seed: float, lost: Sequence[int], rank: int, world_size: int) -> Iterator[None]:
    """For this process alone; of some ranks."""
    draw = random.Random(seed)  # equal on all ranks
    if rank in lost:
        threading.Timer(draw.uniform(0.0, 0.6), os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif not lost and rank in draw.sample(range(world_size), draw.randint(1, world_size)):
        limit(what, draw)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def limit(what: str, draw: random.Random) -> None:
    if what == DESCRIPTORS:
        free = sorted(set(range(1024)) - {int(name) for name in os.listdir("/proc/self/fd")})
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[draw.randint(0, 14)], 1024))
        return
    own_mounts()
    if what == MISSING:
        devices = {path: path.stat().st_rdev for path in map(Path, ("/dev/null", "/dev/urandom", "/dev/zero"))}
        mount("none", Path("/dev"), "tmpfs")
        for path, number in devices.items():
            os.mknod(path, stat.S_IFCHR | 0o666, number)
    else:
        mount("none", SHM, "tmpfs", flags=int(what == READ_ONLY), options="size=8k")


@contextmanager
def trouble_of_link(
    keepers: Sequence[int], disturbed: int, events: Sequence[tuple[str, float]], rank: int, world_size: int
) -> Iterator[dist.ProcessGroup | None]:
    """A group of the ranks in their hosts, and of one host the events."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with entered(f"/proc/{keepers[rank % 2]}/ns/net"):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        dist.barrier(group)
        if rank == disturbed:  # a thread begins where the one is that starts it
            threading.Thread(target=disturb, args=(events,), daemon=True).start()
        yield group


def disturb(events: Sequence[tuple[str, float]]) -> None:
    for command, seconds in events:
        subprocess.run(command.split(), check=True)
        time.sleep(seconds)


def suffer(what: str, draw: random.Random) -> None:
    """Steps of ranks in this trouble."""
    reason = why_not()
    if what == LOSSY_LINK and not reason:
        attempt = subprocess.run(["unshare", "-n", *LOSSY.replace("eth0", "lo").split()], capture_output=True)
        reason = attempt.stderr.decode().strip()
    if reason:
        raise SkipTest(reason)
    before, lost = set(os.listdir(SHM)), [draw.choice((0, 1))] if what == KILLED else []
    rate, seconds, events = LINKS.get(what, (0, SECONDS if lost else 0.3, ()))
    size, entry_point, place = draw.choice((2, 4) if rate else (2, 3, 4)), draw.choice(ALL), draw.choice((0, 1))
    with Network(2, rate) if rate else nullcontext() as network:
        trouble = partial(trouble_of_host, what, draw.random(), lost)
        if network:
            trouble = partial(trouble_of_link, network.keepers, place, events)
        ended = run_ranks(take_steps, size, entry_point, seconds, trouble, timeout=2 * SECONDS, lost=lost)
    for error, after in [each for each in ended if each is not None]:
        # Without descriptors ranks may have to fail. Messages do without /dev/shm.
        assert what == DESCRIPTORS or bool(error) == (what in (KILLED, CUT)), f"{entry_point}: {error or 'no error'}"
        assert not error or after < TIMEOUT + MARGIN, f"{entry_point}: the error came after {after:.0f} s"
    left = [name for name in os.listdir(SHM) if name not in before and "fastsync" in name]
    assert not left, f"{entry_point} left {left} in {SHM}"


def attempts(seed: int, deadline: float) -> Attempts:
    """Each trouble once."""
    for what in (KILLED, DESCRIPTORS, MISSING, READ_ONLY, SMALL, *LINKS):
        yield what, partial(suffer, what, random.Random(f"{seed} {what}"))
