"""From the rows of launches to how well a job scales, and where the time of a step goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.baselines.ways import SYNCHRONISED
from benchmarks.harness.records import Record
from benchmarks.harness.statistics import (
    CONFIDENCE,
    RATIO_HOLDS,
    SURE_FROM,
    median_interval,
    ratio_interval,
    replicates,
)
from benchmarks.report.table import OVERSUBSCRIBED

PARTS = ("compute", "contention", "stragglers", "exposed")
DEFINITIONS = {
    "step": "Time of a training step (forward, backward, synchronisation, optimizer) from a barrier until the slowest "
    "rank is done: the median over a launch's steps, and of that the median over the launches.",
    "weak efficiency": "E(n) = T(m) / T(n): the step's time on the smallest world size m, by the way that is fastest "
    "there, over that on n ranks, each rank with as many samples as before. 100 % is a job that more ranks do not slow "
    "down. All ways have that one baseline: against its own, a way would gain by being slow on m ranks.",
    "strong efficiency": "E(n) = m · T(m) / (n · T(n)), with the same baseline T(m): all ranks together have as many "
    "samples as before. 100 % is a job that n / m times the ranks finish in m / n of the time.",
    "interval": "Between which values the truth lies, judged by how launches differ, or steps where there was one "
    f"launch. Of a step and of busbw: {CONFIDENCE:.0%} or more, by order statistics; fewer than {SURE_FROM} launches "
    "cannot hold that, and of n the interval is the whole range, which holds the median with a probability of "
    f"1 - 2^(1-n). Of an efficiency: {CONFIDENCE:.0%} by the percentile bootstrap; in simulations it held the true "
    f"ratio in {', '.join(f'{held:.0%} of cases for {number}' for number, held in RATIO_HOLDS.items())} launches.",
    "compute": "A step without communication, mean over the ranks, measured in the same launches in turns with the "
    "others; where world size 1 was measured, what that is there (divided by n in strong scaling).",
    "contention": "What compute takes beyond that: cores, caches, memory bandwidth and clocks that ranks of a machine "
    "share; in strong scaling also what a smaller batch computes less efficiently. Not known without world size 1, and "
    "then part of compute.",
    "stragglers": "What the slowest rank's step without communication takes beyond the mean over the ranks, as in each "
    "step all wait for the slowest.",
    "exposed": "Communication that backward does not hide, and what synchronising costs the rank itself: the rest of "
    "the step, so that the parts add up to it. Negative where the noise is larger than it, of which tables say so.",
    "algbw": "Bytes that an all_reduce sums, by its time.",
    "busbw": "algbw · 2 (n - 1) / n, as nccl-tests defines it: the rate at which each rank's link is used.",
    "overhead": "What measuring itself costs: an empty step, timed in turns with the others in the same way.",
    "oversubscribed": "More ranks than a machine has cores or GPUs: they share them, so the figures say nothing about "
    "more hardware.",
}


@dataclass(frozen=True)
class AtWorldSize:
    """A result of some ranks."""

    world_size: int
    oversubscribed: bool

    @property
    def ranks(self) -> str:
        """The world size in words, marked where ranks share cores or GPUs."""
        shared = f" ({OVERSUBSCRIBED})" if self.oversubscribed else ""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}{shared}"


@dataclass(frozen=True)
class Point(AtWorldSize):
    """One way at one world size. Times in seconds."""

    way: str
    launches: int
    samples: tuple[float, ...]
    """What is independent of each other: the launches' medians, or the steps of the only launch."""
    step: float
    step_low: float
    step_high: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    compute: float
    contention: float | None
    """None where world size 1 was not measured."""
    stragglers: float
    exposed: float

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a step that are known."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}


def points(records: Sequence[Record]) -> list[Point]:
    """A point for each way and world size that was measured, the ways in the order of the rows.

    Raises:
        ValueError: the rows are of several jobs, of which none can be held against another.
    """
    rows = _right(records)
    jobs = dict.fromkeys(_job(record) for record in rows if "model" in record.settings)
    if len(jobs) > 1:
        raise ValueError(f"the rows are of several jobs, {'; '.join(jobs)}: choose files of one job")
    groups: dict[str, dict[int, list[Record]]] = {}
    for record in rows:
        if record.way in SYNCHRONISED:
            groups.setdefault(record.way, {}).setdefault(record.settings["world_size"], []).append(record)
    of_size = [(size, rows) for sizes in groups.values() for size, rows in sizes.items()]
    _, base = min(of_size, key=lambda group: (group[0], median(_replicates(group[1]))), default=(0, []))
    return [_point(base, sizes.get(1), sizes[size]) for sizes in groups.values() for size in sorted(sizes)]


