"""Thousands of steps, hundreds of engines and groups, and extreme values: nothing grows, and averages stay right."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fastsync
from tests.drill.rows import Row
from tests.engine.entry_points import ALL, average, mean_of, whole_numbers
from tests.models import Given
from tests.ranks import RankError, RankTimeoutError, run_ranks

SHAPES = ((300,), (7, 40), (2000,))
STEPS, CYCLES = 20_000, 200
KINDS = 100
"""Gradients that take turns, so that drawing them takes no time."""
SETTLED = 0.25
"""Of the work: what memory has grown by then may be caches that fill."""
MORE_KIB = 4096
"""By which the rest may grow. A leak of one float32 gradient in ten steps is more."""
SECONDS = 1200.0
EXTREMES = (0.0, -0.0, 1e-45, 1e-38, 65504.0, 65520.0, 1e30, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan)
WIRES = ("none", "bf16", "fp16", "int8", "int4")


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


def growth(work: Callable[[int], str | None], number: int) -> list[str]:
    """Does the work so many times, until it says what was wrong. Returns that, or what has grown meanwhile."""
    before: dict[str, int] = {}
    for index in range(number):
        if wrong := work(index):
            return [f"{index}: {wrong}"]
        if index == int(SETTLED * number):
            before = held()
    return [
        f"{what} grew from {before[what]} to {after}"
        for what, after in held().items()
        if after > before[what] + (MORE_KIB if what == "KiB of memory" else 0)
    ]


def steps(rank: int, world_size: int, entry_point: str, number: int) -> list[str]:
    averaged = average(entry_point, Given([torch.zeros(shape) for shape in SHAPES]))
    everyone = [[whole_numbers(each, kind, SHAPES) for each in range(world_size)] for kind in range(KINDS)]
    expected = [mean_of(grads) for grads in everyone]

    def step(index: int) -> str:
        means = averaged.step(everyone[index % KINDS][rank])
        same = all(map(torch.equal, means, expected[index % KINDS]))  # type: ignore[arg-type]
        return "" if same else "wrong averages"

    return growth(step, number)


def cycles(rank: int, world_size: int, what: str, number: int) -> list[str]:
    """A new model and engine each time; with groups, a new group that is destroyed in the end."""

    def cycle(index: int) -> str:
        group = dist.new_group() if what == "groups" else None
        model = Given([torch.zeros(shape) for shape in SHAPES])
        sync = fastsync.attach(model, process_group=group)
        grads = [whole_numbers(each, index, SHAPES) for each in range(world_size)]
        model(grads[rank]).backward()
        means = [weight.grad for weight in model.weights]
        wrong = not all(map(torch.equal, means, mean_of(grads)))  # type: ignore[arg-type]
        sync.detach()
        if group is not None:
            del sync
            dist.destroy_process_group(group)
        return "wrong averages" if wrong else ""

    return growth(cycle, number)


def extremes(rank: int, world_size: int, entry_point: str, seed: int) -> list[str]:
    """Each value at a random place: what is finite on all ranks stays finite, and what is not stays that."""
    found = []
    wires = WIRES[:3] if entry_point == "drop-in hook" else WIRES
    for wire in wires:
        averaged = average(entry_point, Given([torch.zeros(shape) for shape in SHAPES]), wire)
        for value in EXTREMES:
            draw = random.Random(f"{seed} {wire} {value}")  # equal on all ranks
            grads = whole_numbers(rank, draw.randrange(1000), SHAPES)
            place, whose = draw.randrange(300), draw.randrange(world_size)
            if rank == whose:
                grads[0][place] = value
            means = averaged.step(grads)
            is_finite = all(bool(mean.isfinite().all()) for mean in means if mean is not None)
            arrived = means[0] if means[0] is not None else torch.zeros(300)
            if is_finite != math.isfinite(value) or arrived[place].isfinite().item() != math.isfinite(value):
                found.append(f"{wire}: {value} on rank {whose} became {arrived[place].item()}")
            if not same_everywhere([mean for mean in means if mean is not None]):
                found.append(f"{wire}: ranks differ after {value}")
    return found


def same_everywhere(means: list[Tensor]) -> bool:
    bits = torch.cat([mean.view(-1) for mean in means]).view(torch.int32)
    least, most = bits.clone(), bits.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


def tried(row: Row, what: Callable[..., list[str]], *arguments: object) -> None:
    try:
        of_ranks = run_ranks(what, 2, *arguments, timeout=SECONDS)
        problems = [f"rank {rank}: {problem}" for rank, each in enumerate(of_ranks) for problem in each]
    except (RankError, RankTimeoutError) as error:
        problems = [str(error).strip().splitlines()[-1]]
    row.add(f"{row.what}: {problem}" for problem in problems)


def drill(seed: int, deadline: float) -> list[Row]:
    """Everything once; what the time does not allow for is said."""
    rows = []
    for entry_point in ALL:
        rows.append(Row(f"{entry_point}: extreme values"))
        tried(rows[-1], extremes, entry_point, seed)
    for what in ("engines", "groups"):
        rows.append(Row(f"{CYCLES} {what}"))
        tried(rows[-1], cycles, what, CYCLES)
    for entry_point in ALL:
        rows.append(Row(f"{entry_point}: {STEPS} steps"))
        if time.monotonic() < deadline:
            tried(rows[-1], steps, entry_point, STEPS)
        else:
            rows[-1].note = "no time was left"
    return rows
