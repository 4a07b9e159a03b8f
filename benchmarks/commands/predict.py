"""``python -m benchmarks predict``: how well a job would scale, by a model of two link parameters fitted on rows.

Note [The α-β model]
    A sync of N values over n ranks takes

        T = steps(n) · α + volume(n) · bytes · β + N · γ + δ

    α is a message's latency and β the seconds a byte of the link, the same for all methods. γ and δ are what a method
    costs the host, a value and a call. Steps and volume follow from who adds (``ROUTES``). This is Hockney's model of a
    message (R. Hockney, The communication challenge for MPP, 1994), as R. Thakur et al. use it (Optimization of
    collective communication operations in MPICH, 2005). T is linear in the four, so non-negative least squares of the
    relative errors find them. How far the model can be trusted is measured: each world size, or message size where
    there are two world sizes only, is left out of a fit and predicted by it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro

from benchmarks.baselines import compressions
from benchmarks.baselines.compressions import WIRE_BYTES
from benchmarks.harness.options import check_file, check_positive
from benchmarks.harness.records import Record, read_json
from benchmarks.report.prediction import FITTED, Measured, Prediction, draw, duration, sentences, what_it_does_not_know
from benchmarks.report.table import OVERSUBSCRIBED, grouped_by, make_table, milliseconds, print_lines, print_table
from benchmarks.units import format_rate, parse_rate

ROUTES: Mapping[str, Callable[[int], tuple[float, float]]] = {
    # From the number of ranks: messages that follow each other, and what a rank sends as a multiple of the bytes.
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),  # a ring: Gloo's, and NCCL's for large messages
    "one_shot": lambda n: (1, n - 1),
    "two_shot": lambda n: (2, 2 * (n - 1) / n),
}
MODELS = {
    # Parameters, and seconds of one training step without communication, at 1e14 operations a second: a third of an
    # A100's peak in bfloat16. A step takes three times the operations of its forward pass.
    "resnet50": (25_557_032, 3 * 64 * 8.2e9 / 1e14),  # 64 images of 224 × 224
    "gpt2-small": (124_439_808, 6 * 8 * 1024 * 124_439_808 / 1e14),  # 8 sequences of 1,024 tokens
}
BACKWARD_SHARE = 2 / 3
"""Of a step's compute: backward computes two gradients where forward computes one product."""
NEAR = 4.0
"""Messages within this factor of each other are taken to be off by about as much."""


