"""``python -m benchmarks predict``: how well a job would scale, from a cost model fitted on measured syncs.

Rows of ``sync`` or ``link`` at two or more world sizes give the parameters; points that were held back give the error,
which stands beside every figure. What is not measured may be given instead: another link, a GPU's passes. Then, and
beyond the measured ranks and bytes, a figure is marked as extrapolated.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import tyro

from benchmarks.cost.fit import Fit, HeldBack, fit, link_of, points_of
from benchmarks.cost.model import GRAD_BYTES, Algorithm, CostModel, Host, Job, Link, Topology, efficiency, slower
from benchmarks.harness.options import check_json, check_positive
from benchmarks.harness.records import Record, RowFile, environment, read_json
from benchmarks.report.prediction import report
from benchmarks.rivals.compressions import WIRE_BYTES
from benchmarks.units import format_rate, parse_rate, parse_seconds

MODELS = {
    # Parameters, and floating-point operations of one training step: three times those of the forward pass.
    "ppo-mlp": (9_155, 3 * 256 * 2 * 9_155),  # fastsync's policy for CartPole-v1, minibatch of 256
    "atari-cnn": (1_687_719, 3 * 256 * 18.7e6),  # the Nature CNN with 6 actions, minibatch of 256
    "resnet50": (25_557_032, 3 * 64 * 8.2e9),  # 64 images of 224 × 224
    "gpt2-small": (124_439_808, 6 * 8 * 1024 * 124_439_808),  # 8 sequences of 1,024 tokens
}
MAX_RANKS = 1024
if TYPE_CHECKING:
    ModelName = str
    Compression = str
else:
    ModelName = tyro.extras.literal_type_from_choices(MODELS)
    Compression = tyro.extras.literal_type_from_choices(WIRE_BYTES)


@dataclass(frozen=True)
class Options:
    """Predict weak-scaling efficiency and where compression pays, from measured rows, with the error of both."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """JSON files that sync or link wrote with --json: several message sizes at two world sizes or more."""
    link: str | None = None
    """Rows over which shaped link to take, such as 100mbit, where the files have several."""
    hold_back: tuple[int, ...] = ()
    """World sizes not to fit on, but to check the model with; each of their points is shown."""
    model: ModelName = "resnet50"
    """What is trained: its parameters, and a step's floating-point operations."""
    numel: int | None = None
    """Number of parameters, in place of the model's."""
    compute_time: str | None = None
    """Of one step without communication, such as 15ms; by default the model's operations by --flops."""
    flops: float = 1e14
    """Floating-point operations per second that a rank reaches: 1e14 is a third of an A100's peak in bfloat16."""
    compression: tuple[Compression, ...] = ("none", "fp16", "bf16")
    """What is compared."""
    door: Literal["fastsync.attach", "fastsync.register_comm_hook"] = "fastsync.attach"
    """Whose costs on the host."""
    algorithm: Algorithm | None = None
    """How ranks reduce; by default a ring, as in the rows."""
    ranks_per_node: int = 8
    """Of two levels. World sizes that do not fill nodes are left out."""
    inner_bandwidth: str = "3600gbit"
    """Of two levels, inside of a node, for each rank; by default NVLink 4's 450 GB/s each way."""
    inner_latency: str = "5us"
    """Of two levels, inside of a node, a step."""
    bandwidth: str | None = None
    """Of the link, such as 25gbit, in place of the fitted one. Of two levels it is that of a node."""
    latency: str | None = None
    """A step's, such as 10us, in place of the fitted one."""
    local_bandwidth: float | None = None
    """GB/s that a rank's passes read and write, in place of the fitted one: an H100's memory has 3350."""
    overhead: str | None = None
    """Of a call, such as 30us, in place of the fitted one."""
    bucket_mb: float = 25.0
    """MiB of gradients that travel together; as many buckets overlap with backward."""
    overlap: bool = True
    """Whether a bucket travels while backward goes on."""
    world_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of ranks to predict."""
    json: Path | None = None
    """File to write the predictions to."""

    def __post_init__(self) -> None:
        for path in self.rows:
            if not path.is_file():
                raise ValueError(f"rows: there is no file {path}")
        check_positive(self, "flops", "bucket_mb", "numel", "local_bandwidth", "ranks_per_node", unit="")
        for size in self.world_sizes:
            if not 1 <= size <= MAX_RANKS:
                raise ValueError(f"world_sizes: {size} must be from 1 to {MAX_RANKS}")
        for name in ("bandwidth", "inner_bandwidth", "link"):
            if getattr(self, name) is not None:
                parse_rate(getattr(self, name))
        for name in ("latency", "inner_latency", "overhead", "compute_time"):
            if getattr(self, name) is not None:
                parse_seconds(getattr(self, name))
        if not self.compression or not self.world_sizes:
            raise ValueError("compression and world_sizes: choose at least one of each")
        assumed = ("bandwidth", "latency", "local_bandwidth", "overhead")
        if not self.rows and (missing := [name for name in assumed if getattr(self, name) is None]):
            options = ", ".join("--" + name.replace("_", "-") for name in missing)
            raise ValueError(f"rows: name files to fit the model on, or give {options} as well")
        if self.hold_back and not self.rows:
            raise ValueError(f"hold_back={self.hold_back} takes rows to hold back")
        check_json(self.json)

    @property
    def job(self) -> Job:
        numel, operations = MODELS[self.model]
        numel = self.numel or numel
        buckets = math.ceil(GRAD_BYTES * numel / (self.bucket_mb * 2**20)) if self.overlap else 1
        compute = parse_seconds(self.compute_time) if self.compute_time else operations / self.flops
        return Job(numel, compute, buckets)

    @property
    def all_sizes(self) -> list[int]:
        """The world sizes in order; of two levels those that fill their nodes."""
        fills = self.algorithm != "two-level"
        sizes = sorted(set(self.world_sizes))
        return [size for size in sizes if fills or size <= self.ranks_per_node or size % self.ranks_per_node == 0]


def main(arguments: Sequence[str]) -> int:
    """Fits, predicts and reports.

    Returns:
        The exit status: 0, or 2 if the rows do not allow a fit.
    """
    options = tyro.cli(Options, prog="python -m benchmarks predict", args=arguments)
    try:
        fitted = fit_rows(options)
        model = model_for(options, fitted)
    except ValueError as error:
        print(f"python -m benchmarks predict: {error}", file=sys.stderr)
        return 2
    held_back = [_held_back_record(held) for held in (fitted.held_back if fitted else ())]
    predictions = list(predict(options, model, fitted))
    if options.json is not None:
        RowFile(options.json).add([*held_back, *predictions])
    report(options, model, fitted, held_back, predictions)
    return 0


def fit_rows(options: Options) -> Fit | None:
    """The fit on all rows over one link; None without rows.

    Raises:
        ValueError: the files hold no rows, or those of several links or backends, or too few.
    """
    if not options.rows:
        return None
    records = [record for path in options.rows for record in read_json(path) if record.benchmark == "sync"]
    if options.link is not None:
        records = [record for record in records if link_of(record) == parse_rate(options.link)]
    links = {"the machine's own" if (link := link_of(record)) is None else format_rate(link) for record in records}
    backends = {record.settings["backend"] for record in records}
    if len(links) > 1:
        raise ValueError(f"the rows are of several links, {', '.join(sorted(links))}: choose one with --link")
    if len(backends) > 1:
        raise ValueError(f"the rows are of several backends, {', '.join(sorted(backends))}: name files of one only")
    if not records:
        raise ValueError("there are no rows of sync over that link in these files")
    return fit(points_of(records), "ring", options.hold_back)


def algorithm_of(options: Options, fitted: Fit | None) -> Algorithm:
    """The chosen one, or that of the rows."""
    return options.algorithm or (fitted.model.topology.algorithm if fitted else "ring")


def model_for(options: Options, fitted: Fit | None) -> CostModel:
    """The fitted model, with what the options put in its place.

    Raises:
        ValueError: a compression was not measured, and its costs are not given.
    """
    hosts = {}
    for compression in options.compression:
        measured = f"{options.door}/{compression}"
        host = fitted.model.hosts.get(measured) if fitted else None
        overhead = parse_seconds(options.overhead) if options.overhead else host and host.overhead
        bandwidth = options.local_bandwidth * 1e9 if options.local_bandwidth else host and host.bandwidth
        if overhead is None or bandwidth is None:
            raise ValueError(f"there are no rows of {measured}: measure it, or choose another --compression")
        hosts[f"{options.door}/{compression}"] = Host(overhead, bandwidth)
    # Without rows the options give both of its figures.
    link = fitted.model.topology.link if fitted else Link(latency=0.0, bandwidth=1.0)
    if options.latency:
        link = replace(link, latency=parse_seconds(options.latency), work=0.0)
    if options.bandwidth:
        link = replace(link, bandwidth=parse_rate(options.bandwidth) / 8)
    algorithm = algorithm_of(options, fitted)
    if algorithm == "two-level":
        inner = Link(parse_seconds(options.inner_latency), parse_rate(options.inner_bandwidth) / 8)
        return CostModel(Topology("two-level", link, options.ranks_per_node, inner), hosts)
    return CostModel(Topology(algorithm, link), hosts)


def predict(options: Options, model: CostModel, fitted: Fit | None) -> Iterator[Record]:
    """A row for each compression and number of ranks. low and high: every sync off by the worst error that was seen."""
    job, link, where = options.job, model.topology.link, environment(torch.device("cpu"))
    errors = fitted.errors(job.numel / job.num_buckets) if fitted else []
    factors = (1.0, *slower(max(errors))) if errors else (1.0,)
    for way, host in model.hosts.items():
        for num_ranks in options.all_sizes:
            exposed = [model.exposed_time(way, job, num_ranks, factor) if num_ranks > 1 else 0.0 for factor in factors]
            efficiencies = [efficiency(job, seconds) for seconds in exposed]
            high, low = efficiencies[1:] if errors else (None, None)
            yield Record(
                benchmark="predict",
                way=way,
                settings={
                    "model": options.model,
                    "world_size": num_ranks,
                    **asdict(job),
                    "algorithm": model.topology.algorithm,
                    "latency": link.latency + link.work,
                    "bandwidth": _finite(link.bandwidth),
                    "overhead": host.overhead,
                    "local_bandwidth": _finite(host.bandwidth),
                    "extrapolated": num_ranks > 1 and is_extrapolated(options, fitted, way, num_ranks),
                    "fitted_on_oversubscribed": fitted is not None and fitted.num_oversubscribed > 0,
                },
                figures={
                    "exposed_time": exposed[0],
                    "efficiency": efficiencies[0],
                    "low": low,
                    "high": high,
                    "median_error": _finite(median(errors)) if errors else None,
                    "worst_error": _finite(max(errors)) if errors else None,
                },
                correct=True,
                samples=[],
                environment=where,
            )


def is_extrapolated(options: Options, fitted: Fit | None, way: str, num_ranks: int) -> bool:
    """Tells whether ranks, bytes or any of the parameters are beyond what was measured."""
    given = (options.bandwidth, options.latency, options.local_bandwidth, options.overhead)
    if fitted is None or any(given) or way not in fitted.model.hosts:
        return True
    if algorithm_of(options, fitted) != fitted.model.topology.algorithm:
        return True
    in_bucket = options.job.numel / options.job.num_buckets
    ranks = [point.num_ranks for point in fitted.points]
    numels = [point.numel for point in fitted.points]
    return not (min(ranks) <= num_ranks <= max(ranks) and min(numels) <= in_bucket <= max(numels))


def _held_back_record(held: HeldBack) -> Record:
    point = held.point
    return Record(
        benchmark="predict",
        way=point.way,
        settings={
            "numel": point.numel,
            "world_size": point.num_ranks,
            "held_back": True,
            **({"oversubscribed": True} if point.oversubscribed else {}),
        },
        figures={"measured": point.sync, "predicted": held.predicted, "error": _finite(held.error)},
        correct=True,
        samples=[],
        environment={},
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
