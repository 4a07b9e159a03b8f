"""Thousands of steps, hundreds of engines and groups: averages stay right, and nothing grows."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.drill.attempts import Attempts, Steps
from tests.engine.entry_points import ALL
from tests.ranks import run_ranks

REPEATS = False
FEWEST_STEPS, STEPS, CYCLES = 1_500, 20_000, 200
TIMED = 100
"""Steps that tell how many the time allows."""
SETTLED = 0.25
"""Of the work: what memory has grown by then may be caches that fill."""
MORE_KIB = 8192
"""By which the rest may grow, as DDP without a hook does with new groups. A leak of the gradients in every tenth step
or every other cycle is more."""
SECONDS = 1800.0


def held() -> dict[str, int]:
    """What this process has of each thing that can leak."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "KiB of memory": int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
    }


def repeat(work: Callable[[int], object], number: int) -> None:
    """Does the work so many times. Nothing may have grown."""
    before: dict[str, int] = {}
    for index in range(number):
        work(index)
        if index == int(SETTLED * number):
            before = held()
    for what, after in held().items():
        more = MORE_KIB if what == "KiB of memory" else 0
        assert after <= before[what] + more, f"{what} grew from {before[what]} to {after}"


def many_steps(rank: int, world_size: int, entry_point: str, seconds: float) -> int:
    """As many steps as there is time for."""
    steps, began = Steps(rank, world_size, entry_point), time.monotonic()
    for index in range(TIMED):
        steps.take(index)
    allowed = int(TIMED * seconds / (time.monotonic() - began))
    number = torch.tensor(min(max(allowed, FEWEST_STEPS), STEPS))
    dist.broadcast(number, 0)
    repeat(steps.take, int(number))
    return int(number)


def cycles(rank: int, world_size: int, with_groups: bool) -> int:
    """A new model and engine each time; with groups, a new group that is destroyed in the end."""

    def cycle(index: int) -> None:
        group = dist.new_group() if with_groups else None
        steps = Steps(rank, world_size, "attach", group)
        steps.take(index)
        steps.averaged.handle.detach()
        if group is not None:
            del steps
            dist.destroy_process_group(group)

    repeat(cycle, CYCLES)
    return CYCLES


def endure(work: Callable[..., int], *arguments: object) -> str:
    return f"{run_ranks(work, 2, *arguments, timeout=SECONDS)[0]:,} times"


def attempts(seed: int, deadline: float) -> Attempts:
    """Everything once. The steps share what time is left."""
    yield "new engines", partial(endure, cycles, False)
    yield "new groups", partial(endure, cycles, True)
    for index, entry_point in enumerate(ALL):
        seconds = (deadline - time.monotonic()) / (len(ALL) - index)
        yield f"steps of {entry_point}", partial(endure, many_steps, entry_point, seconds)
