"""The survey of a group: over in time on any link, and right about what it did not measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from fastsync.autotune.choose import choose, compressions, volume
from fastsync.autotune.measure import BUDGET, LARGEST, SMALLEST, Survey
from fastsync.compression import Compression

EVERYTHING = compressions(["none", "fp16", "bf16", "int8"], world_size=4)
BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 132 / 128}
BUCKET = 6_553_600
"""Values of a bucket of 25 MiB."""


@dataclass
class Link:
    """Ranks that are as fast as they are said to be, and a record of what they were asked to do."""

    rate: float
    """Bytes per second."""
    latency: float
    world_size: int = 2
    per_value: float = 2e-9
    """Seconds of local work."""
    disturbance: Callable[[int], float] = lambda turn: 1.0
    log: list[tuple[int, tuple[Compression, ...]]] = field(default_factory=list)
    spent: float = 0.0

    def seconds(self, compression: Compression, numel: int) -> float:
        n = self.world_size
        steps, volume = 2 * (n - 1), 2 * (n - 1) / n
        if compression.algorithm is not None:
            steps, volume = (1, n - 1) if compression.algorithm == "one_shot" else (2, volume)
        return steps * self.latency + numel * (volume * BYTES[compression.wire] / self.rate + self.per_value)

    @property
    def volumes(self) -> dict[Compression, float]:
        return {compression: volume(compression, self.world_size) for compression in EVERYTHING}

    def take_turns(self, active: Sequence[Compression], numel: int) -> tuple[list[float], float]:
        self.log.append((numel, tuple(active)))
        seconds = [self.seconds(compression, numel) * self.disturbance(len(self.log)) for compression in active]
        self.spent += sum(seconds)
        return seconds, self.spent


LINKS = {
    "100 Mbit/s": (1.25e7, 2e-4),
    "1 Gbit/s": (1.25e8, 1e-4),
    "10 Gbit/s": (1.25e9, 5e-5),
    "NVLink": (3e11, 1e-5),
    "1 Gbit/s, other rooms": (1.25e8, 2e-3),
    "1 Gbit/s, other houses": (1.25e8, 5e-3),
    "another continent": (1e7, 5e-2),
}


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
@pytest.mark.parametrize("name", LINKS)
def test_it_is_over_in_time(name: str, world_size: int) -> None:
    link = Link(*LINKS[name], world_size=world_size)
    Survey(link.volumes, link.take_turns).candidates()
    smallest = [turn for turn in link.log if turn[0] == SMALLEST]
    # What the smallest size takes, nobody knows before.
    assert link.spent <= max(BUDGET, sum(link.seconds(each, SMALLEST) for each in EVERYTHING))
    assert smallest[0][1] == tuple(EVERYTHING)
    assert max(numel for numel, _ in link.log) <= LARGEST


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", [name for name in LINKS if name != "another continent"])
def test_its_choice_is_as_good_as_the_best_at_any_size(name: str, world_size: int) -> None:
    link = Link(*LINKS[name], world_size=world_size)
    candidates = Survey(link.volumes, link.take_turns).candidates()
    for numel in (1, 5_000, 50_000, 500_000, BUCKET):
        chosen = EVERYTHING[choose(candidates, numel)]
        best = min(link.seconds(compression, max(numel, SMALLEST)) for compression in EVERYTHING)
        assert link.seconds(chosen, max(numel, SMALLEST)) <= 1.05 * best, f"{chosen} for {numel} values"


def test_a_turn_that_was_disturbed_counts_for_nothing() -> None:
    def disturbed(turn: int) -> float:
        return 7.0 if turn % 3 == 1 else 1.0

    link = Link(1.25e8, 1e-4, disturbance=disturbed)
    for candidate in Survey(link.volumes, link.take_turns).candidates():
        for numel, seconds in candidate.points:
            if numel <= 2**16:  # beyond, there may have been one turn
                assert seconds == link.seconds(candidate.compression, numel)
