"""``python -m benchmarks collectives``: what a collective of CPU ranks costs by its size, over each backend.

A sample is the time from when the last rank calls until the slowest has its result. Backends take turns in the same
processes, each with a group of its own. MPI, which torch's wheels do not have, runs after them, in processes that have
NumPy instead of torch. Sizes and bandwidths are those of nccl-tests: the bytes of an all-reduce's tensor, of all inputs
of a reduce-scatter and an all-to-all together, of an all-gather's output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor

from benchmarks.baselines import mpi
from benchmarks.harness.collect import Collected
from benchmarks.harness.measure import all_gather, settings_of_ranks
from benchmarks.harness.options import Methods, RankOptions, check_file, check_names, run_on_ranks
from benchmarks.harness.progress import progress_bars, watched_rounds
from benchmarks.harness.records import Record, RowFile, environment, quantiles
from benchmarks.harness.timing import Sampling, rounds, span_turns, together
from benchmarks.report.collectives import picture
from benchmarks.report.table import Columns, grouped_by, number, print_tables, ranks_on, spread
from benchmarks.units import parse_bytes
from fastsync.distributed import process_group

BACKENDS, MPI = ("gloo", "fastsync"), "mpi"
COMPARED_TO = "gloo"
MOST_BYTES = 1 << 30
"""What the samples of one size move together, in bytes, unless there are fewer than MIN_REPETITIONS."""
MIN_REPETITIONS, MAX_REPETITIONS = 10, 500


@dataclass(frozen=True)
class Options(RankOptions):
    """Measure what collectives of CPU ranks cost by their size: the backend fastsync beside Gloo, taking turns."""

    methods: Methods = BACKENDS
    """Backends: gloo, fastsync, and mpi, whose ranks run after the others."""
    collectives: tuple[str, ...] = ("all_reduce",)
    """all_reduce, broadcast, all_gather, reduce_scatter, all_to_all or barrier."""
    sizes: tuple[str, ...] = ("8B", "64B", "1KiB", "16KiB", "256KiB", "4MiB", "64MiB")
    """In bytes, as nccl-tests counts them."""
    repetitions: int | None = None
    """Samples of each backend; by default as many as move 1 GiB, between 10 and 500."""
    plot: Path | None = None
    """File to draw times over sizes into: a name that ends in .svg or .png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("methods", self.methods, (*BACKENDS, MPI))
        check_names("collectives", self.collectives, COLLECTIVES)
        for size in self.sizes:
            parse_bytes(size)
        check_file("plot", self.plot)
        if self.plot is not None and self.plot.suffix not in (".svg", ".png"):
            raise ValueError(f"plot={self.plot} must be the name of a file that ends in .svg or .png")
        if self.nproc < 2:
            raise ValueError(f"nproc={self.nproc} must be at least 2: one rank has nobody to talk to")


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("collectives", Options, measure_all, report, ["--device", "cpu", *arguments])


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""
    left_out = MPI in options.methods and not mpi.is_installed()
    methods = [name for name in dict.fromkeys(options.methods) if not (left_out and name == MPI)]
    with process_group(options.timeout, backend="gloo") as device, progress_bars(shown=dist.get_rank() == 0) as shown:
        for collective in dict.fromkeys(options.collectives):
            for size in ("0B",) if collective == "barrier" else dict.fromkeys(options.sizes):
                num_bytes = 0 if size == "0B" else parse_bytes(size)
                repetitions = min(max(MOST_BYTES // max(num_bytes, 1), MIN_REPETITIONS), MAX_REPETITIONS)
                sampling = options.sampling(repetitions, device, shown)
                records = measure(collective, num_bytes, methods, sampling, options.crowded, shown)
                if dist.get_rank() == 0:
                    rows.add(records)
    return [mpi.HOW_TO_INSTALL] if left_out else []


@dataclass
class Step:
    """One call of a collective, on input that is made anew each time."""

    group: dist.ProcessGroup
    whole: Tensor
    sent: Tensor
    """As large as the whole."""
    piece: Tensor
    call: Callable[["Step"], object]

    def prepare(self) -> None:
        """Rank r has r + 1 everywhere."""
        self.whole.fill_(dist.get_rank() + 1)
        self.sent.fill_(dist.get_rank() + 1)
        self.piece.fill_(dist.get_rank() + 1)

    def run(self) -> None:
        self.call(self)


def all_reduce(step: Step) -> None:
    dist.all_reduce(step.whole, group=step.group)


def broadcast(step: Step) -> None:
    dist.broadcast(step.whole, 0, group=step.group)


def gather(step: Step) -> None:
    dist.all_gather_into_tensor(step.whole, step.piece, group=step.group)


def reduce_scatter(step: Step) -> None:
    dist.reduce_scatter_tensor(step.piece, step.whole, group=step.group)


def all_to_all(step: Step) -> None:
    dist.all_to_all_single(step.whole, step.sent, group=step.group)


def barrier(step: Step) -> None:
    dist.barrier(step.group)


@dataclass(frozen=True)
class Kind:
    """A collective."""

    call: Callable[[Step], object]
    is_right: Callable[[Step, int], bool]
    """Whether the step's result is what so many ranks make."""
    bus_factor: Callable[[int], float]
    """By which algbw becomes busbw, as nccl-tests defines it."""


def _in_pieces(step: Step, ranks: int) -> bool:
    return torch.equal(step.whole, torch.arange(1.0, ranks + 1).repeat_interleave(step.piece.numel()))


def _all_are(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())


COLLECTIVES = {
    "all_reduce": Kind(all_reduce, lambda step, n: _all_are(step.whole, n * (n + 1) / 2), lambda n: 2 * (n - 1) / n),
    "broadcast": Kind(broadcast, lambda step, n: _all_are(step.whole, 1), lambda n: 1.0),
    "all_gather": Kind(gather, _in_pieces, lambda n: (n - 1) / n),
    "reduce_scatter": Kind(
        reduce_scatter, lambda step, n: _all_are(step.piece, n * (n + 1) / 2), lambda n: (n - 1) / n
    ),
    "all_to_all": Kind(all_to_all, _in_pieces, lambda n: (n - 1) / n),
    "barrier": Kind(barrier, lambda step, n: True, lambda n: 0.0),
}


def measure(
    collective: str, num_bytes: int, methods: Sequence[str], sampling: Sampling, crowded: bool, progress: Progress
) -> list[Record]:
    """Checks and times a collective of one size. A collective call; every rank gets the same rows."""
    ranks = dist.get_world_size()
    numel = max(1, num_bytes // 4 // ranks) * ranks
    of_method = _time_backends(collective, numel, [name for name in methods if name != MPI], sampling, progress)
    settings = {"collective": collective, "bytes": numel * 4, **settings_of_ranks(sampling)}
    settings |= {"oversubscribed": True} if crowded else {}
    where = {name: all_gather(environment(sampling.device))[0] for name in of_method}
    if MPI in methods:
        of_method[MPI], library = _time_mpi(collective, numel, sampling)
        where[MPI] = all_gather(environment(sampling.device))[0] | {"mpi": library}
    medians = {name: quantiles(samples)["median"] for name, (samples, _) in of_method.items()}

    def figures(name: str) -> dict[str, float | None]:
        bandwidth = settings["bytes"] / medians[name]
        return {
            "algbw": bandwidth,
            "busbw": bandwidth * COLLECTIVES[collective].bus_factor(ranks),
            "over_gloo": medians[name] / medians[COMPARED_TO] if COMPARED_TO in medians else None,
        }

    return [
        Record(
            benchmark="collectives",
            method=name,
            settings=settings,
            figures=figures(name),
            correct=correct,
            samples=samples,
            environment=where[name],
        )
        for name, (samples, correct) in of_method.items()
    ]


Timed = tuple[list[float], bool]
"""Seconds of all ranks together, and whether the results were right on all ranks."""


def _time_backends(
    collective: str, numel: int, backends: Sequence[str], sampling: Sampling, progress: Progress
) -> dict[str, Timed]:
    """Backends of torch take turns."""
    kind, ranks = COLLECTIVES[collective], dist.get_world_size()
    limit = timedelta(seconds=sampling.timeout)
    steps = {
        name: Step(
            dist.new_group(backend=name, timeout=limit),
            torch.zeros(numel),
            torch.zeros(numel),
            torch.zeros(numel // ranks),
            kind.call,
        )
        for name in backends
    }
    order = list(rounds(steps, sampling.warmup + sampling.repetitions, sampling.seed))
    timed = watched_rounds(order, progress, f"{collective} of {numel * 4} bytes", sampling.timeout)
    spans = span_turns(steps, timed)
    right = {name: kind.is_right(step, ranks) for name, step in steps.items()}
    of_rank, right_of_rank = all_gather(spans), all_gather(right)
    for step in steps.values():
        dist.destroy_process_group(step.group)
    return {
        name: (
            together([rank[name][sampling.warmup :] for rank in of_rank]),
            all(rank[name] for rank in right_of_rank),
        )
        for name in backends
    }


def _time_mpi(collective: str, numel: int, sampling: Sampling) -> tuple[Timed, str]:
    """Rank 0 starts MPI's ranks while the others wait asleep. Returns the library's name as well."""
    times = None
    if dist.get_rank() == 0:
        counts = sampling.warmup, sampling.repetitions
        times = mpi.time_collective(collective, numel, dist.get_world_size(), *counts, sampling.timeout / 2)
    times = all_gather(times)[0]
    return (times.samples, times.correct), times.library


def report(options: Options, collected: Collected) -> None:
    """Prints a table for each collective, and draws where that was asked for."""
    by_collective = grouped_by(collected.records, lambda record: record.settings["collective"])
    print_tables(by_collective, _title, COLUMNS, (LEGEND, *collected.notes))
    if options.plot is not None:
        picture(collected.records, options.plot)


COLUMNS: Columns = {
    "backend": lambda record: record.method,
    "bytes": lambda record: f"{record.settings['bytes']:,}",
    "time, µs": lambda record: spread(record.quantiles, lambda seconds: number(seconds, ".1f", 1e-6)),
    "algbw, GB/s": lambda record: number(record.figures["algbw"], "#.3g", 1e9),
    "busbw, GB/s": lambda record: number(record.figures["busbw"], "#.3g", 1e9),
    "× gloo": lambda record: number(record.figures["over_gloo"], ".3f"),
}
LEGEND = (
    "time: median [p10, p90] from the last rank's call to the slowest one's result. algbw: bytes by the median; busbw: "
    "algbw by the factor that nccl-tests has for the collective. × gloo: the median over Gloo's. mpi: ranks of their "
    "own, which have not taken turns with the others."
)


def _title(record: Record) -> str:
    return f"{record.settings['collective']}, {ranks_on(record)}"
