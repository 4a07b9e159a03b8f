"""``python -m benchmarks sync``: what a step's gradient synchronisation costs, each way against the bare all_reduce.

A sample is the time of one backward with everything that makes its gradients the mean over the ranks: from a barrier to
the moment when the slowest rank has them. Of the bare all_reduce it is the time of that alone. All ways run in the same
processes and take turns, each with a model and a process group of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
import tyro

from benchmarks.collect import Collected, collect
from benchmarks.measure import TIMEOUT, Schedule, measure
from benchmarks.records import Record, RowFile
from benchmarks.table import Columns, console, milliseconds, progress_bars, spread, table
from benchmarks.ways import MIN_WARMUP, WAYS, left_out, with_their_limits
from benchmarks.workloads import SIZES
from fastsync.distributed import process_group

if TYPE_CHECKING:
    SizeName = str
    WayName = str
else:
    SizeName = tyro.extras.literal_type_from_choices(SIZES)
    WayName = tyro.extras.literal_type_from_choices(WAYS)


@dataclass(frozen=True)
class Options:
    """Measure what a step's gradient synchronisation costs: fastsync, its rivals and the limit, taking turns."""

    sizes: tuple[SizeName, ...] = tuple(SIZES)
    """Models, by their number of parameters."""
    nproc: int = 2
    """Number of ranks, each a process of its own on this machine."""
    ways: tuple[WayName, ...] = tuple(WAYS)
    """Ways to synchronise. no_sync and the bare all_reduce of what they send are always measured as well."""
    repetitions: int | None = None
    """Samples of each way; by default 300, 100 and 20 for the three sizes."""
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
            raise ValueError(f"sizes: choose at least one of {', '.join(SIZES)}")
        if self.nproc < 1:
            raise ValueError(f"nproc={self.nproc} must be at least 1")
        if self.repetitions is not None and self.repetitions < 1:
            raise ValueError(f"repetitions={self.repetitions} must be at least 1")
        if self.warmup < MIN_WARMUP:
            raise ValueError(f"warmup={self.warmup} must be at least {MIN_WARMUP}: DDP and PowerSGD start up that long")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"json={self.json}: there is no folder {self.json.parent}")


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0, or 1 if a way gave a wrong result or a rank failed.
    """
    options = tyro.cli(Options, prog="python -m benchmarks sync", args=arguments)
    collected = collect(measure_all, options.nproc, options, options.json)
    report(collected)
    return collected.status


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""
    with process_group(options.timeout) as device:
        names = with_their_limits(options.ways)
        excluded = left_out(names, dist.get_backend())
        names = [name for name in names if name not in excluded]
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            for size in dict.fromkeys(options.sizes):
                repetitions = options.repetitions or SIZES[size].repetitions
                schedule = Schedule(options.warmup, repetitions, options.seed, options.timeout)
                records = measure(size, names, schedule, device, progress)
                if dist.get_rank() == 0:
                    rows.add(records)
    return [f"{name} is left out: {reason}" for name, reason in excluded.items()]


def report(collected: Collected) -> None:
    """Prints a table for each size."""
    out = console()
    for size in dict.fromkeys(record.settings["size"] for record in collected.records):
        rows = [record for record in collected.records if record.settings["size"] == size]
        out.print(table(_title(rows[0]), COLUMNS, rows))
    for line in (LEGEND, *collected.notes):
        out.print(line, markup=False)


COLUMNS: Columns = {
    "way": lambda record: record.way,
    "step, ms": lambda record: spread(record.quantiles),
    "over no_sync, ms": lambda record: milliseconds(record.figures["over_no_sync"]),
    "× all_reduce": lambda record: _number(record.figures["over_all_reduce"], ".2f"),
    "own share": lambda record: _number(record.figures["own_share"], "+.0%"),
    "exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "pack, ms": lambda record: milliseconds(record.figures["pack_time"]),
    "unpack, ms": lambda record: milliseconds(record.figures["unpack_time"]),
    "wire bytes": lambda record: _number(record.figures["wire_bytes"], ",.0f"),
    "error": lambda record: _number(record.figures["error"], ".1e"),
}
LEGEND = (
    "step: median [p10, p90] of the slowest rank. over no_sync: what the median adds to no_sync's; × all_reduce: that "
    "over the bare all_reduce of the same dtype; own share: what it is more. exposed, pack, unpack, wire bytes: per "
    "step and rank, as the engine counts them. error: relative, in the 2-norm, of the last step alone; PowerSGD "
    "catches up in later steps with what it leaves out of one, and random gradients are its worst case."
)


def _title(record: Record) -> str:
    settings, where = record.settings, record.environment
    return (
        f"{settings['numel']:,} float32 gradients in {settings['num_tensors']} tensors, {settings['world_size']} "
        f"{settings['backend']} ranks, {settings['repetitions']} repetitions\n"
        f"{where['gpu'] or where['cpu']}, {where['cores']} cores, torch {where['torch']}, fastsync {where['commit']}"
    )


def _number(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
