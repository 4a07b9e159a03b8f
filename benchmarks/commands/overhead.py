"""``python -m benchmarks overhead``: what a step's synchronisation costs beside the time that gradients travel.

The host's time for the backward, which on a GPU is not the device's: how long it takes until everything has been
started. The kernels that are started and the calls of the process group, as torch.profiler counts them in one step. And
on a GPU the peak of the memory that torch allocates, from the making of the model on; NCCL's own buffers are not in it.
Each way is by itself, with DDP beside all others.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

from benchmarks.baselines.ways import BY_DEFAULT, WAYS, Step, Way, is_right
from benchmarks.baselines.workloads import Workload, size_of
from benchmarks.commands import sync
from benchmarks.harness.collect import Collected
from benchmarks.harness.launches import LAUNCHES, count
from benchmarks.harness.measure import all_gather, measure_each, over_ranks, settings_of_size
from benchmarks.harness.options import run_on_ranks
from benchmarks.harness.progress import watched_rounds
from benchmarks.harness.records import Record, RowFile, environment
from benchmarks.harness.timing import Sampling, slowest_rank
from benchmarks.report.table import Columns, grouped_by, number, print_tables, ranks_on, spread

DDP = "ddp"


@dataclass(frozen=True)
class Options(sync.Options):
    """Measure what synchronisation costs beside the time that gradients travel: host time, launches, calls, memory."""

    ways: tuple[sync.WayName, ...] = tuple(name for name in BY_DEFAULT if not name.startswith("all_reduce/"))
    """Ways to synchronise. DDP is always measured as well."""
    repetitions: int | None = 30
    """Steps of each way whose host time is taken."""


@dataclass(frozen=True)
class Overhead:
    """Of one way, as one rank sees it."""

    correct: bool
    host_times: list[float]
    """Seconds of the host for a step, one for each repetition."""
    launches: int
    group_calls: int
    peak_memory: int | None
    """Bytes; None on a CPU."""


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("overhead", Options, measure_all, report, arguments)


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""

    def measure_size(size: str, names: Sequence[str], device: torch.device, progress: Progress) -> list[Record]:
        workload, sampling = Workload(size_of(size), device, options.seed), options.sampling(1, device, progress)
        turns = watched_rounds([[name] for name in names], progress, size, options.timeout)
        of_rank = all_gather({name: measure(WAYS[name], workload, sampling) for name in turns})
        return to_records(of_rank, settings_of_size(size, sampling), all_gather(environment(device))[0])

    names = [name for name in WAYS if name in {*options.ways, DDP}]
    return measure_each(options.all_sizes, names, options, rows, measure_size)


def measure(way: Way, workload: Workload, sampling: Sampling) -> Overhead:
    """Builds a step of this way, with a process group of its own, and takes it again and again. A collective call."""
    group = dist.new_group(timeout=timedelta(seconds=sampling.timeout))
    overhead = _measure(way, workload, group, sampling)
    gc.collect()  # DDP is part of reference cycles and holds its group
    dist.destroy_process_group(group)
    return overhead


def _measure(way: Way, workload: Workload, group: dist.ProcessGroup, sampling: Sampling) -> Overhead:
    device = sampling.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    step = way.build(workload, group)
    for _ in range(sampling.warmup):
        _host_time(step, device)
    host_times = [_host_time(step, device) for _ in range(sampling.repetitions)]
    peak_memory = torch.cuda.max_memory_allocated(device) - before if on_gpu else None
    step.prepare()
    counts = count(step.run, device)
    return Overhead(is_right(way, step, workload), host_times, counts.launches, counts.group_calls, peak_memory)


def _host_time(step: Step, device: torch.device) -> float:
    """Seconds that the host takes for a step, from a moment when nobody has anything left to do."""
    step.prepare()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    step.run()
    return time.perf_counter() - began


def to_records(
    of_rank: Sequence[Mapping[str, Overhead]], settings: Mapping[str, Any], where: Mapping[str, Any]
) -> list[Record]:
    """One row a way, of the rank for which it is most; host time and memory also as what they are beyond DDP's."""
    rows = {name: _figures([rank[name] for rank in of_rank]) for name in of_rank[0]}
    return [
        Record(
            benchmark="overhead",
            way=name,
            settings=settings,
            figures={
                **figures,
                "host_over_ddp": figures["host_time"] - rows[DDP]["host_time"],
                "memory_over_ddp": _difference(figures["peak_memory"], rows[DDP]["peak_memory"]),
            },
            correct=all(rank[name].correct for rank in of_rank),
            samples=slowest_rank([rank[name].host_times for rank in of_rank]),
            environment=where,
        )
        for name, figures in rows.items()
    ]


def _figures(of_rank: Sequence[Overhead]) -> dict[str, Any]:
    most = {
        name: over_ranks(max, [asdict(rank)[name] for rank in of_rank])
        for name in ("launches", "group_calls", "peak_memory")
    }
    return {"host_time": median(slowest_rank([rank.host_times for rank in of_rank])), **most}


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def report(options: Options, collected: Collected) -> None:
    """Prints a table for each size."""
    devices = {"cuda" if record.environment["gpu"] else "cpu" for record in collected.records}
    below = (LEGEND, *(LAUNCHES[device] for device in devices), *collected.notes)
    print_tables(grouped_by(collected.records, lambda record: record.settings["size"]), _title, COLUMNS, below)


def _title(record: Record) -> str:
    settings = record.settings
    return f"{settings['numel']:,} float32 gradients in {settings['num_tensors']} tensors, {ranks_on(record)}"


COLUMNS: Columns = {
    "way": lambda record: record.way,
    "host, ms": lambda record: spread(record.quantiles),
    "over DDP, µs": lambda record: number(record.figures["host_over_ddp"], "+,.0f", 1e-6),
    "launches": lambda record: number(record.figures["launches"], ".0f"),
    "group calls": lambda record: number(record.figures["group_calls"], ".0f"),
    "peak memory, MiB": lambda record: number(record.figures["peak_memory"], ",.1f", 2**20),
    "memory over DDP, MiB": lambda record: number(record.figures["memory_over_ddp"], "+,.1f", 2**20),
}
LEGEND = (
    "host: what the host takes for a backward with everything that makes its gradients the mean, median [p10, p90] of "
    "the slowest rank; on a GPU until all has been started, on a CPU until it is done. group calls: of the process "
    "group, from the threads of the step itself; on Gloo, a thread of the engine makes more of them. peak memory: of "
    "what torch allocates on the GPU, from the making of the model on, without weights, which all ways share."
)
