"""Which sizes to measure candidates at, and how often, so that it is over in time. Pure: what measures is passed in.

Sizes rise by factors of eight for as long as the time allows, so that a slow link is measured with small messages and a
fast one with large ones. Candidates take turns, so that what changes on the machine meanwhile meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from .auto import Candidate, volume
from .compression import Compression

BUDGET = 0.7
"""Seconds that measuring may take, connecting the ranks not counted."""
SMALLEST, LARGEST = 2**12, 2**21
"""Gradient values. More than the largest would tell nothing new: all is bandwidth there."""
FACTOR = 8
"""From one size to the next."""
GROWTH = 10.0
"""No sync of ``FACTOR`` times as many values is taken to last longer than this, compared to the one before."""
MIN_TURNS, MAX_TURNS = 3, 15
SHARE = 0.1
"""Of the budget: what a size may take beyond ``MIN_TURNS``, unless it is the last one."""
HOPELESS = 1.5
"""Who takes this many times as long as another one that sends no more is measured no more where time is short."""
UNUSUAL = 2.0
"""Beyond the largest size, bytes of all candidates cost alike, but for this factor each way: less or more is noise."""

TakeTurns = Callable[[Sequence[Compression], int], tuple[list[float], float]]
"""Syncs so many values once with each. Seconds of each, and since measuring began: the same on all ranks."""


def survey(
    compressions: Sequence[Compression], world_size: int, take_turns: TakeTurns, budget: float = BUDGET
) -> list[Candidate]:
    """Measures whole syncs at rising sizes, at the smallest one in any case.

    Decides by nothing but what ``take_turns`` returns, so that all ranks decide alike. A size is begun where a turn of
    all candidates fits into the budget even if it grows by ``GROWTH``, so that the budget holds over any link. Where it
    does not fit, candidates that have fallen behind others which send no more are left out, and taken to stay as many
    times slower than the best one as they were. What time is left goes into the largest size. The last point of each
    candidate is no measurement but what follows for larger ones.
    """
    found = _Survey(compressions, world_size, take_turns, budget)
    numel = SMALLEST
    while True:
        found.measure(numel)
        numel *= FACTOR
        if numel > LARGEST or not found.prepare_next():
            found.spend_the_rest()
            return found.candidates()


class _Survey:
    def __init__(
        self, compressions: Sequence[Compression], world_size: int, take_turns: TakeTurns, budget: float
    ) -> None:
        self._take_turns = take_turns
        self._budget = budget
        self._spent = 0.0
        self._volumes = {compression: volume(compression, world_size) for compression in compressions}
        self._active = list(compressions)
        self._samples: dict[Compression, list[float]] = {}
        """Seconds of each turn at the newest size."""
        self._points: dict[Compression, list[tuple[int, float]]] = {compression: [] for compression in compressions}

    def measure(self, numel: int) -> None:
        """Measures at one size, and joins what is found to the points."""
        self._samples = {compression: [] for compression in self._active}
        share = min(self._spent + SHARE * self._budget, self._budget)
        self._take_turn(numel)
        while self._another_fits(self._budget if self._num_turns() < MIN_TURNS else share):
            self._take_turn(numel)
        best_before = min((self._points[compression][-1:] for compression in self._active), key=_seconds)
        for compression in self._active:
            self._points[compression].append((numel, _typical(self._samples[compression])))
        best = min((self._points[compression] for compression in self._active), key=_seconds)
        for compression, points in self._points.items():
            if compression not in self._active:
                points.append((numel, points[-1][1] * _seconds(best) / _seconds(best_before)))

    def prepare_next(self) -> bool:
        """Leaves out who has fallen behind, where time is short. False where it is too short for another size."""
        if not self._fits():
            self._active = [compression for compression in self._active if not self._is_hopeless(compression)]
        return self._fits()

    def spend_the_rest(self) -> None:
        """Takes further turns at the newest size, which decides about all that are larger."""
        ((numel, _),) = self._points[self._active[0]][-1:]
        while self._another_fits(self._budget):
            self._take_turn(numel)
        for compression in self._active:
            self._points[compression][-1] = (numel, _typical(self._samples[compression]))

    def candidates(self) -> list[Candidate]:
        """What was found, and what follows from it for sizes that nobody measured."""
        steady = {compression: _steady(points) for compression, points in self._points.items()}
        per_byte = {
            compression: _slope(points) / self._volumes[compression]
            for compression, points in steady.items()
            if len(points) > 1
        }
        usual = median(per_byte.values()) if per_byte else 0.0
        for compression, value in per_byte.items():
            numel, seconds = steady[compression][-1]
            slope = self._volumes[compression] * min(max(value, usual / UNUSUAL), usual * UNUSUAL)
            steady[compression].append((FACTOR * numel, seconds + (FACTOR - 1) * numel * slope))
        return [Candidate(compression, tuple(points)) for compression, points in steady.items()]

    def _take_turn(self, numel: int) -> None:
        seconds, self._spent = self._take_turns(self._active, numel)
        for compression, value in zip(self._active, seconds, strict=True):
            self._samples[compression].append(value)

    def _num_turns(self) -> int:
        return len(self._samples[self._active[0]])

    def _another_fits(self, until: float) -> bool:
        """Whether another turn at the newest size, as long as the last one, is over by then."""
        newest = sum(self._samples[compression][-1] for compression in self._active)
        return self._num_turns() < MAX_TURNS and self._spent + newest <= until

    def _fits(self) -> bool:
        points = [self._points[compression] for compression in self._active]
        remaining = self._budget - self._spent
        at_most = GROWTH * sum(_seconds(each) for each in points)
        # Without a second size nothing is known about larger ones, so there it is enough if one turn fits.
        has_two_sizes = len(points[0]) > 1
        return at_most <= remaining and (not has_two_sizes or MIN_TURNS * sum(map(_expected, points)) <= remaining)

    def _is_hopeless(self, compression: Compression) -> bool:
        """Whether it is slower than one that sends no more, so that it will stay behind at any size."""
        return any(
            self._volumes[other] <= self._volumes[compression]
            and _seconds(self._points[compression]) > HOPELESS * _seconds(self._points[other])
            for other in self._active
        )


def _steady(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Fewer values never take longer: where they seemed to, something else was in the way."""
    return [(numel, min(seconds for _, seconds in points[index:])) for index, (numel, _) in enumerate(points)]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Seconds for each further value, by the two newest sizes."""
    (less, seconds), (more, longer) = points[-2:]
    return (longer - seconds) / (more - less)


def _typical(samples: Sequence[float]) -> float:
    """The lower quartile: what disturbs a turn only ever adds to it."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _seconds(points: Sequence[tuple[int, float]]) -> float:
    """At the newest size."""
    return points[-1][1] if points else 0.0


def _expected(points: Sequence[tuple[int, float]]) -> float:
    """At the next size: what further values add grows as the sizes do."""
    return points[-1][1] + GROWTH * max(0.0, points[-1][1] - points[-2][1])
