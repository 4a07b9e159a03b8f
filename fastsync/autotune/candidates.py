"""Choosing by measurement: what candidates are predicted to take, the rule that picks one, a table that says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, get_args

from fastsync import _C
from fastsync.compression import LOSSIER, Algorithm, Compression, Wire

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1.03
"""The engine takes times within this factor of the least for as good as it: repetitions differ by as much."""
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
        """Estimates the seconds that a sync of ``numel`` values takes: linear between the points.

        Above them, on the line through the last two points; below, as long as the first one.
        """
        return _C.predict(self.in_engine(), numel)

    def in_engine(self) -> _C.Candidate:
        """The same in the engine's own type."""
        compression = _C.Compression(
            self.compression.wire,
            sums_in_float32=self.compression.reduce == "fp32",
            error_feedback=self.compression.error_feedback,
            is_stochastic=self.compression.rounding == "stochastic",
            algorithm=self.compression.algorithm,
            ranks_per_node=self.compression.ranks_per_node or 1,
        )
        return _C.Candidate(compression, list(self.points))


def engine_schedule(phases: Sequence[tuple[int, Sequence[Candidate]]]) -> _C.CandidateSchedule:
    """Tells the engine the candidates from each first step on. Of several it takes one a bucket, as ``choose`` does."""
    in_engine = [(step, [candidate.in_engine() for candidate in candidates]) for step, candidates in phases]
    return _C.CandidateSchedule(in_engine)


def choose(candidates: Sequence[Candidate], numel: int) -> int:
    """Picks the candidate that a bucket of ``numel`` values travels with: the first that is as good as the fastest.

    Candidates come from the one that loses least to the one that loses most (``compressions``), so a lossier one has to
    earn its place.
    """
    return _C.choose([candidate.in_engine() for candidate in candidates], numel)


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
    """Says in a few words why ``choose`` picks what it picks."""
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

    def cells(self) -> list[tuple[str, ...]]:
        """Lays out what is printed, a header first."""
        cells: list[tuple[str, ...]] = [("buckets", "values", "candidate", "predicted ms", "chosen")]
        before = None
        for row in self.rows:
            begins, before = row.buckets != before, row.buckets
            first = (row.buckets, f"{row.numel:,}") if begins else ("", "")
            seconds = "" if row.seconds is None else f"{row.seconds * 1e3:.3f}"
            cells.append((*first, str(row.compression), seconds, row.reason))
        return cells

    def __repr__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
                for cell, width, heading in zip(line, widths, cells[0], strict=True)
            ).rstrip()
            for line in cells
        ]
        return "\n".join([f"through: {self.transport}", *lines])

    def __rich__(self) -> Table:
        from rich.table import Table

        header, *lines = self.cells()
        table = Table(title=f"through: {self.transport}", title_justify="left")
        for heading in header:
            table.add_column(heading, justify="right" if heading in _RIGHT else "left")
        for line in lines:
            table.add_row(*line, style="bold" if line[-1] else "dim")
        return table


_RIGHT = ("values", "predicted ms")


def explain(candidates: Sequence[Candidate], numels: Sequence[int], transport: str) -> Explanation:
    """Tells what each bucket travels with and why, given their numbers of values in the order they are sent."""
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
