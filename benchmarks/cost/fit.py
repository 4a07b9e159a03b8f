"""The cost model's parameters from what was measured, and how well they tell what they were not fitted on."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.cost.model import Algorithm, CostModel, Host, Link, Topology, local_bytes, ring, route_of, split_way
from benchmarks.harness.records import Record

FLOOR = 0.02
"""What no median is trusted beyond, as a part of it: a machine's state changes from row to row."""
TIE = 1.0
"""What it costs, in standard errors of one point, to take a step's latency for all waiting or for all work."""
NUM_FOLDS = 5
NEAR = 4.0
"""Messages within this factor of each other are taken to be off by about as much."""


@dataclass(frozen=True)
class Point:
    """One measured median: a way, a message, a number of ranks."""

    way: str
    numel: int
    num_ranks: int
    seconds: float
    """Of the step."""
    error: float = 0.0
    """Standard error of what synchronisation adds to it."""
    compute: float = 0.0
    """Seconds of the step without synchronisation, which are taken as given."""
    crowding: float = 1.0
    burst: float = 0.0
    """Bytes that the link, idle before, lets through at once. Next to a job's messages they are nothing."""
    oversubscribed: bool = False

    @property
    def sync(self) -> float:
        """Seconds that synchronisation adds."""
        return self.seconds - self.compute


@dataclass(frozen=True)
class HeldBack:
    """A point that the parameters were not fitted on, and what they say."""

    point: Point
    predicted: float
    """Seconds that synchronisation adds."""

    @property
    def error(self) -> float:
        """Of the sync alone, relative to what was measured, with its sign.

        The compute, which is given, would make it look smaller. inf where the noise was larger than what was measured.
        """
        return self.predicted / self.point.sync - 1 if self.point.sync > 0 else math.inf


@dataclass(frozen=True)
class Fit:
    model: CostModel
    points: Sequence[Point]
    """What it was fitted on."""
    held_back: Sequence[HeldBack]
    how: str
    """How they were held back."""

    @property
    def num_oversubscribed(self) -> int:
        """Points that it was fitted on of more ranks than cores."""
        return sum(point.oversubscribed for point in self.points)

    def errors(self, numel: float | None = None) -> list[float]:
        """Of the held-back points, without their signs: of all, or of those with about ``numel`` parameters.

        Those are within a factor of ``NEAR`` of ``numel``, or of the smallest or largest point if it is beyond these.
        """
        if numel is None:
            return [abs(held.error) for held in self.held_back]
        numels = [held.point.numel for held in self.held_back]
        wanted = min(max(numel, min(numels)), max(numels))
        near = [held for held in self.held_back if 1 / NEAR <= held.point.numel / wanted <= NEAR]
        return [abs(held.error) for held in near or self.held_back]


def link_of(record: Record) -> int | None:
    """The shaped rate in bit/s; None where the link is the machine's own."""
    return record.settings.get("link")


def points_of(records: Iterable[Record]) -> list[Point]:
    """The points among rows of ``sync``: correct, of more than one rank, and of ways that the model covers."""
    rows = [record for record in records if record.benchmark == "sync" and record.correct and record.samples]
    without_sync = {_case(row): row for row in rows if row.way == "no_sync"}
    points = []
    for row in rows:
        covered = split_way(row.way)
        if covered is None or row.settings["world_size"] < 2:
            continue
        is_bare, alone = covered[0] == "all_reduce", without_sync.get(_case(row))
        if alone is None and not is_bare:
            continue
        compute, its_error = (0.0, 0.0) if is_bare or alone is None else _median(alone)
        seconds, error = _median(row)
        points.append(
            Point(
                row.way,
                row.settings["numel"],
                row.settings["world_size"],
                seconds,
                math.hypot(error, its_error),
                compute,
                crowding(row),
                row.settings.get("link_burst", 0.0),
                oversubscribed=bool(row.settings.get("oversubscribed")) or crowding(row) > 1,
            )
        )
    return points


