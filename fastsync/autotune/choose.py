"""Choosing by measurement: the candidates, the time each is predicted to take, which one is picked, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

from .. import _C
from ..compression import LOSSIER, Algorithm, Compression, Wire

TOLERANCE = 1.03  # the engine's: times within this factor of the least are as good, for repetitions differ by as much
WIRES: tuple[Wire, ...] = ("none", "fp16", "bf16", *LOSSIER)
"""From the one that loses least to the one that loses most."""
_BYTES: dict[Wire, float] = {"fp16": 2, "bf16": 2, "int8": 1 + 4 / 128}
"""Of a value. 128 of int8 share a scale of 4 bytes."""


@dataclass(frozen=True)
class Candidate:
    """A compression, and the seconds that whole syncs with it take, as measured."""

    compression: Compression
    points: tuple[tuple[int, float], ...] = ()
    """(gradient values, seconds), the first rising, the second not falling. A candidate without rivals needs none."""

    def predict(self, numel: int) -> float:
        """Estimates the seconds that a sync of so many values takes, on the line through the points beside it."""
        return _C.predict(self.in_engine(), numel)

    def in_engine(self) -> _C.Candidate:
        """The same in the engine's own type."""
        compression = _C.Compression(
            self.compression.wire,
            sums_in_float32=self.compression.reduce == "fp32",
            error_feedback=self.compression.error_feedback,
            algorithm=self.compression.algorithm,
            ranks_per_node=self.compression.ranks_per_node or 1,
        )
        return _C.Candidate(compression, list(self.points))


def engine_schedule(phases: Sequence[tuple[int, Sequence[Candidate]]]) -> _C.CandidateSchedule:
    """Tells the engine the candidates from each first step on. Of several it takes one a bucket, as ``choose`` does."""
    return _C.CandidateSchedule([(step, [each.in_engine() for each in candidates]) for step, candidates in phases])


def choose(candidates: Sequence[Candidate], numel: int) -> int:
    """Picks the first candidate that is as fast as the fastest, so that a lossier one has to earn its place."""
    return _C.choose([candidate.in_engine() for candidate in candidates], numel)


def compressions(wires: Iterable[str], world_size: int) -> list[Compression]:
    """The candidates of these wires: from least to most lossy, and of one wire from the simplest algorithm on.

    Between two ranks two_shot is none: it sends as much as one_shot, in two steps, and rounds once more. Nor is bf16
    beside fp16 where ranks add in float32: it takes as long, and loses more. Raises ValueError for other names.
    """
    wanted = set(wires)
    if not wanted or not wanted <= set(WIRES):
        raise ValueError(f"wires: expected names out of {WIRES}, got {sorted(wanted)}")
    found: list[Compression] = []
    for wire in WIRES:
        if wire not in wanted:
            continue
        if wire not in LOSSIER:
            found.append(Compression(wire))
        if wire == "bf16" and "fp16" in wanted:
            continue
        found.extend(
            Compression(wire, reduce="fp32", error_feedback=wire in LOSSIER, algorithm=algorithm)
            for algorithm in get_args(Algorithm)
            if world_size > 2 or algorithm != "two_shot"
        )
    return found


def volume(compression: Compression, world_size: int, itemsize: int = 4) -> float:
    """Bytes that each rank sends of every value, if gradients have ``itemsize``."""
    copies = world_size - 1 if compression.algorithm == "one_shot" else 2 * (world_size - 1) / world_size
    return copies * (itemsize if compression.wire == "none" else _BYTES[compression.wire])


def _reason(candidates: Sequence[Candidate], numel: int) -> str:
    """Says in a few words why ``choose`` picks what it picks."""
    if len(candidates) == 1:
        return "given"
    chosen = candidates[choose(candidates, numel)]
    fastest = min(candidates, key=lambda candidate: candidate.predict(numel))
    if chosen is fastest:
        return "fastest"
    better = "loses less" if chosen.compression.wire != fastest.compression.wire else "simpler"
    return f"as fast as {fastest.compression} within {TOLERANCE - 1:.0%}, and {better}"


def explain(candidates: Sequence[Candidate], numels: Sequence[int], transport: str) -> str:
    """Lays out what each bucket travels with and why, given their numbers of values in the order they are sent."""
    lines = [("buckets", "values", "candidate", "predicted ms", "chosen")]
    for numel, same in groupby(enumerate(numels), key=lambda item: item[1]):
        indices = [index for index, _ in same]
        bucket = (str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}", f"{numel:,}")
        chosen = choose(candidates, numel)
        for index, candidate in enumerate(candidates):
            seconds = f"{candidate.predict(numel) * 1e3:.3f}" if candidate.points else ""
            why = _reason(candidates, numel) if index == chosen else ""
            lines.append((*(bucket if index == 0 else ("", "")), str(candidate.compression), seconds, why))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"{a:<{w[0]}}  {b:>{w[1]}}  {c:<{w[2]}}  {d:>{w[3]}}  {e}" for w in [widths] for a, b, c, d, e in lines]
    return "\n".join([f"through: {transport}", *(line.rstrip() for line in text)])
