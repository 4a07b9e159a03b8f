"""``python -m benchmarks predict``: how well a job would scale, by a model of two link parameters fitted on rows.

Note [The α-β model]
    A sync of N values over n ranks takes

        T = steps(n) · α + volume(n) · bytes · β + N · γ + δ

    α is a message's latency and β the seconds a byte of the link, the same for all ways. γ and δ are what one way costs
    the host, a value and a call. Steps and volume follow from who adds (``ROUTES``). This is Hockney's model of a
    message (R. Hockney, The communication challenge for MPP, 1994), as R. Thakur et al. use it (Optimization of
    collective communication operations in MPICH, 2005). T is linear in the four, so non-negative least squares of the
    relative errors find them. How far the model can be trusted is measured: each world size, or message size where
    there are two world sizes only, is left out of a fit and predicted by it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
import tyro

from benchmarks.baselines import compressions
from benchmarks.baselines.compressions import WIRE_BYTES
from benchmarks.harness.options import check_json, check_positive
from benchmarks.harness.records import Record, RowFile, environment, read_json
from benchmarks.report.table import OVERSUBSCRIBED, Columns, console, milliseconds, table
from benchmarks.units import format_rate, format_seconds, parse_rate, parse_seconds

ROUTES: Mapping[str, Callable[[int], tuple[float, float]]] = {
    # From the number of ranks: messages that follow each other, and what a rank sends as a multiple of the bytes.
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),  # a ring: Gloo's, and NCCL's for large messages
    "one_shot": lambda n: (1, n - 1),
    "two_shot": lambda n: (2, 2 * (n - 1) / n),
}
MODELS = {
    # Parameters, and floating-point operations of one training step: three times those of the forward pass.
    "ppo-mlp": (9_155, 3 * 256 * 2 * 9_155),  # fastsync's policy for CartPole-v1, minibatch of 256
    "atari-cnn": (1_687_719, 3 * 256 * 18.7e6),  # the Nature CNN with 6 actions, minibatch of 256
    "resnet50": (25_557_032, 3 * 64 * 8.2e9),  # 64 images of 224 × 224
    "gpt2-small": (124_439_808, 6 * 8 * 1024 * 124_439_808),  # 8 sequences of 1,024 tokens
}
BACKWARD_SHARE = 2 / 3
"""Of a step's compute: backward computes two gradients where forward computes one product."""
NEAR = 4.0
"""Messages within this factor of each other are taken to be off by about as much."""
if TYPE_CHECKING:
    ModelName = str
    Compression = str
else:
    ModelName = tyro.extras.literal_type_from_choices(MODELS)
    Compression = tyro.extras.literal_type_from_choices(WIRE_BYTES)


