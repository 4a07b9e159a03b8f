"""Choosing a compression by measurement: candidates, their predicted times, the choice, and the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from .. import _C
from ..sync.compression import LOSSIER, Algorithm, Compression, Wire

TOLERANCE = 1.03
"""Times within this factor of the shortest count as equal, because repetitions differ by as much."""
SIZES = sorted({round(2 ** (step / 32)) for step in range(40 * 32 + 1)})
"""Numbers of gradient values. Between two sizes the choice for their middle holds. Beyond the last size its choice
holds. Sizes are close, so each choice stays within 5 % of the fastest. That assumes that a sync of eight times as many
values takes at most 13 times as long."""
WIRES: tuple[Wire, ...] = ("none", "fp16", "bf16", *LOSSIER)
"""The wires, from the one that loses least to the one that loses most."""
_BYTES: dict[Wire, float] = {"fp16": 2, "bf16": 2, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128}
"""Bytes of a value on the wire. 128 values of int8 or int4 have one scale of 4 bytes."""


UNTRIED = (
    "auto does not try two levels on GPUs: where several hosts have several GPUs each, compare "
    "Compression(..., ranks_per_node=...), which compresses between hosts only"
)


@dataclass(frozen=True)
class Candidate:
    """A compression, and the measured seconds of whole syncs with it."""

    compression: Compression
    points: tuple[tuple[int, float], ...] = ()
    """Pairs of a number of values and the seconds. The numbers rise, and the seconds do not fall. A single candidate
    needs none."""
    noise: tuple[tuple[int, float], ...] = ()
    """Pairs of a number of values and the relative uncertainty of its seconds, from the spread of repetitions."""

    def predict(self, numel: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Estimates the seconds of a sync of ``numel`` values, by linear interpolation between points."""
        return _between(self.points, numel)

    def uncertainty(self, numel: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Estimates the relative uncertainty of ``predict``; 0 if it is unknown."""
        return _between(self.noise, numel)


def _between(points: Sequence[tuple[int, float]], numel: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolates linearly between points; 0 without points."""
    values: NDArray[np.float64] = np.interp(numel, *np.transpose(points or [(1, 0.0)]))
    return values


@dataclass(frozen=True)
class GroupProfile:
    """Seconds that whole syncs take on a process group, by compression and size. Equal on all ranks."""

    candidates: tuple[Candidate, ...]
    """From the least lossy compression to the lossiest."""

    def choose(self, numel: int) -> Compression:
        """Picks the compression for a bucket of ``numel`` values: the least lossy of those that are as fast.

        A compression is as fast if it is within 3 % of the fastest, or within the noise of measuring if that is more.
        """
        return choose(self.candidates, numel).compression


def choose(candidates: Sequence[Candidate], numel: int) -> Candidate:
    """Returns the candidate that the engine takes for a bucket of ``numel`` values."""
    rows = choices(candidates)
    return next((candidate for most, candidate in rows if numel <= most), rows[-1][1])


def choices(candidates: Sequence[Candidate]) -> list[tuple[int, Candidate]]:
    """Returns pairs of a number of values, rising, and the candidate that is chosen up to that number.

    The first wire that is as fast as the fastest is chosen. So a lossier wire must gain more than ``TOLERANCE``, and
    more than the noise of measuring. Among the candidates of that wire, the first that is as fast is chosen.
    """
    middles = (np.array([1, *SIZES[:-1]]) + SIZES) // 2
    seconds = np.stack([candidate.predict(middles) for candidate in candidates])
    noise = np.stack([candidate.uncertainty(middles) for candidate in candidates])
    fastest, limit = seconds.min(axis=0), TOLERANCE * seconds.min(axis=0)
    fastest_noise = np.take_along_axis(noise, seconds.argmin(axis=0)[np.newaxis], axis=0)
    is_as_fast = seconds <= np.maximum(limit, (1 + np.hypot(noise, fastest_noise)) * fastest)
    wires = [candidate.compression.wire for candidate in candidates]
    has_wire = np.array([[wire == other for other in wires] for wire in wires])
    first = has_wire[is_as_fast.argmax(axis=0)].T  # [candidates, sizes]: whether a candidate has the first wire
    best = np.where(first, seconds, np.inf).min(axis=0)
    chosen = (first & (seconds <= np.maximum(limit, best))).argmax(axis=0)
    last_of_each = [*np.flatnonzero(np.diff(chosen)), len(SIZES) - 1]
    return [(SIZES[index], candidates[chosen[index]]) for index in last_of_each]


def in_engine(candidates: Sequence[Candidate]) -> _C.CompressionTable:
    """Converts the choices to the engine's table, in which it looks up each bucket."""
    rows = choices(candidates)
    words = [*(f"{each.compression} up to {numel} values" for numel, each in rows[:-1]), str(rows[-1][1].compression)]
    description = f"compression {' or '.join(words)}"  # ranks compare it
    return _C.CompressionTable([(numel, _in_engine(each.compression)) for numel, each in rows], description)


def _in_engine(each: Compression) -> _C.Compression:
    sums_in_float32 = each.reduce == "fp32"
    feeds_back, low_rank = bool(each.error_feedback), each.rank or 0
    return _C.Compression(each.wire, sums_in_float32, feeds_back, each.algorithm, each.ranks_per_node, low_rank)


def compressions(wires: Iterable[str], world_size: int) -> list[Compression]:
    """Returns the candidates of these wires, from least to most lossy, and the simplest algorithm of a wire first.

    Two ranks do not use two_shot: it sends as much as one_shot, in two steps, and rounds once more. With sums in
    float32, fp16 replaces bf16, which takes as long and loses more. Raises ValueError for other names.
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
    """Returns the bytes that each rank sends for each gradient value, which has ``itemsize`` bytes itself."""
    copies = world_size - 1 if compression.algorithm == "one_shot" else 2 * (world_size - 1) / world_size
    return copies * (itemsize if compression.wire == "none" else _BYTES[compression.wire])


def explain(candidates: Sequence[Candidate], numels: Sequence[int], transport: str) -> str:
    """Says which compression each bucket gets, and why. ``numels`` are their sizes in the order they are sent."""
    lines = [f"through: {transport}"]
    first = 0
    for numel, same in groupby(numels):
        last = first + len(list(same)) - 1
        buckets = f"bucket {first}" if first == last else f"buckets {first}-{last}"
        lines.append(f"{buckets}, {numel:,} values: {_explain(candidates, numel)}")
        first = last + 1
    return "\n".join(lines)


def _explain(candidates: Sequence[Candidate], numel: int) -> str:
    chosen = choose(candidates, numel)
    if len(candidates) == 1:
        return f"{chosen.compression}; given"
    if not chosen.points:  # one rank measures nothing
        return f"{chosen.compression}; nothing travels on one rank"
    fastest = min(candidates, key=lambda candidate: float(candidate.predict(numel)))
    reason = "the fastest"
    if chosen is not fastest:
        better = "loses less" if chosen.compression.wire != fastest.compression.wire else "is simpler"
        slower = float(chosen.predict(numel) / fastest.predict(numel)) - 1
        noisy = ", within the noise of measuring" if slower > TOLERANCE - 1 else ""
        reason = f"{slower:.1%} slower than {fastest.compression}{noisy}, but {better}"
    uncertainty = float(chosen.uncertainty(numel))
    spread = f" ± {uncertainty:.0%}" if uncertainty > 0 else ""
    return f"{chosen.compression}; {chosen.predict(numel) * 1e3:.3f} ms{spread} predicted; {reason}"