def _right(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.benchmark == "scaling" and record.samples and record.correct]


def baseline(found: Sequence[Point]) -> Point:
    """The point that all efficiencies are relative to: the fastest way on the smallest world size."""
    return min(found, key=lambda point: (point.world_size, point.step))


def _job(record: Record) -> str:
    """Names what is the same at all world sizes of a job."""
    settings = record.settings
    strong = settings["scaling"] == "strong"
    batch_size = settings["batch_size"] * (settings["world_size"] if strong else 1)
    model = " ".join(str(settings[name]) for name in ("model", "scale") if name in settings)
    return (
        f"{settings['scaling']} scaling of {model} with {settings['numel']:,} parameters and {batch_size} samples "
        f"{'in all' if strong else 'a rank'} over {settings['backend']}"
    )


def _point(base: Sequence[Record], alone: Sequence[Record] | None, rows: Sequence[Record]) -> Point:
    settings, samples = rows[0].settings, _replicates(rows)
    share = settings["world_size"] / base[0].settings["world_size"] if settings["scaling"] == "strong" else 1.0
    ratio = [value / share for value in ratio_interval(_replicates(base), samples)]
    if rows[0] is base[0]:
        ratio = [1.0, 1.0, 1.0]  # by definition
    step, (low, high) = median(samples), median_interval(samples)
    compute = median(row.figures["compute"] for row in rows)  # type: ignore[type-var]
    stragglers = median(row.figures["stragglers"] for row in rows)  # type: ignore[type-var]
    contention = None
    if alone is not None:
        fair = median(row.figures["compute"] for row in alone) / share  # type: ignore[type-var]
        compute, contention = fair, compute - fair
    return Point(
        settings["world_size"],
        any(row.settings.get("oversubscribed") for row in rows),
        rows[0].way,
        len(rows),
        tuple(samples),
        step,
        low,
        high,
        *ratio,
        compute=compute,
        contention=contention,
        stragglers=stragglers,
        exposed=step - compute - (contention or 0.0) - stragglers,
    )


def _replicates(rows: Sequence[Record]) -> list[float]:
    return replicates([row.samples for row in rows])


@dataclass(frozen=True)
class Bandwidth(AtWorldSize):
    """The bare all_reduce of one size at one world size. Bytes, bytes per second."""

    num_bytes: int
    seconds: float
    algbw: float
    busbw: float
    busbw_low: float
    busbw_high: float


def sweep(records: Sequence[Record]) -> list[Bandwidth]:
    """A point for each world size and number of bytes, in ascending order."""
    of_point: dict[tuple[int, int], list[Record]] = {}
    for record in _right(records):
        if "size" in record.settings:
            of_point.setdefault((record.settings["world_size"], record.settings["size"]), []).append(record)
    return [_bandwidth(of_point[key]) for key in sorted(of_point)]


def _bandwidth(rows: Sequence[Record]) -> Bandwidth:
    settings, samples = rows[0].settings, _replicates(rows)
    seconds, (low, high) = median(samples), median_interval(samples)
    num_bytes = settings["numel"] * 4
    share = 2 * (settings["world_size"] - 1) / settings["world_size"]
    return Bandwidth(
        settings["world_size"],
        any(row.settings.get("oversubscribed") for row in rows),
        num_bytes,
        seconds,
        num_bytes / seconds,
        num_bytes / seconds * share,
        num_bytes / high * share,
        num_bytes / low * share if math.isfinite(low) else math.inf,
    )


def overhead(records: Sequence[Record]) -> float | None:
    """Seconds that an empty step takes, median over all launches; None where none was measured."""
    costs = [record.figures["overhead"] for record in records if record.figures.get("overhead") is not None]
    return median(costs) if costs else None  # type: ignore[type-var]