@dataclass(frozen=True)
class Options:
    """Predict weak-scaling efficiency from measured rows, with the error that the prediction of measured rows has."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """JSON files that sync or link wrote with --json: several message sizes at two world sizes or more."""
    model: ModelName = "resnet50"
    """What is trained: its parameters, and a step's floating-point operations."""
    numel: int | None = None
    """Number of parameters, in place of the model's."""
    compute_time: str | None = None
    """Of one step without communication, such as 15ms; by default the model's operations by --flops."""
    flops: float = 1e14
    """Floating-point operations per second that a rank reaches: 1e14 is a third of an A100's peak in bfloat16."""
    world_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of ranks to predict."""
    compression: tuple[Compression, ...] = ("none", "fp16", "bf16")
    """What is compared."""
    entry_point: Literal["attach", "register_comm_hook"] = "attach"
    """Whose rows to take."""
    bandwidth: tuple[str, ...] = ()
    """Of the link, such as 1gbit 25gbit, in place of the fitted one: compression pays where its row is ahead."""
    link: str | None = None
    """Rows over which shaped link to take, such as 100mbit, where the files have several."""
    bucket_mb: float = 25.0
    """MiB of gradients that travel together; as many buckets overlap with backward."""
    json: Path | None = None
    """File to write the predictions to."""

    def __post_init__(self) -> None:
        for path in self.rows:
            if not path.is_file():
                raise ValueError(f"rows: there is no file {path}")
        if not self.rows or not self.compression or not self.world_sizes:
            raise ValueError("rows, compression and world_sizes: choose at least one of each")
        check_positive(self, "flops", "bucket_mb", "numel", unit="")
        if min(self.world_sizes) < 2:
            raise ValueError(f"world_sizes: {min(self.world_sizes)} must be 2 or more; one rank sends nothing")
        for rate in (*self.bandwidth, *([self.link] if self.link else [])):
            parse_rate(rate)
        if self.compute_time is not None:
            parse_seconds(self.compute_time)
        check_json(self.json)

    @property
    def ways(self) -> list[str]:
        """What is compared, as rows name it."""
        return [f"fastsync.{self.entry_point}/{compression}" for compression in self.compression]

    @property
    def job(self) -> "Job":
        numel, operations = MODELS[self.model]
        numel = self.numel or numel
        compute = parse_seconds(self.compute_time) if self.compute_time else operations / self.flops
        return Job(numel, compute, math.ceil(4 * numel / (self.bucket_mb * 2**20)))


@dataclass(frozen=True)
class Job:
    """One training step of one rank: float32 gradients, seconds without communication, equal buckets."""

    numel: int
    compute: float
    num_buckets: int


@dataclass(frozen=True)
class Point:
    """What synchronisation adds to a step, in seconds: a measured median."""

    way: str
    numel: int
    num_ranks: int
    seconds: float
    burst: float = 0.0
    """Bytes that the link, idle before, lets through at once."""
    oversubscribed: bool = False


def demands(way: str, numel: float, num_ranks: int, burst: float = 0.0) -> tuple[float, float]:
    """Messages of a sync that follow each other, and the bytes that a rank sends beyond a burst."""
    compression = way.partition("/")[2]
    steps, volume = ROUTES[compressions.algorithm(compression, num_ranks)](num_ranks)
    nbytes = numel * WIRE_BYTES[compressions.split(compression)[0]]
    return steps, max(0.0, volume * nbytes - burst)


@dataclass(frozen=True)
class CostModel:
    """See Note [The α-β model]. Seconds."""

    latency: float
    per_byte: float
    hosts: Mapping[str, tuple[float, float]]
    """By way: seconds a value, and a call."""

    def link_time(
        self, way: str, numel: float, num_ranks: int, per_byte: float | None = None, burst: float = 0.0
    ) -> float:
        """Seconds on the link; ``per_byte`` may be another link's."""
        steps, nbytes = demands(way, numel, num_ranks, burst)
        return steps * self.latency + nbytes * (self.per_byte if per_byte is None else per_byte)

    def host_time(self, way: str, numel: float) -> float:
        per_value, per_call = self.hosts[way]
        return per_value * numel + per_call

    def sync_time(self, way: str, numel: float, num_ranks: int, burst: float = 0.0) -> float:
        """Seconds of one sync on its own."""
        return self.link_time(way, numel, num_ranks, burst=burst) + self.host_time(way, numel)

    def exposed_time(
        self, way: str, job: Job, num_ranks: int, per_byte: float | None = None, slower: float = 1
    ) -> float:
        """Seconds that synchronisation adds to a step, if each sync takes ``slower`` times what the model says.

        Equal buckets get ready at equal distances during backward and travel one after the other. The first one's
        compute and the last one's communication hide nothing, and the host's work never hides.
        """
        in_bucket = job.numel / job.num_buckets
        link = slower * self.link_time(way, in_bucket, num_ranks, per_byte)
        hidden = job.compute * BACKWARD_SHARE * (1 - 1 / job.num_buckets)
        host = job.num_buckets * slower * self.host_time(way, in_bucket)
        return max(link, job.num_buckets * link - hidden) + host


