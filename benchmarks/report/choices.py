"""Compares a choice by measurement with the best of what it could have chosen, measured in the same run."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.baselines import compressions
from benchmarks.baselines.ways import WAYS
from benchmarks.harness.records import Record
from benchmarks.harness.statistics import ratio_interval

PROMISED = 1.05
"""No choice is to take longer than the best fixed one by more."""


def against_the_best(rows: Sequence[Record]) -> Iterator[str]:
    """A line for each way that chooses, from rows of ways that took turns."""
    for row in rows:
        fixed = [other for other in rows if other.samples and could_choose(row.way, other.way)]
        if row.samples and fixed:
            best = min(fixed, key=lambda other: median(other.samples))
            ratio, low, high = ratio_interval(row.samples, best.samples)
            yield (
                f"{row.way}: {ratio:.3f} [{low:.3f}, {high:.3f}] × the best of {len(fixed)} it could have chosen, "
                f"{best.way}: {_verdict(ratio, low)}"
            )


def _verdict(ratio: float, low: float) -> str:
    if ratio <= PROMISED:
        return "as promised"
    return f"MORE than the promised {PROMISED:.2f}{', beyond noise' if low > PROMISED else ', within noise'}"


def could_choose(way: str, other: str) -> bool:
    """Tells whether ``way`` chooses by measurement, and ``other`` is a fixed way that it may choose."""
    # Parts of a step that are no ways to synchronise are not among them.
    chosen, fixed = (WAYS[name].compression if name in WAYS else None for name in (way, other))
    if chosen not in compressions.CHOSEN or fixed is None or fixed in compressions.CHOSEN:
        return False
    wire, options = compressions.split(fixed)
    allowed = wire != "int8" or (chosen == "auto:int8" and "ef" in options)
    return allowed and way.partition("/")[0] == other.partition("/")[0]
