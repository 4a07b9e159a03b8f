"""Thousands of steps, hundreds of engines and groups: averages stay right, and nothing grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine.entry_points import ALL, average, mean_of, whole_numbers
from tests.models import Given
from tests.ranks import run_ranks

FEWEST_STEPS, STEPS_A_SECOND, CYCLES = 1_500, 50, 200
SETTLED = 0.25
"""Of the work: what memory has grown by then may be caches that fill."""
MORE_KIB = 8192
"""By which the rest may grow, as DDP without a hook does with new groups. A leak of the gradients in every tenth step
or every other cycle is more."""
SECONDS = 1800.0
SHAPES = ((300,), (7, 40), (30_000,))


class Steps:
    """Steps of an entry point on gradients that every rank knows of all ranks: a few, which take turns."""

    def __init__(self, rank: int, world_size: int, entry_point: str, group: dist.ProcessGroup | None = None) -> None:
        everyone = [[whole_numbers(each, turn, SHAPES) for each in range(world_size)] for turn in range(3)]
        self.averaged = average(entry_point, Given([torch.zeros(shape) for shape in SHAPES]), group=group)
        self.mine, self.means = [grads[rank] for grads in everyone], [mean_of(grads) for grads in everyone]
        self.tolerance = 0.0 if world_size in (2, 4) else 1e-6

    def take(self, number: int) -> None:
        for one, other in zip(self.averaged.step(self.mine[number % 3]), self.means[number % 3], strict=True):
            assert torch.allclose(one, other, self.tolerance, self.tolerance), f"wrong averages in step {number}"  # type: ignore[arg-type]


def held() -> dict[str, int]:
    """What this process has of each thing that can leak."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "KiB of memory": int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
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


def many_steps(rank: int, world_size: int, entry_point: str, number: int) -> None:
    repeat(Steps(rank, world_size, entry_point).take, number)


@pytest.mark.parametrize("entry_point", ALL)
def test_steps(entry_point: str, seconds: float) -> None:
    run_ranks(many_steps, 2, entry_point, max(FEWEST_STEPS, int(STEPS_A_SECOND * seconds)), timeout=SECONDS)


def cycles(rank: int, world_size: int, with_groups: bool) -> None:
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


@pytest.mark.parametrize("with_groups", [False, True], ids=["engines", "engines and groups"])
def test_new(with_groups: bool) -> None:
    run_ranks(cycles, 2, with_groups, timeout=SECONDS)