@dataclass(frozen=True)
class LeftOut:
    """A point that a fit had not seen, and what that fit says of it."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted / self.point.seconds - 1)


def main(arguments: Sequence[str]) -> int:
    """Fits, predicts and reports.

    Returns:
        The exit status: 0, or 2 if the rows do not allow a fit.
    """
    options = tyro.cli(Options, prog="python -m benchmarks predict", args=arguments)
    try:
        points = read_points(options)
        model, left_out = fit(points), leave_out(points)
    except ValueError as error:
        print(f"python -m benchmarks predict: {error}", file=sys.stderr)
        return 2
    predictions = list(predict(options, model, points, left_out))
    if options.json is not None:
        RowFile(options.json).add(predictions)
    report(options, model, points, left_out, predictions)
    return 0


def read_points(options: Options) -> list[Point]:
    """The points in the files, of the ways that are compared.

    Raises:
        ValueError: the rows are of several links or backends, or there are none of a way.
    """
    rows = [row for path in options.rows for row in read_json(path) if row.benchmark == "sync"]
    if options.link is not None:
        rows = [row for row in rows if row.settings.get("link") == parse_rate(options.link)]
    for name, remedy in (("link", "choose one with --link"), ("backend", "name files of one only")):
        if len(found := sorted({str(row.settings.get(name, "unshaped")) for row in rows})) > 1:
            raise ValueError(f"the rows are of several {name}s, {', '.join(found)}: {remedy}")
    alone = {_case(row): row.quantiles["median"] for row in rows if row.way == "no_sync" and row.samples}
    points = []
    for row in rows:
        if row.way in options.ways and row.correct and row.settings["world_size"] > 1 and _case(row) in alone:
            added = row.quantiles["median"] - alone[_case(row)]
            if added > 0:  # else it is less than the noise, and has no relative error
                size, crowded = row.settings["numel"], bool(row.settings.get(OVERSUBSCRIBED))
                burst = row.settings.get("link_burst", 0.0)
                points.append(Point(row.way, size, row.settings["world_size"], added, burst, crowded))
    if missing := set(options.ways) - {point.way for point in points}:
        raise ValueError(f"there are no rows of {', '.join(sorted(missing))}: measure it, or change --compression")
    return points


def _case(row: Record) -> tuple[object, ...]:
    """Rows that took turns with each other have the same."""
    names = ("link", "size", "world_size", "backend")
    return (*(row.settings.get(name) for name in names), row.environment.get("time"))


def fit(points: Sequence[Point]) -> CostModel:
    """Non-negative least squares of the relative errors.

    Raises:
        ValueError: the points cannot tell the link from the host, or latency from bandwidth.
    """
    from scipy.optimize import nnls

    ways = list(dict.fromkeys(point.way for point in points))
    if len({point.num_ranks for point in points}) < 2:
        raise ValueError("rows of two world sizes above 1 are needed at least, to tell the link from the host")
    for way in ways:
        if len({point.numel for point in points if point.way == way}) < 2:
            raise ValueError(f"rows of {way} with two sizes are needed at least, to tell latency from bandwidth")
    rows = []
    for point in points:
        host = [value if way == point.way else 0.0 for way in ways for value in (point.numel, 1.0)]
        rows.append([*demands(point.way, point.numel, point.num_ranks, point.burst), *host])
    relative = np.array(rows) / np.array([point.seconds for point in points])[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)  # columns of one magnitude
    found = nnls(relative / scale, np.ones(len(points)))[0] / scale
    return CostModel(found[0], found[1], {way: (found[2 + 2 * i], found[3 + 2 * i]) for i, way in enumerate(ways)})


def leave_out(points: Sequence[Point]) -> list[LeftOut]:
    """Predicts each world size, or with two of them each message size, from a fit on the others."""
    by_ranks = len({point.num_ranks for point in points}) > 2
    key: Callable[[Point], int] = (lambda point: point.num_ranks) if by_ranks else (lambda point: point.numel)
    left_out = []
    for part in sorted({key(point) for point in points}):
        try:
            model = fit([point for point in points if key(point) != part])
        except ValueError:
            continue  # what is left does not allow a fit
        unseen = [point for point in points if key(point) == part and point.way in model.hosts]
        left_out += [LeftOut(p, model.sync_time(p.way, p.numel, p.num_ranks, p.burst)) for p in unseen]
    if not left_out:
        raise ValueError("the rows allow no fit without some of them: measure three world sizes, or three sizes")
    return left_out


def errors_near(left_out: Sequence[LeftOut], numel: float) -> list[float]:
    """Of points with about as many values, or of those nearest to that where it is beyond them."""
    numels = [left.point.numel for left in left_out]
    wanted = min(max(numel, min(numels)), max(numels))
    near = [left.error for left in left_out if 1 / NEAR <= left.point.numel / wanted <= NEAR]
    return near or [left.error for left in left_out]


def predict(
    options: Options, model: CostModel, points: Sequence[Point], left_out: Sequence[LeftOut]
) -> Iterator[Record]:
    """A row for each bandwidth, way and number of ranks. low and high: every sync off by the worst error near it."""
    job, where = options.job, environment(torch.device("cpu"))
    in_bucket = job.numel / job.num_buckets
    worst = max(errors_near(left_out, in_bucket))
    factors = (1.0, 1 / (1 + worst), 1 / max(1 - worst, 1e-9))
    ranks, numels = {point.num_ranks for point in points}, {point.numel for point in points}
    for rate in options.bandwidth or [None]:
        per_byte = None if rate is None else 8 / parse_rate(rate)
        for way in options.ways:
            for num_ranks in sorted(set(options.world_sizes)):
                exposed = [model.exposed_time(way, job, num_ranks, per_byte, slower) for slower in factors]
                efficiency, high, low = (job.compute / (job.compute + seconds) for seconds in exposed)
                measured = num_ranks <= max(ranks) and min(numels) <= in_bucket <= max(numels) and rate is None
                settings = {"world_size": num_ranks, "bandwidth": rate, "extrapolated": not measured}
                figures = {"exposed_time": exposed[0], "efficiency": efficiency, "low": low, "high": high}
                yield Record("predict", way, settings, figures, correct=True, samples=[], environment=where)


COLUMNS: Columns = {
    "way": lambda row: row.way,
    "link": lambda row: row.settings["bandwidth"] or "as fitted",
    "ranks": lambda row: f"{row.settings['world_size']}{'*' if row.settings['extrapolated'] else ''}",
    "exposed, ms": lambda row: milliseconds(row.figures["exposed_time"]),
    "efficiency": lambda row: f"{row.figures['efficiency']:.1%}",
    "with the worst error": lambda row: f"[{row.figures['low']:.1%}, {row.figures['high']:.1%}]",
}


def report(
    options: Options, model: CostModel, points: Sequence[Point], left_out: Sequence[LeftOut], rows: Sequence[Record]
) -> None:
    """Prints the parameters, how far they can be trusted, the predictions and what is assumed."""
    out, job = console(), options.job
    rate = "no measurable cost a byte" if model.per_byte == 0 else format_rate(8 / model.per_byte)
    crowded = ", some of more ranks than cores (OVERSUBSCRIBED)" if any(p.oversubscribed for p in points) else ""
    out.print(f"Link: {format_seconds(model.latency)} a message, {rate}; fitted on {len(points)} rows{crowded}.")
    out.print("How far to trust it: the error of rows that a fit had not seen.")
    for numel in sorted({left.point.numel for left in left_out}):
        found = [left.error for left in left_out if left.point.numel == numel]
        out.print(f"  {numel:>12,} values: median {median(found):.1%}, worst {max(found):.1%} of {len(found)}")
    compute = format_seconds(job.compute)
    out.print(table(f"{job.numel:,} parameters, {compute} of compute a step and rank", COLUMNS, rows))
    out.print(
        f"Assumed: {job.num_buckets} equal buckets, each sent behind the one before while backward, "
        f"{BACKWARD_SHARE:.0%} of the compute, goes on; a ring where the process group adds; an idle link. "
        "*: beyond measured ranks or bytes, or over another link: the error was seen elsewhere.",
        markup=False,
    )