def crowding(record: Record) -> float:
    """Ranks per core, where there are more of them; 1 on GPUs. All ranks of ``sync`` are on one machine."""
    if record.environment.get("gpu"):
        return 1.0
    return max(1.0, record.settings["world_size"] / record.environment["cores"])


def fit(points: Sequence[Point], algorithm: Algorithm, hold_back: Sequence[int] = ()) -> Fit:
    """The parameters, and the error of points that were held back.

    Those are the points of the world sizes in ``hold_back``, which the parameters then never see. Without it the
    parameters are fitted on all points, and each point is predicted from parameters that did not see it: leaving out
    one world size after the other where there are three, one of five parts of the points otherwise.

    Raises:
        ValueError: there are too few points, or too few different ones, to tell the parameters apart.
    """
    unknown = set(hold_back) - {point.num_ranks for point in points}
    if unknown:
        sizes = ", ".join(map(str, sorted({point.num_ranks for point in points})))
        raise ValueError(f"hold_back={sorted(unknown)}: there are rows of {sizes} ranks only")
    if hold_back:
        seen = [point for point in points if point.num_ranks not in hold_back]
        model = fit_model(seen, algorithm)
        return _fit(model, seen, predict(model, [p for p in points if p.num_ranks in hold_back]), "never fitted on")
    world_sizes = sorted({point.num_ranks for point in points})
    by_size = len(world_sizes) > 2
    if by_size:
        parts = [[point for point in points if point.num_ranks == size] for size in world_sizes]
    else:
        parts = _folds(points)
    model = fit_model(points, algorithm)
    held_back = [
        held for part in parts for held in predict(fit_model([p for p in points if p not in part], algorithm), part)
    ]
    return _fit(model, points, held_back, "one world size at a time" if by_size else f"in {NUM_FOLDS} parts")


def _fit(model: CostModel, points: Sequence[Point], held_back: Sequence[HeldBack], how: str) -> Fit:
    if not held_back:
        raise ValueError(
            "hold_back: nothing left to check, as no way has rows both of the world sizes held back and of others; "
            "hold back others, or measure the same ways at all of them"
        )
    return Fit(model, points, held_back, how)


def _folds(points: Sequence[Point]) -> list[list[Point]]:
    """The points in ``NUM_FOLDS`` parts, the points of each way spread over them in random order."""
    folds: list[list[Point]] = [[] for _ in range(NUM_FOLDS)]
    generator = np.random.default_rng(0)
    for way in dict.fromkeys(point.way for point in points):
        of_way = [point for point in points if point.way == way]
        for turn, index in enumerate(generator.permutation(len(of_way))):
            folds[turn % NUM_FOLDS].append(of_way[index])
    return [fold for fold in folds if fold]


def predict(model: CostModel, points: Iterable[Point]) -> list[HeldBack]:
    """Predicts these points, as far as the model knows their ways."""
    return [
        HeldBack(point, model.sync_time(point.way, point.numel, point.num_ranks, point.crowding, point.burst))
        for point in points
        if point.way in model.hosts
    ]


def fit_model(points: Sequence[Point], algorithm: Algorithm) -> CostModel:
    """Least squares of the residuals by their standard errors: one link, and one host for each way, none negative.

    Medians that are far off, as they are on a machine that does other things as well, count less (soft_l1).

    Raises:
        ValueError: as ``fit``.
    """
    parameters = _Parameters(points, algorithm)
    errors = np.array([math.hypot(point.error, FLOOR * point.seconds) for point in points])
    seconds = np.array([point.seconds for point in points])
    # What does not depend on the parameters.
    routes = [route_of(point.way, point.num_ranks, algorithm) for point in points]
    local = [local_bytes(point.way, point.numel, point.num_ranks) for point in points]

    def residuals(values: np.ndarray) -> np.ndarray:
        model = parameters.model(values)
        link = model.topology.link
        times = [
            point.compute
            + link.time(route, _wire_bytes(point), point.crowding, point.burst)
            + model.hosts[point.way].time(nbytes, point.crowding)
            for point, route, nbytes in zip(points, routes, local, strict=True)
        ]
        undecided = TIE * (link.latency - link.work) / (link.latency + link.work) if parameters.has_work else 0.0
        return np.append((np.array(times) - seconds) / errors, undecided)

    # Where latency hides behind sending nothing changes with it, so from some starts it would stay there.
    starts = [parameters.start_with_latency(factor) for factor in (0.1, 0.3, 1.0, 3.0)]
    found = [
        least_squares(residuals, start, bounds=(0, np.inf), x_scale=start, loss="soft_l1", xtol=1e-10, ftol=1e-10)
        for start in starts
    ]
    return parameters.model(min(found, key=lambda result: result.cost).x)


