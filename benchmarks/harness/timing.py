"""The clock: subjects take turns, in an order that changes, each time from a barrier, and the slowest rank counts."""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.baselines.shared_memory import barrier
from fastsync.ppo.stopwatch import Stopwatch

TIMEOUT = 120.0
"""Seconds that a rank waits for the others; a step that takes longer ends the rank, with a traceback of where it is."""


@dataclass(frozen=True)
class Sampling:
    """Untimed and timed steps of each method in an order that the seed gives, on a rank's device."""

    warmup: int
    repetitions: int
    seed: int
    timeout: float = TIMEOUT
    """Seconds that a step may take."""
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    progress: Progress = field(default_factory=partial(Progress, disable=True))

    @property
    def settings(self) -> dict[str, int]:
        """As a row has it."""
        return {"repetitions": self.repetitions, "warmup": self.warmup, "seed": self.seed}


class Timed(Protocol):
    def prepare(self) -> None: ...

    def run(self) -> None: ...


def rounds(names: Iterable[str], num_rounds: int, seed: int) -> Iterator[list[str]]:
    """All names, once a round, each round in another order: the same on all ranks, which share ``seed``.

    Nobody follows the same subject every time, which may leave caches, buffers or threads in a good or a bad state.
    """
    order = list(names)
    generator = random.Random(seed)
    for _ in range(num_rounds):
        generator.shuffle(order)
        yield order.copy()


def time_turns(subjects: Mapping[str, Timed], turns: Iterable[str], device: torch.device) -> dict[str, list[float]]:
    """Each subject's seconds, one sample a turn, as this rank sees them. A collective call.

    Only ``run`` is timed, on a GPU by events. Before it the ranks meet, so that none waits for another's ``prepare``.
    """
    wait = barrier()
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for name in turns:
        subjects[name].prepare()
        stopwatch = Stopwatch(device)
        wait()
        with stopwatch:
            subjects[name].run()
        samples[name].append(stopwatch.seconds())
    return samples


def span_turns(subjects: Mapping[str, Timed], turns: Iterable[str]) -> dict[str, list[tuple[float, float]]]:
    """When each subject's ``run`` began and ended, one pair a turn, by the clock that processes of a machine share.

    For work on the CPU that takes microseconds: a barrier may let one rank go as long before another. A collective
    call.
    """
    wait = barrier()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for name in turns:
        subjects[name].prepare()
        wait()
        began = time.perf_counter()
        subjects[name].run()
        spans[name].append((began, time.perf_counter()))
    return spans


def together(spans_of_rank: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Per repetition the seconds from when the last rank began until the last one had done."""
    began, ended = np.moveaxis(np.array(spans_of_rank).max(axis=0), 1, 0)
    return (ended - began).tolist()


def slowest_rank(samples_of_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per repetition the longest time of all ranks: a step is over when it is over everywhere."""
    return np.max(np.array(samples_of_rank), axis=0).tolist()
