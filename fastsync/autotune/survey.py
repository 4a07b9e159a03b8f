"""Plans which sizes to measure candidates at, and how often, to be done in time. Pure: what measures is passed in.

Sizes rise by factors of eight for as long as the time allows, so that a slow link is measured with small messages and a
fast one with large ones. Candidates take turns, so that what changes on the machine meanwhile meets all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

from fastsync.autotune.candidates import Candidate
from fastsync.compression import Compression

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
"""Of the budget: what a size may take for more than ``MIN_TURNS``, unless it is the last one."""
HOPELESS = 1.5
"""Who takes this many times as long as another one that sends no more is measured no more where time is short."""
UNUSUAL = 2.0
"""Beyond the largest size, bytes of all candidates cost alike but for this factor each way: more is taken for noise."""

Points = Sequence[tuple[int, float]]
"""(values, seconds), sizes rising."""
TakeTurns = Callable[[Sequence[Compression], int], tuple[list[float], float]]
"""Syncs so many values once with each. Seconds of each, and since measuring began: the same on all ranks."""


def survey(volumes: Mapping[Compression, float], take_turns: TakeTurns, budget: float = BUDGET) -> list[Candidate]:
    """Measures whole syncs at rising sizes, at the smallest one in any case.

    ``volumes`` are the bytes that a rank sends of each value, with each of the candidates.

    Decides by nothing but what ``take_turns`` returns, so that all ranks decide alike. A size is begun where a turn of
    all candidates fits into the budget even if it grows by ``GROWTH``, so that the budget holds over any link. Where it
    does not fit, candidates that have fallen behind others which send no more are left out, then half after half of
    those that will be slowest at the next size (sequential halving: Z. Karnin, T. Koren, O. Somekh, Almost Optimal
    Exploration in Multi-Armed Bandits, ICML 2013). They are taken to stay as many times slower than the best one as
    they were. Where a second size does not fit for all, the one that sends least goes on for all. What time is left
    goes into the largest size. The last point of each candidate is no measurement but what follows for larger ones.
    """
    found = _Survey(volumes, take_turns, budget)
    numel = SMALLEST
    while True:
        found.measure(numel)
        numel *= FACTOR
        if numel > LARGEST or not found.prepare_next():
            found.spend_the_rest()
            return found.candidates()


class _Survey:
    def __init__(self, volumes: Mapping[Compression, float], take_turns: TakeTurns, budget: float) -> None:
        self._take_turns = take_turns
        self._budget = budget
        self._spent = 0.0
        self._volumes = volumes
        self._active = list(volumes)
        self._samples: dict[Compression, list[float]] = {}
        """Seconds of each turn at the newest size."""
        self._points: dict[Compression, list[tuple[int, float]]] = {compression: [] for compression in volumes}
        self._behind: dict[Compression, float] = {}
        """How many times as long as the best one those take that are left out."""
        self._is_alone = False
        """Whether one goes on for all, because only the smallest size fitted for all."""

    def measure(self, numel: int) -> None:
        """Measures at one size, and joins what is found to the points."""
        self._samples = {compression: [] for compression in self._active}
        share = min(self._spent + SHARE * self._budget, self._budget)
        self._take_turn(numel)
        while self._another_fits(self._budget if self._num_turns() < MIN_TURNS else share):
            self._take_turn(numel)
        for compression in self._active:
            self._points[compression].append((numel, _typical(self._samples[compression])))
        for compression, times in self._behind.items():
            seconds = self._by_volume(compression) if self._is_alone else times * self._least()
            self._points[compression].append((numel, seconds))

    def prepare_next(self) -> bool:
        """Leaves out who has fallen behind, where time is short. False where it is too short for another size."""
        if not self._fits(self._active):
            self._go_on_with([compression for compression in self._active if not self._is_hopeless(compression)])
        if not self._fits(self._active) and not self._has_two_sizes():
            alone = [min(self._active, key=self._volumes.__getitem__)]
            if not self._fits(alone):
                return False  # and whatever time is left is for all of them
            self._is_alone = True
            self._go_on_with(alone)
        while not self._fits(self._active) and len(self._active) > 2:
            expected = self._expected_next()
            self._go_on_with(sorted(self._active, key=expected.__getitem__)[: (len(expected) + 1) // 2])
        return self._fits(self._active)

    def spend_the_rest(self) -> None:
        """Takes further turns at the newest size, which decides about all that are larger, with those near the best."""
        numel, _ = self._points[self._active[0]][-1]
        bound = HOPELESS * self._least()
        self._active = [compression for compression in self._active if _seconds(self._points[compression]) <= bound]
        while self._another_fits(self._budget):
            self._take_turn(numel)
        for compression in self._active:
            self._points[compression][-1] = (numel, _typical(self._samples[compression]))

    def candidates(self) -> list[Candidate]:
        """Returns what was found, and what follows from it for sizes that nobody measured."""
        steady = {compression: _steady(points) for compression, points in self._points.items()}
        if self._has_two_sizes():
            for compression, point in self._extrapolate(steady).items():
                steady[compression].append(point)
        return [Candidate(compression, tuple(points)) for compression, points in steady.items()]

    def _extrapolate(self, steady: Mapping[Compression, Points]) -> dict[Compression, tuple[int, float]]:
        """A point at the next size for each, from two at least."""
        per_byte = {compression: _slope(points) / self._volumes[compression] for compression, points in steady.items()}
        usual = median_low([value for value in per_byte.values() if value > 0] or [0.0])
        extrapolated = {}
        for compression, value in per_byte.items():
            numel, seconds = steady[compression][-1]
            slope = self._volumes[compression] * min(max(value, usual / UNUSUAL), usual * UNUSUAL)
            extrapolated[compression] = (FACTOR * numel, seconds + (FACTOR - 1) * numel * slope)
        return extrapolated

    def _expected_next(self) -> dict[Compression, float]:
        """Seconds of the active ones at the next size; without a second size, at this one."""
        steady = {compression: _steady(self._points[compression]) for compression in self._active}
        points = self._extrapolate(steady) if self._has_two_sizes() else {c: each[-1] for c, each in steady.items()}
        return {compression: seconds for compression, (_, seconds) in points.items()}

    def _go_on_with(self, chosen: Sequence[Compression]) -> None:
        expected = self._expected_next()
        best = min(expected[compression] for compression in chosen)
        for compression in self._active:
            if compression not in chosen:
                self._behind[compression] = max(1.0, expected[compression] / best)
        self._active = [compression for compression in self._active if compression in chosen]

    def _by_volume(self, compression: Compression) -> float:
        """Seconds at the newest size, if further bytes cost what they do the one that goes on."""
        (alone,) = self._active
        (_, before), (_, now) = self._points[alone][-2:]
        cost = max(0.0, now - before) / self._volumes[alone]
        return self._points[compression][-1][1] + cost * self._volumes[compression]

    def _least(self) -> float:
        """Seconds of the fastest one at the newest size."""
        return min(_seconds(self._points[compression]) for compression in self._active)

    def _has_two_sizes(self) -> bool:
        return len(self._points[self._active[0]]) > 1

    def _take_turn(self, numel: int) -> None:
        seconds, self._spent = self._take_turns(self._active, numel)
        for compression, value in zip(self._active, seconds, strict=True):
            self._samples[compression].append(value)

    def _num_turns(self) -> int:
        return len(self._samples[self._active[0]])

    def _another_fits(self, until: float) -> bool:
        """Tells whether another turn at the newest size, as long as the last one, is over by then."""
        newest = sum(self._samples[compression][-1] for compression in self._active)
        return self._num_turns() < MAX_TURNS and self._spent + newest <= until

    def _fits(self, compressions: Sequence[Compression]) -> bool:
        """Tells whether there is time to measure these at the next size."""
        remaining = self._budget - self._spent
        at_most = GROWTH * sum(_seconds(self._points[compression]) for compression in compressions)
        # Without a second size nothing is known about larger ones, so there it is enough if one turn fits.
        expected = self._expected_next()
        often = MIN_TURNS * sum(expected[compression] for compression in compressions)
        return at_most <= remaining and (not self._has_two_sizes() or often <= remaining)

    def _is_hopeless(self, compression: Compression) -> bool:
        """Tells whether it is slower than one that sends no more, so that it will stay behind at any size."""
        return any(
            self._volumes[other] <= self._volumes[compression]
            and _seconds(self._points[compression]) > HOPELESS * _seconds(self._points[other])
            for other in self._active
        )


def _steady(points: Points) -> list[tuple[int, float]]:
    """Fewer values never take longer: where they seemed to, something else was in the way."""
    return [(numel, min(seconds for _, seconds in points[index:])) for index, (numel, _) in enumerate(points)]


def _slope(points: Points) -> float:
    """Seconds for each further value, by the two newest sizes."""
    (less, seconds), (more, longer) = points[-2:]
    return (longer - seconds) / (more - less)


def _typical(samples: Sequence[float]) -> float:
    """The lower quartile: what disturbs a turn only ever adds to it."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _seconds(points: Points) -> float:
    """At the newest size."""
    return points[-1][1]