def _wire_bytes(point: Point) -> float:
    covered = split_way(point.way)
    assert covered is not None
    return point.numel * covered[1]


class _Parameters:
    """The unknowns in one vector: seconds a byte, a step, a call, and so on; those that the points can tell apart.

    Raises:
        ValueError: the points cannot tell them apart.
    """

    def __init__(self, points: Sequence[Point], algorithm: Algorithm) -> None:
        self._algorithm: Algorithm = algorithm
        self._ways = list(dict.fromkeys(point.way for point in points))
        # Work and latency are told apart by how crowded a machine is: by three levels of it, as a call's own time grows
        # with it too. Where there are two, both count alike.
        self.has_work = len({point.crowding for point in points}) > 1
        if len({point.num_ranks for point in points}) < 2:
            raise ValueError("rows of two world sizes above 1 are needed at least, to tell the link from the host")
        for way in self._ways:
            if len({point.numel for point in points if point.way == way}) < 2:
                raise ValueError(f"rows of {way} with two sizes are needed at least, to tell latency from bandwidth")
        smallest, largest = (choose(points, key=lambda point: point.numel) for choose in (min, max))
        steps = ring(smallest.num_ranks).steps
        sent = ring(largest.num_ranks).volume * _wire_bytes(largest)
        per_step = (smallest.seconds - smallest.compute) / steps
        per_call, per_local_byte = 0.1 * per_step * steps, 0.01 * largest.seconds / (16 * largest.numel)
        link = [largest.seconds / sent, per_step, *([per_step] if self.has_work else [])]
        self.start = np.maximum([*link, *([per_call, per_local_byte] * len(self._ways))], 1e-12)
        if len(points) <= len(self.start):
            raise ValueError(f"{len(points)} points are too few for {len(self.start)} parameters: measure more sizes")

    def start_with_latency(self, factor: float) -> np.ndarray:
        """The start, with this multiple of its latency."""
        start = self.start.copy()
        start[1 : 3 if self.has_work else 2] *= factor
        return start

    def model(self, values: np.ndarray) -> CostModel:
        per_byte, latency, *rest = values.tolist()
        work = rest.pop(0) if self.has_work else 0.0
        hosts = {
            way: Host(overhead, 1 / per_local_byte if per_local_byte > 0 else math.inf)
            for way, overhead, per_local_byte in zip(self._ways, rest[::2], rest[1::2], strict=True)
        }
        link = Link(latency, 1 / per_byte if per_byte > 0 else math.inf, work)
        return CostModel(Topology(self._algorithm, link), hosts)


def _case(record: Record) -> tuple[Any, ...]:
    """Identifies rows of ways that took turns; the time tells them from those of another run of the same."""
    settings: Mapping[str, Any] = record.settings
    return (*(settings.get(name) for name in ("link", "size", "world_size", "backend")), record.environment.get("time"))


def _median(record: Record) -> tuple[float, float]:
    """Returns the median with its standard error.

    Of normally distributed samples: √(π/2) σ / √N, with σ from the tenth and ninetieth percentile, 2.563 σ apart.
    """
    spread = (record.quantiles["p90"] - record.quantiles["p10"]) / 2.563
    return record.quantiles["median"], math.sqrt(math.pi / 2) * spread / math.sqrt(len(record.samples))
