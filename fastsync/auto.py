"""Choosing by measurement: what candidates are predicted to take, the rule that picks one, a table that says why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, get_args

from .compression import LOSSIER, Algorithm, Compression, Wire

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1.03
"""Times within this factor of the least are taken for as good as it: repetitions differ by as much."""
WIRES: tuple[Wire, ...] = ("none", "fp16", "bf16", *LOSSIER)
"""From the one that loses least to the one that loses most."""
_BYTES: dict[Wire, float] = {"fp16": 2, "bf16": 2, "int8": 1 + 4 / 128}
"""Of a value. 128 of int8 share a scale of 4 bytes."""


@dataclass(frozen=True)
class Candidate:
    """A compression, and what whole syncs with it take, as measured.

    Raises:
        ValueError: the points are not as they should be.
    """

    compression: Compression
    points: tuple[tuple[int, float], ...] = ()
    """(gradient values, seconds), the first rising, the second not falling. A candidate without rivals needs none. The
    last of several may be what follows from the others."""

    def __post_init__(self) -> None:
        if any(numel < 1 or not seconds >= 0 for numel, seconds in self.points) or not all(
            numel < more and seconds <= longer for (numel, seconds), (more, longer) in pairwise(self.points)
        ):
            raise ValueError(
                f"points: expected (values, seconds) with rising values and seconds that do not fall, got {self.points}"
            )

    def predict(self, numel: int) -> float:
        """Seconds that a sync of ``numel`` values takes: linear between the points.

        Above them, on the line through the last two points; below, as long as the first one.
        """
        points = self.points
        if len(points) < 2 or numel <= points[0][0]:
            return points[0][1] if points else 0.0
        right = bisect_left(points, numel, lo=1, hi=len(points) - 1, key=lambda point: point[0])
        (less, seconds), (more, longer) = points[right - 1], points[right]
        return seconds + (longer - seconds) * (numel - less) / (more - less)


def choose(candidates: Sequence[Candidate], numel: int) -> int:
    """Which candidate a bucket of ``numel`` values travels with: the first that is as good as the fastest.

    Candidates come from the one that loses least to the one that loses most (``compressions``), so a lossier one has to
    earn its place. ``_C.choose`` is the same rule.
    """
    seconds = [candidate.predict(numel) for candidate in candidates]
    bound = TOLERANCE * min(seconds)
    return next(index for index, value in enumerate(seconds) if value <= bound)


def compressions(wires: Iterable[str], world_size: int) -> list[Compression]:
    """The candidates of these wires: from least to most lossy, and of one wire from the simplest algorithm on.

    Between two ranks two_shot is none: it sends as much as one_shot, in two steps, and rounds once more. Nor is bf16
    beside fp16 where ranks add in float32: it takes as long, and loses more.

    Raises:
        ValueError: a wire is none, or none is named.
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


def reason(candidates: Sequence[Candidate], numel: int) -> str:
    """Why ``choose`` picks what it picks, in a few words."""
    if len(candidates) == 1:
        return "given"
    chosen = candidates[choose(candidates, numel)]
    by_time = sorted(candidates, key=lambda candidate: candidate.predict(numel))
    fastest = by_time[0]
    if chosen is not fastest:
        better = "loses less" if chosen.compression.wire != fastest.compression.wire else "simpler"
        return f"as fast as {fastest.compression} within {TOLERANCE - 1:.0%}, and {better}"
    if fastest.predict(numel) == 0.0:
        return "fastest"
    return (
        f"fastest; {by_time[1].compression} takes {by_time[1].predict(numel) / fastest.predict(numel):.2f} times that"
    )


@dataclass(frozen=True)
class Row:
    """One candidate for one bucket, or for several of one size that follow each other."""

    buckets: str
    numel: int
    compression: Compression
    seconds: float | None
    """Predicted. None where nothing was measured, as nothing had to be chosen."""
    reason: str
    """Why it was chosen; empty if it was not."""


class Explanation:
    """A table of buckets, candidates, and why one was chosen: to be printed. ``rich.print`` makes it prettier."""

    def __init__(self, rows: Sequence[Row], transport: str) -> None:
        self.rows = tuple(rows)
        self.transport = transport
        """See ``SyncStats``."""

    def cells(self) -> list[tuple[str, str, str, str, str]]:
        """What is printed, a header first."""
        cells = [("buckets", "values", "candidate", "predicted ms", "chosen")]
        before = None
        for row in self.rows:
            again, before = row.buckets == before, row.buckets
            seconds = "" if row.seconds is None else f"{row.seconds * 1e3:.3f}"
            cells.append(
                (
                    "" if again else row.buckets,
                    "" if again else f"{row.numel:,}",
                    str(row.compression),
                    seconds,
                    row.reason,
                )
            )
        return cells

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return f"through: {self.transport}\n" + "\n".join(
            "  ".join(
                cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
                for cell, width, heading in zip(line, widths, cells[0], strict=True)
            ).rstrip()
            for line in cells
        )

    __repr__ = __str__

    def __rich__(self) -> Table:
        from rich.table import Table

        header, *lines = self.cells()
        table = Table(title=f"through: {self.transport}", title_justify="left")
        for heading in header:
            table.add_column(heading, justify="right" if heading in _RIGHT else "left")
        for line in lines:
            table.add_row(*line, style="bold" if line[-1] else "dim", end_section=False)
        return table


_RIGHT = ("values", "predicted ms")


def explain(candidates: Sequence[Candidate], numels: Sequence[int], transport: str) -> Explanation:
    """What each bucket travels with and why, given how many values the buckets have, in the order they are sent."""
    rows: list[Row] = []
    for numel, same in groupby(enumerate(numels), key=lambda item: item[1]):
        indices = [index for index, _ in same]
        buckets = str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        chosen = choose(candidates, numel)
        for index, candidate in enumerate(candidates):
            seconds = candidate.predict(numel) if candidate.points else None
            why = reason(candidates, numel) if index == chosen else ""
            rows.append(Row(buckets, numel, candidate.compression, seconds, why))
    return Explanation(rows, transport)
