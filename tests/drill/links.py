"""Hosts as network namespaces whose links are cut, slow or lossy: right averages, or an error in time on every rank."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.network.namespaces import Network, why_not
from tests.drill.rows import Row
from tests.engine.entry_points import ALL, average, mean_of, whole_numbers
from tests.engine.hosts import entered
from tests.models import Given
from tests.ranks import RankError, RankTimeoutError, run_ranks

SHAPES = ((300,), (7, 40), (30_000,))
TIMEOUT, MARGIN = 6.0, 20.0
"""Seconds of the process group, and after them until every rank has its error: of several waits."""
DOWN, UP = "ip link set eth0 down", "ip link set eth0 up"
LOSSY = "tc qdisc replace dev eth0 root netem loss 2%"
TROUBLES = {  # bit/s, seconds of steps, and what happens to a host's link, with seconds after it
    "slow": (2 * 10**6, 6.0, ()),
    "cut for seconds": (10**8, 8.0, ((UP, 1.0), (DOWN, 3.0), (UP, 0.0))),
    "cut ten times for moments": (10**8, 6.0, ((UP, 0.5), *((DOWN, 0.1), (UP, 0.3)) * 10)),
    "cut for ever": (10**8, 60.0, ((UP, 1.0), (DOWN, 0.0))),
    "lossy": (10**8, 6.0, ((LOSSY, 0.0),)),
}


def take_steps(
    rank: int, world_size: int, entry_point: str, seconds: float, keepers: list[int], begun: str
) -> tuple[int, str, str]:
    """Returns how many steps were taken, what was wrong, and the error that ended them."""
    os.environ["GLOO_SOCKET_IFNAME"], step, wrong = "eth0", 0, ""
    with entered(f"/proc/{keepers[rank % 2]}/ns/net"):
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        averaged = average(entry_point, Given([torch.zeros(shape) for shape in SHAPES]), group=group)
        go_on, began = torch.tensor(1.0), time.monotonic()
        try:
            while go_on:
                means = averaged.step(whole_numbers(rank, step, SHAPES))
                expected = mean_of([whole_numbers(each, step, SHAPES) for each in range(world_size)])
                if not all(torch.equal(*pair) for pair in zip(means, expected, strict=True)):
                    wrong = f"wrong averages on rank {rank} in step {step}"
                go_on.fill_(time.monotonic() - began < seconds)
                dist.broadcast(go_on, 0, group=group)
                step += 1
                Path(begun).touch()
        except RuntimeError as error:
            late = time.monotonic() - began > TIMEOUT + MARGIN
            return step, "an error that came late" if late else wrong, f"rank {rank}: {error}"
    return step, wrong, ""


def disturb(keeper: int, events: tuple[tuple[str, float], ...], begun: Path) -> None:
    while begun.parent.exists() and not begun.exists():
        time.sleep(0.01)
    for command, seconds in events if begun.exists() else ():
        subprocess.run(["nsenter", f"--target={keeper}", "--net", *command.split()], check=True)
        time.sleep(seconds)


def problems_of(trouble: str, draw: random.Random) -> list[str]:
    rate, seconds, events = TROUBLES[trouble]
    entry_point, is_cut = draw.choice(ALL), trouble == "cut for ever"
    with Network(2, rate) as network, tempfile.TemporaryDirectory() as folder:
        begun = Path(folder) / "begun"
        disturbing = threading.Thread(target=disturb, args=(draw.choice(network.keepers), events, begun))
        disturbing.start()
        try:
            of_ranks = run_ranks(
                take_steps, draw.choice((2, 4)), entry_point, seconds, network.keepers, str(begun), timeout=180.0
            )
        except (RankError, RankTimeoutError) as error:
            return [f"{entry_point}: {str(error).strip().splitlines()[-1]}"]
    disturbing.join()
    problems = [wrong for _, wrong, _ in of_ranks if wrong]
    problems += [error or "no error" for _, _, error in of_ranks if bool(error) != is_cut]
    return [f"{entry_point}: {problem}" for problem in problems]


def drill(seed: int, deadline: float) -> list[Row]:
    """Each trouble in turn, as often as there is time for."""
    if reason := why_not():
        return [Row("links between hosts", note=reason)]
    rows = {trouble: Row(f"link {trouble}") for trouble in TROUBLES}
    attempt = ["unshare", "--net", *LOSSY.replace("eth0", "lo").split()]
    if subprocess.run(attempt, capture_output=True).returncode != 0:
        rows["lossy"].note = "this kernel has no netem"
    number = 1000 * seed
    while number == 1000 * seed or time.monotonic() < deadline:
        for trouble, row in rows.items():
            problems = [] if row.note else problems_of(trouble, random.Random(f"{number} {trouble}"))
            row.add(f"{row.what}, seed {number}: {problem}" for problem in problems)
        number += 1
    return list(rows.values())