@dataclass(frozen=True)
class Options:
    """Predict weak-scaling efficiency from measured rows, with the error that the prediction of measured rows has."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ROWS.json ...")]
    """JSON files that sync or link wrote with --json: several message sizes at two world sizes or more, of one link."""
    model: Literal[tuple(MODELS)] = "resnet50"
    """What is trained: its parameters and a step's compute."""
    numel: int | None = None
    """Number of parameters, in place of the model's."""
    compute_time: float | None = None
    """Seconds of one step without communication, in place of what the model would take on a fast GPU."""
    world_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of ranks to predict."""
    compression: tuple[Literal[tuple(WIRE_BYTES)], ...] = ("none", "fp16", "bf16")
    """What is compared, of fastsync.attach."""
    bandwidth: tuple[str, ...] = ()
    """Of the link, such as 1gbit 25gbit, in place of the fitted one: compression pays where its row is ahead."""
    bucket_mb: float = 25.0
    """MiB of gradients that travel together; as many buckets overlap with backward."""
    picture: Path = Path("prediction.png")
    """File to draw the efficiencies into, beside those of measured syncs."""

    def __post_init__(self) -> None:
        if not self.rows or not self.compression or not self.world_sizes:
            raise ValueError("rows, compression and world_sizes: choose at least one of each")
        check_positive(self, "bucket_mb", "numel", "compute_time")
        check_file("picture", self.picture)
        if min(self.world_sizes) < 2:
            raise ValueError(f"world_sizes: {min(self.world_sizes)} must be 2 or more; one rank sends nothing")
        for rate in self.bandwidth:
            parse_rate(rate)

    @property
    def methods(self) -> list[str]:
        """What is compared, as rows name it."""
        return [f"fastsync.attach/{compression}" for compression in self.compression]

    @property
    def job(self) -> "Job":
        numel, compute = MODELS[self.model]
        numel = self.numel or numel
        return Job(numel, self.compute_time or compute, math.ceil(4 * numel / (self.bucket_mb * 2**20)))


class Job(NamedTuple):
    """One training step of one rank: float32 gradients, seconds without communication, equal buckets."""

    numel: int
    compute: float
    num_buckets: int

    @property
    def in_bucket(self) -> float:
        """Values."""
        return self.numel / self.num_buckets


@dataclass(frozen=True)
class Point:
    """What synchronisation adds to a step, in seconds: a measured median."""

    method: str
    numel: int
    num_ranks: int
    seconds: float
    burst: float = 0.0
    """Bytes that the link, idle before, lets through at once."""


def demands(method: str, numel: float, num_ranks: int, burst: float = 0.0) -> tuple[float, float]:
    """Messages of a sync that follow each other, and the bytes that a rank sends beyond a burst."""
    compression = method.partition("/")[2]
    steps, volume = ROUTES[compressions.algorithm(compression, num_ranks)](num_ranks)
    nbytes = numel * WIRE_BYTES[compressions.split(compression)[0]]
    return steps, max(0.0, volume * nbytes - burst)


@dataclass(frozen=True)
class CostModel:
    """See Note [The α-β model]. Seconds."""

    latency: float
    per_byte: float
    hosts: Mapping[str, tuple[float, float]]
    """By method: seconds a value, and a call."""

    def link_time(
        self, method: str, numel: float, num_ranks: int, per_byte: float | None = None, burst: float = 0.0
    ) -> float:
        """Seconds on the link; ``per_byte`` may be another link's."""
        steps, nbytes = demands(method, numel, num_ranks, burst)
        return steps * self.latency + nbytes * (self.per_byte if per_byte is None else per_byte)

    def host_time(self, method: str, numel: float) -> float:
        per_value, per_call = self.hosts[method]
        return per_value * numel + per_call

    def sync_time(self, method: str, numel: float, num_ranks: int, burst: float = 0.0) -> float:
        """Seconds of one sync on its own."""
        return self.link_time(method, numel, num_ranks, burst=burst) + self.host_time(method, numel)

    def exposed_time(
        self, method: str, job: Job, num_ranks: int, per_byte: float | None = None, slower: float = 1
    ) -> float:
        """Seconds that synchronisation adds to a step, if each sync takes ``slower`` times what the model says.

        Equal buckets get ready at equal distances during backward and travel one after the other. The first one's
        compute and the last one's communication hide nothing, and the host's work never hides.
        """
        link = slower * self.link_time(method, job.in_bucket, num_ranks, per_byte)
        hidden = job.compute * BACKWARD_SHARE * (1 - 1 / job.num_buckets)
        host = job.num_buckets * slower * self.host_time(method, job.in_bucket)
        return max(link, job.num_buckets * link - hidden) + host


def main(arguments: Sequence[str]) -> int:
    """Fits, predicts and reports.

    Returns:
        The exit status: 0, or 2 if the rows do not allow a fit.
    """
    options = tyro.cli(Options, prog="python -m benchmarks predict", args=arguments)
    try:
        rows = [row for path in options.rows for row in read_json(path)]
        points = to_points(rows, options.methods)
        model, left_out = fit(points), leave_out(points)
    except ValueError as error:
        print(f"python -m benchmarks predict: {error}", file=sys.stderr)
        return 2
    predictions = list(predict(options, model, points, left_out))
    report(options, model, left_out, predictions)
    explain(options, model, points, predictions)
    if any(row.settings.get(OVERSUBSCRIBED) for row in rows):
        print_lines(["OVERSUBSCRIBED: some of the rows are of more ranks than cores."])
    return 0


