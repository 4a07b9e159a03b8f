"""What drills share: rows of attempts, and steps whose averages are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import SkipTest

import torch
import torch.distributed as dist

from tests.engine.entry_points import average, mean_of, whole_numbers
from tests.models import Given
from tests.ranks import RankError, RankTimeoutError

SHAPES = ((300,), (7, 40), (30_000,))
Attempts = Iterator[tuple[str, Callable[[], str | None]]]
"""The name of a row, and what to attempt: raises AssertionError if something breaks, SkipTest where it cannot be
attempted, and may return a note."""


@dataclass
class Row:
    """Attempts at breaking one thing."""

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""
    """What a reader of the table has to know: the last one."""

    def add(self, attempt: Callable[[], str | None], where: str) -> None:
        try:
            self.note = attempt() or self.note
        except SkipTest as why:
            self.note = str(why)
            return
        except (AssertionError, RankError, RankTimeoutError) as error:
            self.wrong.append(f"{where}: {str(error).strip().splitlines()[-1]}")
        self.tried += 1


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
