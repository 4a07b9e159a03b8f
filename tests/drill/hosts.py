"""Ranks whose host or network breaks: averages are right, or each rank has an error in time. Hosts are namespaces."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.network.namespaces import Network
from tests.drill.endurance import Steps
from tests.engine.entry_points import ALL
from tests.engine.hosts import entered
from tests.ranks import run_ranks

DOWN, UP, LOSSY = "ip link set eth0 down", "ip link set eth0 up", "tc qdisc replace dev eth0 root netem loss 2%"
KILLED, CUT, DESCRIPTORS = "a rank is killed", "link cut for ever", "few descriptors"
TROUBLES = {  # bit/s of links between hosts, seconds of steps, and the commands of one rank: before them, and meanwhile
    KILLED: (0, 120.0, ("true", "sleep {moment}", "kill -9 {pid}")),
    DESCRIPTORS: (0, 0.3, ("prlimit --pid {pid} --nofile={few}:",)),
    "link slow": (2 * 10**6, 6.0, (UP,)),
    "link cut for seconds": (10**8, 8.0, (UP, "sleep 1", DOWN, "sleep 3", UP)),
    "link cut ten times for moments": (10**8, 6.0, (UP, "sleep 0.5", *(DOWN, "sleep 0.1", UP, "sleep 0.3") * 10)),
    CUT: (10**8, 60.0, (UP, "sleep 1", DOWN)),
    "link lossy": (10**8, 6.0, (LOSSY,)),
}
TIMEOUT, MARGIN = 6.0, 20.0
"""Seconds of the process group, and after them until every rank has its error: of several waits."""
SECONDS = 240.0


def take_steps(
    rank: int, world_size: int, what: str, draw: random.Random, entry_point: str, place: int, keepers: Sequence[int]
) -> tuple[str, float]:
    """Takes steps in trouble until rank 0 ends them, or an error. Returns the error, and after how many seconds."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0"} if keepers else {}
    with entered(f"/proc/{keepers[rank % 2]}/ns/net") if keepers else nullcontext():
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        dist.barrier(group)
        began, number, go_on, error = time.monotonic(), 0, torch.tensor(1.0), ""
        free = sorted(set(range(1024)) - {int(name) for name in os.listdir("/proc/self/fd")})
        filled = {"pid": os.getpid(), "moment": draw.uniform(0.0, 0.6), "few": free[draw.randint(0, 14)]}
        _, seconds, commands = TROUBLES[what]
        at_once, *later = [command.format(**filled) for command in commands] if rank == place else ["true"]
        run([at_once])
        threading.Thread(target=run, args=(later,), daemon=True).start()  # it begins on the host of this one
        try:
            steps = Steps(rank, world_size, entry_point, group)
            while go_on:
                steps.take(number)
                go_on.fill_(time.monotonic() - began < seconds)
                dist.broadcast(go_on, 0, group=group)
                number += 1
        except (RuntimeError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        return error, time.monotonic() - began


def run(commands: Iterable[str]) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


@pytest.mark.parametrize("what", TROUBLES)
def test_trouble(what: str, seeds: Iterable[int], request: pytest.FixtureRequest) -> None:
    rate, _, commands = TROUBLES[what]
    if rate:
        request.getfixturevalue("namespaces")
    if LOSSY in commands:
        attempt = subprocess.run(["unshare", "-n", *LOSSY.replace("eth0", "lo").split()], capture_output=True)
        if attempt.returncode:
            pytest.skip(attempt.stderr.decode().strip())
    for seed in seeds:
        draw = random.Random(f"{seed} {what}")
        size, entry_point, place = draw.choice((2, 4) if rate else (2, 3, 4)), draw.choice(ALL), draw.choice((0, 1))
        with Network(2, rate) if rate else nullcontext() as network:
            trouble = what, draw, entry_point, place, network.keepers if network else ()
            lost = [place] if what == KILLED else []
            ended = run_ranks(take_steps, size, *trouble, timeout=SECONDS, lost=lost)
        for error, after in [each for each in ended if each is not None]:
            assert what == DESCRIPTORS or bool(error) == (what in (KILLED, CUT)), (
                f"{entry_point}: {error or 'no error'}"
            )
            assert not error or after < TIMEOUT + MARGIN, f"{entry_point}: the error came after {after:.0f} s"