def to_points(rows: Sequence[Record], methods: Sequence[str]) -> list[Point]:
    """The points of the methods that are compared.

    Raises:
        ValueError: the rows are of several links or backends, or there are none of a method.
    """
    rows = [row for row in rows if row.benchmark == "sync" and row.samples and row.correct]
    for name in ("link", "backend"):
        if len(found := sorted({str(row.settings.get(name, "unshaped")) for row in rows})) > 1:
            raise ValueError(f"the rows are of several {name}s, {', '.join(found)}: name files of one")
    alone = {_case(row): median(row.samples) for row in rows if row.method == "no_sync"}
    points = []
    for row in rows:
        settings = row.settings
        if row.method in methods and settings["world_size"] > 1 and _case(row) in alone:
            added = median(row.samples) - alone[_case(row)]
            if added > 0:  # else it is less than the noise, and has no relative error
                burst = settings.get("link_burst", 0.0)
                points.append(Point(row.method, settings["numel"], settings["world_size"], added, burst))
    if missing := set(methods) - {point.method for point in points}:
        raise ValueError(f"there are no rows of {', '.join(sorted(missing))}: measure it, or change --compression")
    return points


def _case(row: Record) -> tuple[object, ...]:
    """Rows that took turns with each other have the same."""
    return row.settings["size"], row.settings["world_size"], row.environment.get("time")


def fit(points: Sequence[Point]) -> CostModel:
    """Non-negative least squares of the relative errors.

    Raises:
        ValueError: the points cannot tell the link from the host, or latency from bandwidth.
    """
    from scipy.optimize import nnls

    methods = list(dict.fromkeys(point.method for point in points))
    if len({point.num_ranks for point in points}) < 2:
        raise ValueError("rows of two world sizes above 1 are needed at least, to tell the link from the host")
    for method in methods:
        if len({point.numel for point in points if point.method == method}) < 2:
            raise ValueError(f"rows of {method} with two sizes are needed at least, to tell latency from bandwidth")
    rows = []
    for point in points:
        host = [value if method == point.method else 0.0 for method in methods for value in (point.numel, 1.0)]
        rows.append([*demands(point.method, point.numel, point.num_ranks, point.burst), *host])
    relative = np.array(rows) / np.array([point.seconds for point in points])[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)  # columns of one magnitude
    found = nnls(relative / scale, np.ones(len(points)))[0] / scale
    hosts = {method: (found[2 + 2 * i], found[3 + 2 * i]) for i, method in enumerate(methods)}
    return CostModel(found[0], found[1], hosts)


def leave_out(points: Sequence[Point]) -> list[tuple[int, float]]:
    """Predicts each world size, or with two of them each message size, from a fit on the others.

    Returns:
        For each point its number of values, and the relative error of what a fit said that had not seen it.

    Raises:
        ValueError: nothing can be left out.
    """
    by_ranks = len({point.num_ranks for point in points}) > 2
    left_out = []
    for part in grouped_by(points, lambda point: point.num_ranks if by_ranks else point.numel):
        try:
            model = fit([point for point in points if point not in part])
        except ValueError:
            continue  # what is left does not allow a fit
        for unseen in part:
            if unseen.method in model.hosts:
                predicted = model.sync_time(unseen.method, unseen.numel, unseen.num_ranks, unseen.burst)
                left_out.append((unseen.numel, abs(predicted / unseen.seconds - 1)))
    if not left_out:
        raise ValueError("the rows allow no fit without some of them: measure three world sizes, or three sizes")
    return left_out


def worst_near(left_out: Sequence[tuple[int, float]], numel: float) -> float:
    """The largest error of points with about as many values, or of those nearest to that where it is beyond them."""
    numels = [size for size, _ in left_out]
    wanted = min(max(numel, min(numels)), max(numels))
    near = [error for size, error in left_out if 1 / NEAR <= size / wanted <= NEAR]
    return max(near or [error for _, error in left_out])


