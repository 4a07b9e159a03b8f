"""Which sizes to measure candidates at, and how often, so that it is over in time. Pure: what measures is passed in.

Sizes rise by factors of four for as long as the time allows, so that a slow link is measured with small messages and a
fast one with large ones. Candidates take turns, so that what changes on the machine meanwhile meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .auto import Candidate
from .compression import Compression

BUDGET = 0.7
"""Seconds that measuring may take, connecting the ranks not counted."""
SMALLEST, LARGEST = 2**12, 2**22
"""Gradient values. More than the largest would tell nothing new: all is bandwidth there."""
FACTOR = 4
"""From one size to the next."""
GROWTH = 5.0
"""No sync of ``FACTOR`` times as many values is taken to last longer than this, compared to the one before."""
MIN_TURNS, MAX_TURNS = 3, 15
SHARE = 0.1
"""Of the budget: what a size may take beyond ``MIN_TURNS``, unless it is the last one."""
HOPELESS = 1.5
"""A candidate that takes this many times as long as the best one, for each further value too, is measured no more."""
RELIABLE = 2**16
"""From so many values on a difference between two sizes tells what further values take. Below, latencies hide it."""

TakeTurns = Callable[[Sequence[Compression], int], tuple[list[float], float]]
"""Syncs so many values once with each. Seconds of each, and since measuring began: the same on all ranks."""


def survey(compressions: Sequence[Compression], take_turns: TakeTurns, budget: float = BUDGET) -> list[Candidate]:
    """Measures whole syncs at rising sizes, at the smallest one in any case.

    Decides by nothing but what ``take_turns`` returns, so that all ranks decide alike. A size is begun where a turn of
    all candidates fits into the budget even if it grows by ``GROWTH``, so that the budget holds over any link. A
    candidate that is left out at larger sizes is taken to stay as many times slower than the best one as it was.
    """
    found = _Survey(compressions, take_turns, budget)
    numel = SMALLEST
    while True:
        found.measure(numel)
        numel *= FACTOR
        if numel > LARGEST or not found.prepare_next(numel):
            return found.candidates()


class _Survey:
    def __init__(self, compressions: Sequence[Compression], take_turns: TakeTurns, budget: float) -> None:
        self._take_turns = take_turns
        self._budget = budget
        self._spent = 0.0
        self._active = list(compressions)
        self._points: dict[Compression, list[tuple[int, float]]] = {compression: [] for compression in compressions}

    def measure(self, numel: int) -> None:
        """Measures at one size, and joins what is found to the points."""
        turns: list[list[float]] = []
        share = min(self._spent + SHARE * self._budget, self._budget)
        while True:
            seconds, self._spent = self._take_turns(self._active, numel)
            turns.append(seconds)
            until = self._budget if len(turns) < MIN_TURNS else share
            if len(turns) == MAX_TURNS or self._spent + sum(seconds) > until:
                break
        self._add(numel, [_typical(samples) for samples in zip(*turns, strict=True)])

    def prepare_next(self, numel: int) -> bool:
        """Leaves out who has fallen behind, where that is clear or time is short. False where time is too short."""
        if numel > RELIABLE or not self._fits():
            self._active = self._promising()
        return self._fits()

    def candidates(self) -> list[Candidate]:
        """What was found. Fewer values never take longer: where they seemed to, something else was in the way."""
        candidates = []
        for compression, points in self._points.items():
            least = [min(seconds for _, seconds in points[index:]) for index in range(len(points))]
            steady = tuple((numel, seconds) for (numel, _), seconds in zip(points, least, strict=True))
            candidates.append(Candidate(compression, steady))
        return candidates

    def _add(self, numel: int, seconds: Sequence[float]) -> None:
        left_out = [points for compression, points in self._points.items() if compression not in self._active]
        best_before = min((self._points[compression][-1:] for compression in self._active), key=_seconds)
        for compression, value in zip(self._active, seconds, strict=True):
            self._points[compression].append((numel, value))
        for points in left_out:
            points.append((numel, points[-1][1] * min(seconds) / _seconds(best_before)))

    def _fits(self) -> bool:
        points = [self._points[compression] for compression in self._active]
        remaining = self._budget - self._spent
        at_most = GROWTH * sum(_seconds(each) for each in points)
        # Without a second size nothing is known about larger ones, so there it is enough if one turn fits.
        has_two_sizes = len(points[0]) > 1
        return at_most <= remaining and (not has_two_sizes or MIN_TURNS * sum(map(_expected, points)) <= remaining)

    def _promising(self) -> list[Compression]:
        """Without those that have fallen behind for good: both in their time and in what further values add to it."""
        best = min((self._points[compression] for compression in self._active), key=_seconds)
        if len(best) < 2:
            return self._active

        def keeps_up(points: Sequence[tuple[int, float]]) -> bool:
            return _seconds(points) <= HOPELESS * _seconds(best) or _added(points) <= HOPELESS * _added(best)

        return [compression for compression in self._active if keeps_up(self._points[compression])]


def _typical(samples: Sequence[float]) -> float:
    """The lower quartile: what disturbs a turn only ever adds to it."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _seconds(points: Sequence[tuple[int, float]]) -> float:
    """At the newest size."""
    return points[-1][1] if points else 0.0


def _added(points: Sequence[tuple[int, float]]) -> float:
    """By the newest size, compared to the one before."""
    return points[-1][1] - points[-2][1]


def _expected(points: Sequence[tuple[int, float]]) -> float:
    """At the next size: what further values add grows as the sizes do."""
    return _seconds(points) + GROWTH * max(0.0, _added(points))
