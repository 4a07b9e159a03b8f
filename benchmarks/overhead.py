"""``python -m benchmarks overhead``: what a step's synchronisation costs beside the time that gradients travel.

The host's time for the backward, which on a GPU is not the device's: how long it takes until everything has been
started. The kernels that are started and the calls of the process group, as torch.profiler counts them in one step. And
on a GPU the peak of the memory that torch allocates, from the making of the model on; NCCL's own buffers are not in it.
Each way is by itself, with DDP beside all others.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks import sync
from benchmarks.collect import Collected, collect, places
from benchmarks.launches import LAUNCHES, count
from benchmarks.measure import all_gather, over_ranks, watched_rounds
from benchmarks.records import Record, RowFile, environment
from benchmarks.table import Columns, console, measured_on, number, progress_bars, spread, table
from benchmarks.timing import slowest_rank
from benchmarks.ways import BY_DEFAULT, WAYS, Step, Way, is_right, left_out
from benchmarks.workloads import Workload, size_of
from fastsync.distributed import process_group

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
    """Measures and reports.

    Returns:
        The exit status: 0, or 1 if a way gave a wrong result or a rank failed.
    """
    options = tyro.cli(Options, prog="python -m benchmarks overhead", args=arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    collected = collect(measure_all, options.nproc, options, options.json)
    report(collected)
    return collected.status


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""
    with process_group(options.timeout, share_gpus=options.share_gpus) as device:
        names = [name for name in WAYS if name in {*options.ways, DDP}]
        excluded = left_out(names, dist.get_backend())
        names = [name for name in names if name not in excluded]
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            for size in options.all_sizes:
                workload = Workload(size_of(size), device, options.seed)
                turns = watched_rounds([[name] for name in names], progress, size, options.timeout)
                of_rank = all_gather({name: measure(WAYS[name], workload, options, device) for name in turns})
                settings = {
                    "size": size,
                    "numel": size_of(size).numel,
                    "num_tensors": len(size_of(size).shapes),
                    "world_size": dist.get_world_size(),
                    "backend": dist.get_backend(),
                    **{name: getattr(options, name) for name in ("repetitions", "warmup", "seed")},
                }
                if options.nproc > places(options.nproc, options.cpu, options.share_gpus):
                    settings["oversubscribed"] = True
                records = to_records(of_rank, settings, all_gather(environment(device))[0])
                if dist.get_rank() == 0:
                    rows.add(records)
    return [LAUNCHES[device.type], *(f"{way} is left out: {reason}" for way, reason in excluded.items())]


def measure(way: Way, workload: Workload, options: Options, device: torch.device) -> Overhead:
    """Builds a step of this way, with a process group of its own, and takes it again and again. A collective call."""
    group = dist.new_group(timeout=timedelta(seconds=options.timeout))
    overhead = _measure(way.build, workload, group, way, options, device)
    gc.collect()  # DDP is part of reference cycles and holds its group
    dist.destroy_process_group(group)
    return overhead


def _measure(
    build: Any, workload: Workload, group: dist.ProcessGroup, way: Way, options: Options, device: torch.device
) -> Overhead:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    step: Step = build(workload, group)
    for _ in range(options.warmup):
        _host_time(step, device)
    host_times = [_host_time(step, device) for _ in range(options.repetitions or 1)]
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


def report(collected: Collected) -> None:
    """Prints a table for each size."""
    out = console()
    for size in dict.fromkeys(record.settings["size"] for record in collected.records):
        rows = [record for record in collected.records if record.settings["size"] == size]
        out.print(table(_title(rows[0]), COLUMNS, rows))
    for line in (LEGEND, *collected.notes):
        out.print(line, markup=False)


def _title(record: Record) -> str:
    settings = record.settings
    crowded = ", OVERSUBSCRIBED" if settings.get("oversubscribed") else ""
    return (
        f"{settings['numel']:,} float32 gradients in {settings['num_tensors']} tensors, "
        f"{settings['world_size']} {settings['backend']} ranks{crowded}\n{measured_on(record)}"
    )


COLUMNS: Columns = {
    "way": lambda record: record.way,
    "host, ms": lambda record: spread(record.quantiles),
    "over DDP, µs": lambda record: number(_times(record.figures["host_over_ddp"], 1e6), "+,.0f"),
    "launches": lambda record: number(record.figures["launches"], ".0f"),
    "group calls": lambda record: number(record.figures["group_calls"], ".0f"),
    "peak memory, MiB": lambda record: number(_times(record.figures["peak_memory"], 2**-20), ",.1f"),
    "memory over DDP, MiB": lambda record: number(_times(record.figures["memory_over_ddp"], 2**-20), "+,.1f"),
}
LEGEND = (
    "host: what the host takes for a backward with everything that makes its gradients the mean, median [p10, p90] of "
    "the slowest rank; on a GPU until all has been started, on a CPU until it is done. group calls: of the process "
    "group, from the threads of the step itself; on Gloo, a thread of the engine makes more of them. peak memory: of "
    "what torch allocates on the GPU, from the making of the model on, without weights, which all ways share."
)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