def predict(
    options: Options, model: CostModel, points: Sequence[Point], left_out: Sequence[tuple[int, float]]
) -> Iterator[Prediction]:
    """One for each bandwidth, method and number of ranks."""
    job, most_ranks = options.job, max(point.num_ranks for point in points)
    numels = [point.numel for point in points]
    worst = worst_near(left_out, job.in_bucket)
    sizes = sorted(set(options.world_sizes))
    for rate, method, num_ranks in product(options.bandwidth or [None], options.methods, sizes):
        per_byte = None if rate is None else 8 / parse_rate(rate)
        factors = (1.0, 1 / max(1 - worst, 1e-9), 1 / (1 + worst))
        expected, slower, faster = (model.exposed_time(method, job, num_ranks, per_byte, each) for each in factors)
        measured = num_ranks <= most_ranks and min(numels) <= job.in_bucket <= max(numels) and rate is None
        exposed = (expected, slower, faster)
        yield Prediction(method, rate or FITTED, num_ranks, job.compute, exposed, measured)


def measured_points(options: Options, model: CostModel, points: Sequence[Point]) -> tuple[int, Measured]:
    """The measured number of values nearest to a bucket's, and the efficiencies if syncs take as long as those did."""
    job = options.job
    nearest = min((point.numel for point in points), key=lambda numel: abs(math.log(numel / job.in_bucket)))
    found: dict[str, list[tuple[int, float]]] = {}
    for point in sorted(points, key=lambda point: point.num_ranks):
        if point.numel == nearest:
            slower = point.seconds / model.sync_time(point.method, point.numel, point.num_ranks, point.burst)
            exposed = model.exposed_time(point.method, job, point.num_ranks, slower=slower)
            found.setdefault(point.method, []).append((point.num_ranks, job.compute / (job.compute + exposed)))
    return nearest, found


COLUMNS: Mapping[str, Callable[[Prediction], str]] = {
    "method": lambda each: each.method,
    "link": lambda each: each.link,
    "ranks": lambda each: f"{each.num_ranks}{'' if each.is_measured else '*'}",
    "exposed, ms": lambda each: milliseconds(each.exposed[0]),
    "efficiency": lambda each: f"{each.efficiencies[0]:.1%}",
    "with the worst error": lambda each: "[{:.1%}, {:.1%}]".format(*each.efficiencies[1:]),
}


def report(
    options: Options, model: CostModel, left_out: Sequence[tuple[int, float]], predictions: Sequence[Prediction]
) -> None:
    """Prints the parameters, how far they can be trusted, the predictions and what is assumed."""
    job = options.job
    rate = "no measurable cost a byte" if model.per_byte == 0 else format_rate(8 / model.per_byte)
    print_lines([f"Link: {model.latency * 1e6:.3g} µs a message, {rate}.", TRUST])
    for of_size in grouped_by(sorted(left_out), lambda left: left[0]):
        errors = [error for _, error in of_size]
        trust = f"median {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}"
        print_lines([f"  {of_size[0][0]:>12,} values: {trust}"])
    title = f"{job.numel:,} parameters, {duration(job.compute)} of compute a step and rank"
    print_table(title, make_table(COLUMNS, predictions))
    print_lines(["*: beyond measured ranks or bytes, or over another link. The error was seen elsewhere."])


def explain(options: Options, model: CostModel, points: Sequence[Point], predictions: Sequence[Prediction]) -> None:
    """Says what was predicted and what was not known, and draws it beside what was measured."""
    job, most_ranks = options.job, max(point.num_ranks for point in points)
    print_lines(
        [
            *sentences(predictions, most_ranks),
            ASSUMED.format(num_buckets=job.num_buckets, share=BACKWARD_SHARE),
            *what_it_does_not_know(job.compute),
        ]
    )
    nearest, measured = measured_points(options, model, points)
    caption = ["Lines are predicted, in bands of the worst error; grey: never measured."]
    if not options.bandwidth:
        caption += [
            f"Large points have the measured time of a sync of {nearest:,} values,",
            f"in place of the model's. A bucket has {job.in_bucket:,.0f}.",
        ]
    draw(predictions, most_ranks, measured, caption, options.picture)
    print_lines([f"Picture: {options.picture}"])


TRUST = "How far to trust it: the error of rows that a fit had not seen."
ASSUMED = (
    "It assumes {num_buckets} equal buckets. Each is sent after the one before it, while backward goes on, which is "
    "{share:.0%} of the compute. Where the process group adds, it is a ring."
)
