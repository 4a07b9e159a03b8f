"""``python -m benchmarks sync``: what a step's gradient synchronisation costs, each way against the bare all_reduce.

A sample is the time of one backward with everything that makes its gradients the mean over the ranks: from a barrier to
the moment when the slowest rank has them. Of the bare all_reduce it is the time of that alone. All ways run in the same
processes and take turns, each with a model and a process group of its own.

Sizes are models or bytes of gradients; ``--sweep 1KiB 1GiB`` goes through bytes as nccl-tests does, whose algbw and
busbw are given.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import tyro

from benchmarks.busy import busy_processes
from benchmarks.choices import against_the_best
from benchmarks.collect import Collected, check_places, collect, places
from benchmarks.measure import TIMEOUT, Schedule, measure, memory_needed
from benchmarks.memory import check_ranks_fit
from benchmarks.records import Record, RowFile
from benchmarks.table import Columns, console, measured_on, milliseconds, number, progress_bars, spread, table
from benchmarks.ways import BY_DEFAULT, MIN_WARMUP, WAYS, left_out, with_their_limits
from benchmarks.workloads import SIZES, Size, size_of, sweep
from fastsync.distributed import process_group

if TYPE_CHECKING:
    WayName = str
else:
    WayName = tyro.extras.literal_type_from_choices(WAYS)


@dataclass(frozen=True)
class Options:
    """Measure what a step's gradient synchronisation costs: fastsync, its rivals and the limit, taking turns."""

    sizes: tuple[str, ...] = tuple(SIZES)
    """Models by their number of parameters (5k, 0.5m, 12m), or bytes of float32 gradients (1KiB, 25MiB, 1GiB) in 16
    about equal matrices."""
    sweep: tuple[str, str] | None = None
    """First and last of a series of sizes in bytes, such as 1KiB 1GiB, in place of sizes."""
    factor: int = 4
    """Each size of the sweep by the one before; the last one may be less."""
    nproc: int = 2
    """Number of ranks, each a process of its own on this machine."""
    cpu: bool = False
    """Compute on CPUs where there are GPUs, too."""
    oversubscribe: bool = False
    """Allow more ranks than there are cores or GPUs; every table says so."""
    share_gpus: bool = False
    """Let ranks share GPUs where there are fewer, rather than compute on the CPU. They take turns there: it shows that
    everything works, and nothing of how it scales."""
    busy: int = 0
    """Processes that never sleep, beside the ranks, as environment workers and data loaders may be."""
    ways: tuple[WayName, ...] = BY_DEFAULT
    """Ways to synchronise; by default all that neither fix an algorithm nor choose by measurement. no_sync and the bare
    all_reduce of what they send are always measured as well."""
    repetitions: int | None = None
    """Samples of each way; by default 300, 100 and 20 for the three models, and for bytes as many as make 1 GiB of
    gradients, between 5 and 300."""
    warmup: int = 10
    """Steps of each way that are not timed."""
    json: Path | None = None
    """File to write all rows to, with every sample, the settings, versions and hardware."""
    seed: int = 0
    """Seeds the order of the ways, the weights and the gradients."""
    timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError(f"sizes: choose at least one of {', '.join(SIZES)}, or bytes such as 1MiB")
        if not self.ways:
            raise ValueError("ways: choose at least one, such as ddp or fastsync.attach/fp16")
        if self.factor < 2:
            raise ValueError(f"factor={self.factor} must be at least 2")
        if self.nproc < 1:
            raise ValueError(f"nproc={self.nproc} must be at least 1")
        check_places(self.nproc, self.oversubscribe, self.cpu, self.share_gpus)
        if self.busy < 0:
            raise ValueError(f"busy={self.busy} must be at least 0")
        if self.repetitions is not None and self.repetitions < 1:
            raise ValueError(f"repetitions={self.repetitions} must be at least 1")
        if self.warmup < MIN_WARMUP:
            raise ValueError(f"warmup={self.warmup} must be at least {MIN_WARMUP}: DDP and PowerSGD start up that long")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"json={self.json}: there is no folder {self.json.parent}")
        for name, size in self.all_sizes.items():
            needed = memory_needed(size, with_their_limits(self.ways), self.nproc)
            way_out = "choose fewer --ways or smaller sizes"
            check_ranks_fit(f"size {name}", needed, self.nproc, way_out, self.cpu, self.share_gpus)

    @property
    def all_sizes(self) -> dict[str, Size]:
        """What is measured, in order, by name."""
        names = self.sizes if self.sweep is None else sweep(*self.sweep, self.factor)
        return {name: size_of(name) for name in names}


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0, or 1 if a way gave a wrong result or a rank failed.
    """
    options = tyro.cli(Options, prog="python -m benchmarks sync", args=arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    with busy_processes(options.busy):
        collected = collect(measure_all, options.nproc, options, options.json)
    report(collected, by_way=options.sweep is not None)
    return collected.status


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""
    with process_group(options.timeout, share_gpus=options.share_gpus) as device:
        ways = with_their_limits(options.ways)
        excluded = left_out(ways, dist.get_backend())
        ways = [way for way in ways if way not in excluded]
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            for name, size in options.all_sizes.items():
                repetitions = options.repetitions or size.repetitions
                schedule = Schedule(options.warmup, repetitions, options.seed, options.timeout)
                records = measure(name, ways, schedule, device, progress)
                if options.nproc > places(options.nproc, options.cpu, options.share_gpus):
                    records = [_with_settings(record, oversubscribed=True) for record in records]
                if options.busy > 0:
                    records = [_with_settings(record, busy=options.busy) for record in records]
                if dist.get_rank() == 0:
                    rows.add(records)
    return [f"{way} is left out: {reason}" for way, reason in excluded.items()]


def report(collected: Collected, by_way: bool = False) -> None:
    """Prints a table for each size, with a row for each way; or the other way round."""
    out = console()
    if by_way:
        for way, rows in _groups(collected.records, lambda record: record.way):
            out.print(table(f"{way}, {_where(rows[0])}", COLUMNS_OF_A_WAY, rows))
    else:
        for _, rows in _groups(collected.records, lambda record: record.settings["size"]):
            out.print(table(_title(rows[0]), COLUMNS_OF_A_SIZE, rows))
            for line in against_the_best(rows):
                out.print(line, markup=False)
    for line in (LEGEND, *collected.notes):
        out.print(line, markup=False)


def _with_settings(record: Record, **settings: Any) -> Record:
    return replace(record, settings={**record.settings, **settings})


def _groups(records: Sequence[Record], key: Callable[[Record], str]) -> Iterator[tuple[str, list[Record]]]:
    for value in dict.fromkeys(map(key, records)):
        yield value, [record for record in records if key(record) == value]


FIGURES: Columns = {
    "step, ms": lambda record: spread(record.quantiles),
    "over no_sync, ms": lambda record: milliseconds(record.figures["over_no_sync"]),
    "algbw, GB/s": lambda record: _gigabytes(record.figures["algbw"]),
    "busbw, GB/s": lambda record: _gigabytes(record.figures["busbw"]),
    "× all_reduce": lambda record: number(record.figures["over_all_reduce"], ".2f"),
    "× ddp": lambda record: number(record.figures["over_ddp"], ".2f"),
    "× shared sum": lambda record: number(record.figures["over_shared_sum"], ".2f"),
    "exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "pack, ms": lambda record: milliseconds(record.figures["pack_time"]),
    "unpack, ms": lambda record: milliseconds(record.figures["unpack_time"]),
    "wire bytes": lambda record: number(record.figures["wire_bytes"], ",.0f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
COLUMNS_OF_A_SIZE: Columns = {"way": lambda record: record.way} | FIGURES
COLUMNS_OF_A_WAY: Columns = {"size": lambda record: record.settings["size"]} | FIGURES
LEGEND = (
    "step: median [p10, p90] of the slowest rank. over no_sync: what the median adds to no_sync's; of the bare "
    "all_reduce, which has no backward, all of it. algbw: bytes of float32 gradients, compressed or not, by over "
    "no_sync; busbw: algbw · 2(n − 1)/n. × all_reduce: over no_sync, over the bare all_reduce of the same dtype; "
    "× ddp: over what DDP adds; × shared sum: over a bare sum in memory that the ranks share. exposed, pack, unpack, "
    "wire bytes: per "
    "step and rank, as the engine counts them. error: relative, in the 2-norm, of the last step alone; PowerSGD "
    "catches up in later steps with what it leaves out of one, and random gradients are its worst case. It sends "
    "something else than the gradients, in one bucket, as it would mix up two on Gloo, so that backward hides nothing."
)


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['numel']:,} float32 gradients in {settings['num_tensors']} tensors, "
        f"{settings['repetitions']} repetitions, {_where(record)}"
    )


def _where(record: Record) -> str:
    settings = record.settings
    crowded = ", OVERSUBSCRIBED" if settings.get("oversubscribed") else ""
    crowded += f", {settings['busy']} busy processes beside them" if "busy" in settings else ""
    return f"{settings['world_size']} {settings['backend']} ranks{crowded}\n{measured_on(record)}"


def _gigabytes(rate: float | None) -> str:
    """Three digits: rates of small messages are small."""
    return "" if rate is None else f"{rate / 1e9:#.3g}"
